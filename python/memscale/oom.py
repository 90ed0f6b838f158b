"""Why a step ran out of memory, and what would help.

::

    with memscale.explain_oom(model, batch, optimizer=optimizer):
        model(**batch).loss.backward()
        optimizer.step()

If the block raises torch.OutOfMemoryError, the report is added to the exception as
a note and the exception goes on. Or, where the exception has been caught already::

    print(memscale.explain_oom(error, model, batch, optimizer=optimizer))

The report is made from estimates (memscale.estimator), so nothing is allocated on
the device.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, overload

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from memscale import hardware
from memscale._C import TraceError, format_bytes, parse_bytes
from memscale._optimizer_step import OptimizerLike
from memscale.config import Config
from memscale.estimator import Estimate, LayerShare, estimate
from memscale.inputs import LossFn
from memscale.layers import find_layers
from memscale.report import (
    WIDTH,
    breakdown_table,
    exact,
    fields,
    layer_label,
    layer_table,
    place,
    table,
)

__all__ = ["OomContext", "OomReport", "Option", "explain_oom"]

Device = torch.device | str | hardware.DeviceSpec | None

# A 32-bit state in 8 bits.
_EIGHT_BIT_SAVES = 3 / 4


@dataclass(frozen=True)
class Option:
    """A change, and the step's peak with it."""

    change: str
    peak_bytes: int
    frees: int  # against the peak as it is
    fits: bool | None  # None: the device's size is not known
    approximate: bool = False


