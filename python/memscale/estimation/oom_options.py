"""What would lower the peak of a step, and by how much: see memscale.estimation.oom."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memscale.config import Config
from memscale.estimation.estimate import Estimate, estimate_step
from memscale.model.inputs import Call
from memscale.model.layers import find_layers
from memscale.trace.optimizer_step import OptimizerLike
from memscale.trace.training_step import TrainingStep

__all__ = ["Option", "estimate_plain", "find_options"]

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


def estimate_plain(step: TrainingStep) -> Estimate:
    # A real step is what has just failed.
    return estimate_step(step, Config(use_empirical_fallback=False))


# A step with a change; None: it does not apply.
Change = Callable[[TrainingStep], TrainingStep | None]


def find_options(
    step: TrainingStep, made: Estimate, available: int | None
) -> list[Option]:
    """Changes that free something, most first: each estimated, but 8-bit states."""
    peak = made.peak_bytes

    def option(change: str, new_peak: int, approximate: bool = False) -> Option:
        fits = None if available is None else new_peak <= available
        return Option(change, new_peak, peak - new_peak, fits, approximate)

    changes: dict[str, Change] = {
        "recompute the repeated blocks in backward (checkpointing)": _checkpointed,
        "parameters, inputs and optimizer state in bfloat16": _in_bfloat16,
        "SGD without momentum": _with_sgd,
    }
    found = []
    for text, change in changes.items():
        new_peak = _peak_after(change, step)
        if new_peak is not None:
            found.append(option(text, new_peak))
    saved = int(made.breakdown.get("optimizer_state", 0) * _EIGHT_BIT_SAVES)
    found.append(option("optimizer state in 8 bits", peak - saved, approximate=True))
    found.extend(_smaller_batches(step, option))
    found = [entry for entry in found if entry.frees > 0]
    return sorted(found, key=lambda entry: -entry.frees)


def _peak_after(change: Change, step: TrainingStep) -> int | None:
    try:
        changed = change(step)
        return None if changed is None else estimate_plain(changed).peak_bytes
    except Exception:  # not for this model: one option less
        return None


# ---- a smaller batch ----


def _smaller_batches(
    step: TrainingStep, option: Callable[[str, int], Option]
) -> list[Option]:
    """Half the batch and, if that does not fit, the largest half of it that does."""
    found: list[Option] = []
    full = size = _batch_size(step.call)
    while size is not None and size > 1:
        size //= 2
        new_peak = _peak_after(functools.partial(_first_rows, count=size), step)
        if new_peak is None:
            break
        entry = option(f"batch {full} -> {size}", new_peak)
        if not found or entry.fits:
            found.append(entry)
        if entry.fits is not False:
            break
    return found


def _batch_size(call: Call) -> int | None:
    """The first dimension, if all tensors of the call have the same one."""
    sizes = {t.shape[0] if t.dim() else None for t in call.tensors()}
    return sizes.pop() if len(sizes) == 1 else None


def _first_rows(step: TrainingStep, count: int) -> TrainingStep:
    def cut(tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor.detach()[:count]
        if tensor.is_floating_point():
            return torch.empty_like(rows, device="meta")
        return rows.cpu().clone()  # its values may matter

    return replace(step, call=step.call.map_tensors(cut))


# ---- another model or optimizer ----


def _with_sgd(step: TrainingStep) -> TrainingStep | None:
    return None if step.optimizer is None else replace(step, optimizer="sgd")


def _checkpointed(step: TrainingStep) -> TrainingStep | None:
    changed = _on_meta(step)
    layers = find_layers(changed.model)
    blocks = [layers.modules[name] for row in layers.rows for name in row]
    for block in blocks:
        block.forward = functools.partial(  # type: ignore[method-assign]
            checkpoint, block.forward, use_reentrant=False
        )
    return changed if blocks else None


def _in_bfloat16(step: TrainingStep) -> TrainingStep:
    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        return torch.empty_like(tensor, dtype=torch.bfloat16, device="meta")

    converted = step.call.map_tensors(convert)
    return replace(_on_meta(step, torch.bfloat16), call=converted)


def _on_meta(step: TrainingStep, dtype: torch.dtype | None = None) -> TrainingStep:
    """The step of a copy of the model without bytes."""
    return replace(
        step,
        model=_meta_copy(step.model, dtype),
        optimizer=_same_kind(step.optimizer),
    )


def _meta_copy(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A copy without bytes, its floating point tensors of ``dtype``."""
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        kind = dtype if tensor.is_floating_point() else None
        made = torch.empty_like(tensor, dtype=kind, device="meta")
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, tensor.requires_grad)
        memo[id(tensor)] = made
    return copy.deepcopy(model, memo)


def _same_kind(optimizer: OptimizerLike) -> OptimizerLike:
    """What makes an optimizer of the same class and settings."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    accepted = inspect.signature(type(optimizer)).parameters
    settings = {k: v for k, v in optimizer.defaults.items() if k in accepted}
    return functools.partial(type(optimizer), **settings)
