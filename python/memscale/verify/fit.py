"""Does the plain step fit, and if not, what smaller one does: see memscale.verify."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from memscale import _C
from memscale._C import HardwareError, TraceError, format_bytes
from memscale.estimation.estimate import estimate_step
from memscale.estimation.oom_place import resident
from memscale.model.inputs import Call
from memscale.verify.step import Step, said

__all__ = ["Fit", "check_host", "predict", "shorter", "smaller", "sole_device"]


@dataclass(frozen=True)
class Fit:
    """Whether a step will fit. Unknown sizes are None."""

    needed: int | None = None  # beyond what is on the device already
    free: int | None = None
    rejected: str = ""  # what the model said to such a call
    unknown: str = ""  # why nothing is predicted

    @property
    def fits(self) -> bool | None:
        if self.needed is None or self.free is None:
            return None
        return self.needed <= self.free

    def __str__(self) -> str:
        if self.needed is None or self.free is None:
            return self.unknown
        needed, free = format_bytes(self.needed), format_bytes(self.free)
        return f"the plain step needs {needed} and {free} are free"


def predict(step: Step) -> Fit:
    """From the estimate of the plain step, and what is free on its device now."""
    if step.device is None:
        return Fit(unknown="the model is on several devices")
    if not step.config.use_static_profiling:
        return Fit(unknown="use_static_profiling is off")
    try:
        with step.executor.paused(), _unwrapped(step.model):
            made = estimate_step(step.training(), step.config, fallback=False)
    except TraceError as error:
        return Fit(unknown=str(error))
    except Exception as error:
        return Fit(rejected=said(error))
    # The inputs count: each run has copies of its own.
    needed = made.peak_bytes - resident(made, ("parameters", "buffers"))
    if step.device.type == "cpu":
        needed += _gradient_bytes(step)  # of the plain step's, kept
    return Fit(needed, _free_bytes(step.device))


@contextmanager
def _unwrapped(model: nn.Module) -> Iterator[None]:
    """What wraps the model is no part of the copy that is traced."""
    executor = vars(model).pop("_memscale_executor", None)
    try:
        yield
    finally:
        if executor is not None:
            vars(model)["_memscale_executor"] = executor


def check_host(step: Step) -> None:
    """Raise HardwareError if the host has no room for the copies that are made."""
    needed, free = _copies(step), _C.detect_host().available_memory
    if needed > free:
        raise HardwareError(
            "verification copies parameters and gradients to the host: "
            f"{format_bytes(needed)} are needed and {format_bytes(free)} available"
        )


def _copies(step: Step) -> int:
    """Every parameter and buffer once, to restore it; every gradient once."""
    held = [tensor for _, tensor in (*step.parameters(), *step.buffers())]
    return sum(t.numel() * t.itemsize for t in held) + _gradient_bytes(step)


def _gradient_bytes(step: Step) -> int:
    trainable = [p for _, p in step.parameters() if p.requires_grad]
    return sum(p.numel() * p.itemsize for p in trainable)


def _free_bytes(device: torch.device) -> int | None:
    if device.type == "cpu":
        return _C.detect_host().available_memory
    try:
        free = int(torch.accelerator.get_memory_info(device)[0])
        reserved = torch.accelerator.memory_reserved(device)
        return free + reserved - torch.accelerator.memory_allocated(device)
    except (RuntimeError, NotImplementedError):
        return None


# ---- smaller calls ----


def smaller(call: Call) -> Iterator[tuple[str, Call]]:
    """The call with half the batch, a quarter …: "batch 2 of 16" and the call."""
    full = _batch(call)
    for size in _halves(full):
        yield f"batch {size} of {full}", _cut(call, {0: full}, size)


def shorter(call: Call) -> Iterator[tuple[str, Call]]:
    """The call with half the sequence, a quarter …"""
    full = _length(call)
    for size in _halves(full):
        cut = _cut(call, {1: full, 2: full, 3: full}, size)
        yield f"sequence {size} of {full}", cut


def _halves(full: int) -> Iterator[int]:
    while full > 1:
        full //= 2
        yield full


def _batch(call: Call) -> int:
    """The first dimension of the first tensor that has one."""
    return next((t.shape[0] for t in call.tensors() if t.dim()), 1)


def _length(call: Call) -> int:
    """The second dimension of token ids, else of what has features as its third."""
    tensors = call.tensors()
    ids = [t for t in tensors if t.dim() >= 2 and not t.is_floating_point()]
    features = [t for t in tensors if t.dim() == 3]
    return next((t.shape[1] for t in (*ids, *features)), 1)


def _cut(call: Call, full: dict[int, int], size: int) -> Call:
    """All tensors cut where they have that size.

    Features that happen to be as many as the sequence is long stay: a dimension
    beyond the second is cut in masks, which are not of numbers, or have four.
    """

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        mask = tensor.dim() == 4 or not tensor.is_floating_point()
        for dim, length in full.items():
            if dim < tensor.dim() and tensor.shape[dim] == length and (dim < 2 or mask):
                tensor = tensor.narrow(dim, 0, size)
        return tensor

    return call.map_tensors(cut)


def sole_device(model: nn.Module) -> torch.device | None:
    """Where the model is; None if it is in several places."""
    devices = {t.device for t in (*model.parameters(), *model.buffers())}
    if not devices:
        return torch.device("cpu")
    return devices.pop() if len(devices) == 1 else None