@dataclass(frozen=True)
class OomReport:
    """Where a step runs out of memory, who holds it, and what would free it.

    ``phase``, ``op``, ``layer``: the first op that does not find room, by the
    estimate; its peak if the estimate fits. ``breakdown`` and ``layers``: who holds
    the bytes there. ``seen_phase`` and ``seen_layer``: what the traceback says.
    """

    estimate: Estimate
    requested: int | None  # of the allocation that failed
    capacity: int | None  # of the device
    others: int | None  # held on it by none of model, batch, optimizer; None: unknown
    available: int | None  # for the step: what neither others nor the system hold
    first_step: bool  # before the optimizer has its state
    phase: str | None
    op: str | None
    layer: str | None
    bytes: int
    breakdown: dict[str, int]
    layers: list[LayerShare]
    seen_phase: str
    seen_layer: str | None
    allocated: int | None  # when the report was made
    options: list[Option]

    @property
    def excess(self) -> int | None:
        """How much more the failing op needs than there is; None: it fits."""
        if self.available is None or self.bytes <= self.available:
            return None
        return self.bytes - self.available

    @property
    def fits(self) -> bool | None:
        """What the estimate says of the step; None: the device's size is unknown."""
        return None if self.available is None else self.excess is None

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and texts."""
        made = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {
            **made,
            "estimate": self.estimate.to_dict(),
            "excess": self.excess,
            "fits": self.fits,
            "layers": [dict(vars(share)) for share in self.layers],
            "options": [dict(vars(option)) for option in self.options],
        }

    def __str__(self) -> str:
        return _text(self)


@overload
def explain_oom(
    error: torch.OutOfMemoryError,
    model: nn.Module,
    sample_input: Any = None,
    optimizer: OptimizerLike = "adamw",
    loss_fn: LossFn | None = None,
    device: Device = None,
) -> OomReport: ...


@overload
def explain_oom(
    model: nn.Module,
    sample_input: Any = None,
    optimizer: OptimizerLike = "adamw",
    loss_fn: LossFn | None = None,
    device: Device = None,
) -> OomContext: ...


def explain_oom(*args: Any, **kwargs: Any) -> Any:
    """Explain a caught OutOfMemoryError, or those of a ``with`` block.

    ``explain_oom(error, model, …)`` returns an OomReport. ``with explain_oom(model,
    …) as watch:`` adds the report to an OutOfMemoryError of the block as a note,
    lets the error go on, and keeps it as ``watch.report``. The other arguments are
    memscale.estimate's; pass the optimizer itself, not its name, so that it is
    known whether it has its state.
    """
    first = args[0] if args else kwargs.get("error")
    if isinstance(first, BaseException):
        return _explain(*args, **kwargs)
    return OomContext(*args, **kwargs)


class OomContext:
    """What ``with explain_oom(model, …)`` gives; ``report`` is None without an OOM."""

    def __init__(
        self,
        model: nn.Module,
        sample_input: Any = None,
        optimizer: OptimizerLike = "adamw",
        loss_fn: LossFn | None = None,
        device: Device = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                "the first argument must be a torch.nn.Module or an "
                f"OutOfMemoryError, got {type(model).__name__}"
            )
        self.report: OomReport | None = None
        self._step = _Step(model, sample_input, optimizer, loss_fn, device)
        self._before: int | None = None
        self._had_state: bool | None = None

    def __enter__(self) -> OomContext:
        self.report = None
        self._before = _allocated(self._step.model)
        self._had_state = _has_state(self._step.optimizer)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Literal[False]:
        if isinstance(error, torch.OutOfMemoryError):
            try:
                self.report = _report(error, self._step, self._before, self._had_state)
                error.add_note(str(self.report))
            except Exception as why:  # the user's error matters more than ours
                error.add_note(
                    f"memscale cannot explain this: {type(why).__name__}: {why}"
                )
        return False


def _explain(
    error: torch.OutOfMemoryError,
    model: nn.Module,
    sample_input: Any = None,
    optimizer: OptimizerLike = "adamw",
    loss_fn: LossFn | None = None,
    device: Device = None,
) -> OomReport:
    if not isinstance(error, torch.OutOfMemoryError):
        raise TypeError(
            f"error must be a torch.OutOfMemoryError, got {type(error).__name__}"
        )
    step = _Step(model, sample_input, optimizer, loss_fn, device)
    return _report(error, step, None, _has_state(optimizer))


@dataclass(frozen=True)
class _Step:
    """What is estimated, with and without a change."""

    model: nn.Module
    sample: Any
    optimizer: OptimizerLike
    loss_fn: LossFn | None
    device: Device

    def estimate(self, **changes: Any) -> Estimate:
        step = replace(self, **changes)
        return estimate(
            step.model,
            step.sample,
            step.optimizer,
            # A real step is what has just failed.
            Config(use_empirical_fallback=False),
            step.loss_fn,
            device=step.device,
        )


def _report(
    error: torch.OutOfMemoryError,
    step: _Step,
    before: int | None,
    had_state: bool | None,
) -> OomReport:
    numbers = _read_message(str(error))
    seen_phase, seen_layer = _read_traceback(error.__traceback__, step.model)
    made = step.estimate()
    capacity = _capacity(numbers, step)
    available = _available(numbers, capacity)
    others = None
    if before is not None:
        if had_state is None:
            had_state = before >= _resident(made)
        others = _others(made, step, before, had_state)
        if available is not None:
            available = max(0, available - others)
    first_step, index = _find_place(made, available, seen_phase, had_state)
    breakdown, layers = _held(made, index, first_step)
    op = made.trace[index]
    return OomReport(
        estimate=made,
        requested=numbers.get("requested"),
        capacity=capacity,
        others=others,
        available=available,
        first_step=first_step,
        phase=op.phase,
        op=op.name,
        layer=op.layer,
        bytes=sum(breakdown.values()),
        breakdown=breakdown,
        layers=layers,
        seen_phase=seen_phase,
        seen_layer=seen_layer,
        allocated=_allocated(step.model),
        options=_options(step, made, available),
    )


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


def _read_message(text: str) -> dict[str, int]:
    """The sizes that torch's message has, as it rounded them."""
    found = {name: re.search(pattern, text) for name, pattern in _PATTERNS.items()}
    return {
        name: parse_bytes(match[1])
        for name, match in found.items()
        if match is not None
    }


