"""``torch.sim``: what torch and its users expect to find in a device's module.

Registered by :func:`memscale.simdev.enable`; not meant to be imported directly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.accelerator import (
    empty_cache,
    max_memory_allocated,
    max_memory_reserved,
    memory_allocated,
    memory_reserved,
    memory_stats,
    reset_accumulated_memory_stats,
    reset_peak_memory_stats,
)

from memscale import _simdev

__all__ = [
    "current_device",
    "device",
    "device_count",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "initial_seed",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "set_device",
    "set_rng_state",
    "synchronize",
]

default_generators = (_simdev.default_generator(),)
# torch.utils.checkpoint stashes the random state only of a module that says so.
_initialized = True


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _lazy_init() -> None:
    pass


def _is_in_bad_fork() -> bool:
    # Host memory survives a fork: children may use the device.
    return False


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(device: Any) -> None:
    index = torch.device(device).index if not isinstance(device, int) else device
    torch.accelerator.set_device_index(index or 0)


@contextlib.contextmanager
def device(device: Any) -> Iterator[None]:
    set_device(device)
    yield


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize()


def get_device_name(device: Any = None) -> str:
    return "Simulated accelerator"


def get_device_properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name=get_device_name(), total_memory=_simdev.capacity(), major=0, minor=0
    )


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and total bytes."""
    return torch.accelerator.get_memory_info()


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def manual_seed(seed: int) -> None:
    default_generators[0].manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    manual_seed(seed)


def initial_seed() -> int:
    return default_generators[0].initial_seed()


def get_rng_state(device: Any = "sim") -> torch.Tensor:
    return default_generators[0].get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "sim") -> None:
    default_generators[0].set_state(new_state)
