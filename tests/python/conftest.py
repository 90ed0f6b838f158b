"""Fixtures. The simulated device is loaded once; tests resize it as they need."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator

# Some virtual machines advertise AMX and trap its use; torch's bf16 matmul
# would die there. Read when torch is first imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import pytest
import torch

from memscale import simdev


@pytest.fixture(scope="session", autouse=True)
def _sim_from_the_start() -> None:
    """torch counts devices at a process's first backward: later ones have no queue."""
    simdev.enable(memory="4GiB")


@pytest.fixture
def sim_of() -> Iterator[Callable[[int | str], torch.device]]:
    """A function that gives an empty simulated device of the size asked for."""

    def collect() -> None:
        if not hasattr(torch, "sim"):
            return
        # Exceptions keep tensors in cycles (collecting always would cost 0.1 s a
        # test); autograd's thread may still be letting go of its last one.
        for attempt in range(20):
            if torch.accelerator.memory_allocated() == 0:
                return
            if attempt == 5:  # untouched_process may have frozen an earlier test's
                gc.unfreeze()
            gc.collect()
            time.sleep(0.01)

    def make(memory: int | str) -> torch.device:
        collect()
        return simdev.enable(memory=memory)

    yield make
    collect()


@pytest.fixture
def sim(sim_of: Callable[[int | str], torch.device]) -> torch.device:
    """The simulated device with plenty of memory, empty, its peak reset."""
    device = sim_of("4GiB")
    assert torch.accelerator.memory_allocated() == 0, (
        "an earlier test left (or failed with) tensors"
    )
    torch.accelerator.reset_peak_memory_stats()
    return device


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch on one thread: with many small operators, more only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