def _capacity(numbers: dict[str, int], step: _Step) -> int | None:
    device = _device_of(step.model)
    if device is not None and device.type not in ("cpu", "meta"):
        return int(torch.accelerator.get_memory_info(device)[1])
    if "capacity" in numbers:
        return numbers["capacity"]
    if isinstance(step.device, hardware.DeviceSpec):
        return step.device.memory
    known = {card.name: card.memory for card in hardware.known()}
    return known.get(str(step.device))


def _available(numbers: dict[str, int], capacity: int | None) -> int | None:
    """What tensors can have: on a card less than all, its context takes some."""
    available = capacity
    if {"free", "allocated", "reserved"} <= numbers.keys():
        available = numbers["free"] + numbers["allocated"] + numbers["reserved"]
    if "allowed" in numbers:
        available = min(numbers["allowed"], available or numbers["allowed"])
    return available


def _read_traceback(
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


def _frames(traceback: TracebackType | None) -> Iterator[Any]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _layer_of(name: str, layers: dict[str, nn.Module]) -> str:
    """The layer that a module belongs to: itself, or one around it."""
    while name and name not in layers:
        name = name.rpartition(".")[0]
    return name


# ---- what is on the device ----


def _device_of(model: nn.Module) -> torch.device | None:
    for tensor in [*model.parameters(), *model.buffers()]:
        return tensor.device
    return None


def _allocated(model: nn.Module) -> int | None:
    device = _device_of(model)
    if device is None or device.type in ("cpu", "meta"):
        return None
    return torch.accelerator.memory_allocated(device)


def _has_state(optimizer: OptimizerLike) -> bool | None:
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


def _resident(made: Estimate) -> int:
    """What is held between steps."""
    held = made.timeline[0].by_category
    kept = ("parameters", "buffers", "inputs", "optimizer_state")
    return sum(held[name] for name in kept)


def _others(made: Estimate, step: _Step, before: int, had_state: bool) -> int:
    """Bytes of the device that were held before the step, and not by it."""
    held = made.timeline[0].by_category
    own = held["parameters"] + held["buffers"]
    if had_state:
        own += held["optimizer_state"]
    device = _device_of(step.model)
    tensors = [
        leaf
        for leaf in pytree.tree_leaves(step.sample)
        if isinstance(leaf, torch.Tensor)
    ]
    if any(tensor.device == device for tensor in tensors):
        own += held["inputs"]
    return max(0, before - own)


# ---- where it runs out ----


def _find_place(
    made: Estimate, available: int | None, seen_phase: str, had_state: bool | None
) -> tuple[bool, int]:
    """Whether it was the first step, and the first op that does not find room.

    In the phase that the traceback shows, if the estimate runs out there; else
    anywhere; else the peak.
    """
    candidates = [True, False] if had_state is None else [not had_state]
    if available is not None:
        for phases in ({seen_phase}, {"forward", "backward", "optimizer"}):
            for first_step in candidates:
                for index in range(len(made.timeline)):
                    if made.trace[index].phase not in phases:
                        continue
                    if _bytes_at(made, index, first_step) > available:
                        return first_step, index
    peak = made.timeline.peak()
    if peak is None:
        raise TraceError("the step has no op")
    return candidates[-1], peak.op


def _bytes_at(made: Estimate, index: int, first_step: bool) -> int:
    """What the op of that index needs."""
    instant = made.timeline[index]
    size: int = instant.bytes
    if _lacks_state(made, index, first_step):
        size -= instant.by_category["optimizer_state"]
    return size


def _lacks_state(made: Estimate, index: int, first_step: bool) -> bool:
    """The first step makes the optimizer's state, when the optimizer runs."""
    return first_step and made.trace[index].phase != "optimizer"


def _held(
    made: Estimate, index: int, first_step: bool
) -> tuple[dict[str, int], list[LayerShare]]:
    breakdown = dict(made.timeline[index].by_category)
    layers = [LayerShare(*share) for share in made.timeline.by_layer(index)]
    if _lacks_state(made, index, first_step):
        breakdown["optimizer_state"] = 0
        layers = [_without_state(share) for share in layers]
        layers.sort(key=lambda share: -share.bytes)
    return breakdown, [share for share in layers if share.bytes]


def _without_state(share: LayerShare) -> LayerShare:
    state = share.by_category["optimizer_state"]
    parts = {**share.by_category, "optimizer_state": 0}
    return LayerShare(share.name, share.bytes - state, parts)


# ---- what would help ----


def _options(step: _Step, made: Estimate, available: int | None) -> list[Option]:
    """Changes that free something, most first: each estimated, but 8-bit states."""
    peak = made.peak_bytes

    def option(change: str, new_peak: int, approximate: bool = False) -> Option:
        fits = None if available is None else new_peak <= available
        return Option(change, new_peak, peak - new_peak, fits, approximate)

    found = []
    for change, make in (
        ("recompute the repeated blocks in backward (checkpointing)", _checkpointed),
        ("parameters, inputs and optimizer state in bfloat16", _in_bfloat16),
        ("SGD without momentum", _with_sgd),
    ):
        changed = _try_estimate(step, make)
        if changed is not None:
            found.append(option(change, changed.peak_bytes))
    state = made.breakdown.get("optimizer_state", 0)
    saved = int(state * _EIGHT_BIT_SAVES)
    found.append(option("optimizer state in 8 bits", peak - saved, approximate=True))
    found.extend(_smaller_batches(step, option))
    found = [entry for entry in found if entry.frees > 0]
    return sorted(found, key=lambda entry: -entry.frees)


def _try_estimate(
    step: _Step, change: Callable[[_Step], dict[str, Any] | None]
) -> Estimate | None:
    try:
        changes = change(step)
        return None if changes is None else step.estimate(**changes)
    except Exception:  # not for this model: one option less
        return None


def _smaller_batches(step: _Step, option: Callable[..., Option]) -> list[Option]:
    """Half the batch and, if that does not fit, the largest half of it that does."""
    found: list[Option] = []
    full = size = _batch_size(step.sample)
    while size is not None and size > 1:
        size //= 2
        smaller = _first_rows(step.sample, size)
        changed = _try_estimate(step, lambda _, s=smaller: {"sample": s})  # type: ignore[misc]
        if changed is None:
            break
        entry = option(f"batch {full} -> {size}", changed.peak_bytes)
        if not found or entry.fits:
            found.append(entry)
        if entry.fits is not False:
            break
    return found


def _batch_size(sample: Any) -> int | None:
    """The first dimension, if all tensors of the sample have the same one."""
    tensors = [
        leaf for leaf in pytree.tree_leaves(sample) if isinstance(leaf, torch.Tensor)
    ]
    sizes = {tensor.shape[0] if tensor.dim() else None for tensor in tensors}
    return sizes.pop() if len(sizes) == 1 else None


def _first_rows(sample: Any, count: int) -> Any:
    def cut(tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor.detach()[:count]
        if tensor.is_floating_point():
            return torch.empty_like(rows, device="meta")
        return rows.cpu().clone()  # its values may matter

    return pytree.tree_map_only(torch.Tensor, cut, sample)


def _with_sgd(step: _Step) -> dict[str, Any] | None:
    return None if step.optimizer is None else {"optimizer": "sgd"}


def _checkpointed(step: _Step) -> dict[str, Any] | None:
    model = _meta_copy(step.model)
    layers = find_layers(model)
    blocks = [layers.modules[name] for row in layers.rows for name in row]
    for block in blocks:
        block.forward = functools.partial(  # type: ignore[method-assign]
            checkpoint, block.forward, use_reentrant=False
        )
    return {**_on_copy(step), "model": model} if blocks else None


def _in_bfloat16(step: _Step) -> dict[str, Any] | None:
    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        return torch.empty_like(tensor, dtype=torch.bfloat16, device="meta")

    model = _meta_copy(step.model, torch.bfloat16)
    sample = pytree.tree_map_only(torch.Tensor, convert, step.sample)
    return {**_on_copy(step), "model": model, "sample": sample}


def _on_copy(step: _Step) -> dict[str, Any]:
    """The same optimizer and device for a copy of the model on meta."""
    return {
        "optimizer": _same_kind(step.optimizer),
        "device": step.device if step.device is not None else _device_of(step.model),
    }


def _same_kind(optimizer: OptimizerLike) -> OptimizerLike:
    """What makes an optimizer of the same class and settings."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    accepted = inspect.signature(type(optimizer)).parameters
    settings = {k: v for k, v in optimizer.defaults.items() if k in accepted}
    return functools.partial(type(optimizer), **settings)


def _meta_copy(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy without bytes, its floating point tensors of ``dtype``."""
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        kind = dtype if tensor.is_floating_point() else None
        made = torch.empty_like(tensor, dtype=kind, device="meta")
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, tensor.requires_grad)
        memo[id(tensor)] = made
    return copy.deepcopy(model, memo)


# ---- text ----


def _text(report: OomReport) -> str:
    parts = [
        _headline(report),
        "Held at that op\n" + breakdown_table(report.breakdown),
        "Most of it\n" + layer_table(report.layers),
        _options_text(report),
    ]
    return "\n\n".join(parts)


def _headline(report: OomReport) -> str:
    seen = report.seen_phase
    if seen == "forward":
        seen += f" of {layer_label(report.seen_layer)}"
    rows = {
        "asked for": report.requested and format_bytes(report.requested),
        "failed in": f"{seen} (from the traceback)",
        "device": report.capacity and exact(report.capacity),
        "others hold": report.others
        and f"{exact(report.others)}, in tensors of neither model, batch nor optimizer",
        "for the step": report.available is not None and exact(report.available),
        "its peak": f"{exact(report.estimate.peak_bytes)} by the estimate",
    }
    return (
        "MemScale: why this step ran out of memory\n"
        + fields({name: str(text) for name, text in rows.items() if text})
        + "\n\n"
        + "\n".join(textwrap.fill(text, WIDTH) for text in _verdict(report))
    )


def _verdict(report: OomReport) -> list[str]:
    where = place(report.phase, report.op, report.layer)
    if report.available is None:
        return [f"The size of the device is unknown. The peak is in {where}."]
    if report.excess is None:
        return _fitting(report, where)
    step = "the first step" if report.first_step else "a step"
    lines = [
        f"By the estimate {step} runs out in {where}: it needs "
        f"{exact(report.bytes)}, {exact(report.excess)} too much."
    ]
    if report.phase != report.seen_phase:
        lines.append(
            f"The traceback says {report.seen_phase}: the device holds more or less "
            "than the estimate knows of."
        )
    return lines


def _fitting(report: OomReport, where: str) -> list[str]:
    lines = [
        f"By the estimate this step fits; its most is {exact(report.bytes)}, in "
        f"{where}. Then other tensors hold memory, or the free memory is in pieces, "
        "or the step does what the sample, loss and optimizer given here do not."
    ]
    if report.allocated is not None:
        resident = format_bytes(_resident(report.estimate))
        lines.append(
            f"Allocated now are {format_bytes(report.allocated)}; model, batch and "
            f"optimizer state are {resident} of it at most."
        )
    return lines


def _options_text(report: OomReport) -> str:
    if not report.options:
        return "No change that MemScale knows frees anything here."
    rows = [
        (
            option.change,
            ("about " if option.approximate else "") + format_bytes(option.frees),
            _fits_text(option.fits),
        )
        for option in report.options
    ]
    return "What would lower the peak, each alone\n" + table(rows, "<><")


def _fits_text(fits: bool | None) -> str:
    if fits is None:
        return ""
    return "then it fits" if fits else "not enough alone"
