"""How much room a step had, and where it ran out: see memscale.estimation.oom.

From the error's text and traceback, the device, and the estimate of the step.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from types import FrameType, TracebackType

import torch
from torch import nn

from memscale import hardware
from memscale._C import TraceError, parse_bytes
from memscale.estimation.estimate import Estimate, LayerShare
from memscale.model.layers import find_layers
from memscale.trace.optimizer_step import OptimizerLike
from memscale.trace.training_step import TrainingStep

__all__ = [
    "allocated_on",
    "available_bytes",
    "capacity_of",
    "device_of",
    "find_place",
    "has_state",
    "held_at",
    "others_hold",
    "read_message",
    "read_traceback",
    "resident",
]

# ---- what the error says ----

_SIZE = r"([\d.]+ (?:bytes|[KMGT]iB))"
_PATTERNS = {
    "requested": rf"Tried to allocate {_SIZE}",
    "capacity": rf"total capacity of {_SIZE}",
    "free": rf"of which {_SIZE} is free",
    "allowed": rf"{_SIZE} allowed",
    "allocated": rf"{_SIZE} is allocated by PyTorch",
    "reserved": rf"{_SIZE} is reserved by PyTorch but unallocated",
}


def read_message(text: str) -> dict[str, int]:
    """The sizes that torch's message has, as it rounded them."""
    found = {name: re.search(pattern, text) for name, pattern in _PATTERNS.items()}
    return {name: parse_bytes(match[1]) for name, match in found.items() if match}


def read_traceback(
    traceback: TracebackType | None, model: nn.Module
) -> tuple[str, str | None]:
    """The phase and, of a forward, the layer that the innermost frames are in."""
    names = {id(module): name for name, module in model.named_modules()}
    layers = find_layers(model).modules
    phase, layer = "forward", None
    for frame in _frames(traceback):
        file = frame.f_code.co_filename.replace("\\", "/")
        if "/torch/optim/" in file:
            phase = "optimizer"
        elif "/torch/autograd/" in file and frame.f_code.co_name == "backward":
            phase = "backward"
        name = names.get(id(frame.f_locals.get("self")))
        if name is not None:
            layer = _layer_of(name, layers)
    return phase, layer if phase == "forward" else None


def _frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _layer_of(name: str, layers: dict[str, nn.Module]) -> str:
    """The layer that a module belongs to: itself, or one around it."""
    while name and name not in layers:
        name = name.rpartition(".")[0]
    return name


# ---- how much room there was ----


def device_of(model: nn.Module) -> torch.device | None:
    for tensor in [*model.parameters(), *model.buffers()]:
        return tensor.device
    return None


def allocated_on(device: torch.device | None) -> int | None:
    """Bytes of tensors there now; None: unknown."""
    return torch.accelerator.memory_allocated(device) if _counts(device) else None


def capacity_of(
    device: torch.device | None,
    sizes: dict[str, int],
    asked: torch.device | str | hardware.DeviceSpec | None,
) -> int | None:
    """The memory of the model's device, else what the message or ``asked`` say."""
    if _counts(device):
        return int(torch.accelerator.get_memory_info(device)[1])
    if "capacity" in sizes:
        return sizes["capacity"]
    if isinstance(asked, hardware.DeviceSpec):
        return asked.memory
    known = {card.name: card.memory for card in hardware.known()}
    return known.get(str(asked))


def _counts(device: torch.device | None) -> bool:
    """Whether it is an accelerator, which knows its size and what it holds."""
    return device is not None and device.type not in ("cpu", "meta")


def available_bytes(sizes: dict[str, int], capacity: int | None) -> int | None:
    """What tensors can have: on a card less than all, its context takes some."""
    available = capacity
    if {"free", "allocated", "reserved"} <= sizes.keys():
        available = sizes["free"] + sizes["allocated"] + sizes["reserved"]
    if "allowed" in sizes:
        available = min(sizes["allowed"], available or sizes["allowed"])
    return available


def has_state(optimizer: OptimizerLike) -> bool | None:
    """Whether it has stepped before; None: unknown."""
    if optimizer is None:
        return True
    if not isinstance(optimizer, torch.optim.Optimizer):
        return None
    trained = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    ]
    if 0 < len(optimizer.state) < len(trained):
        return None  # some are never used, or the first step failed midway
    return len(optimizer.state) > 0


_RESIDENT = ("parameters", "buffers", "inputs", "optimizer_state")


def resident(made: Estimate, kept: Iterable[str] = _RESIDENT) -> int:
    """What is held between steps."""
    held = made.timeline[0].by_category
    return sum(held[name] for name in kept)


def others_hold(
    made: Estimate, step: TrainingStep, before: int, had_state: bool
) -> int:
    """Bytes of the device that were held ``before`` the step, and not by it."""
    kept = ["parameters", "buffers"]
    if had_state:
        kept.append("optimizer_state")
    device = device_of(step.model)
    if any(tensor.device == device for tensor in step.call.tensors()):
        kept.append("inputs")
    return max(0, before - resident(made, kept))


# ---- where it runs out ----


def find_place(
    made: Estimate, available: int | None, seen_phase: str, had_state: bool | None
) -> tuple[bool, int]:
    """Whether it was the first step, and the first op that does not find room.

    In the phase that the traceback shows, if the estimate runs out there; else
    anywhere; else the peak.
    """
    candidates = [True, False] if had_state is None else [not had_state]
    if available is not None:
        places = [
            (first_step, index)
            for first_step in candidates
            for index in range(len(made.timeline))
            if _bytes_at(made, index, first_step) > available
        ]
        seen = [place for place in places if made.trace[place[1]].phase == seen_phase]
        if places:
            return (seen or places)[0]
    peak = made.timeline.peak()
    if peak is None:
        raise TraceError("the step has no op")
    return candidates[-1], peak.op


def _bytes_at(made: Estimate, index: int, first_step: bool) -> int:
    """What the op of that index needs."""
    held = made.timeline[index].by_category
    return sum(_at_step(held, made, index, first_step).values())


def held_at(
    made: Estimate, index: int, first_step: bool
) -> tuple[dict[str, int], list[LayerShare]]:
    """Bytes by category, and by layer, most first."""
    breakdown = _at_step(made.timeline[index].by_category, made, index, first_step)
    layers = []
    for name, _, held in made.timeline.by_layer(index):
        parts = _at_step(held, made, index, first_step)
        layers.append(LayerShare(name, sum(parts.values()), parts))
    layers.sort(key=lambda share: -share.bytes)
    return breakdown, [share for share in layers if share.bytes]


def _at_step(
    held: dict[str, int], made: Estimate, index: int, first_step: bool
) -> dict[str, int]:
    """The first step makes the optimizer's state, when the optimizer runs."""
    if first_step and made.trace[index].phase != "optimizer":
        return {**held, "optimizer_state": 0}
    return dict(held)
