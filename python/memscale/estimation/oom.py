"""Why a step ran out of memory, and what would help.

::

    with memscale.explain_oom(model, batch, optimizer=optimizer):
        model(**batch).loss.backward()
        optimizer.step()

If the block raises torch.OutOfMemoryError, the report is added to the exception as
a note and the exception goes on. Or, where the exception has been caught already::

    print(memscale.explain_oom(error, model, batch, optimizer=optimizer))

The report is made from estimates (memscale.estimation.estimate), so nothing is
allocated on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, overload

import torch
from torch import nn

from memscale.estimation.estimate import Estimate, LayerShare
from memscale.estimation.oom_options import Option, estimate_plain, find_options
from memscale.estimation.oom_place import (
    allocated_on,
    available_bytes,
    capacity_of,
    device_of,
    find_place,
    has_state,
    held_at,
    others_hold,
    read_message,
    read_traceback,
    resident,
)
from memscale.estimation.oom_text import oom_text
from memscale.model.inputs import LossFn
from memscale.trace.optimizer_step import OptimizerLike
from memscale.trace.training_step import Device, TrainingStep

__all__ = ["OomContext", "OomReport", "Option", "explain_oom"]


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
        return oom_text(self)


@dataclass(frozen=True)
class _Arguments:
    """What explain_oom is given: the step is built when there is an error."""

    model: nn.Module
    sample_input: Any = None
    optimizer: OptimizerLike = "adamw"
    loss_fn: LossFn | None = None
    device: Device = None

    def step(self) -> TrainingStep:
        return TrainingStep.of(
            self.model, self.sample_input, self.optimizer, self.loss_fn, self.device
        )


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
    return OomContext(_Arguments(*args, **kwargs))


def _explain(error: BaseException, *args: Any, **kwargs: Any) -> OomReport:
    if not isinstance(error, torch.OutOfMemoryError):
        raise TypeError(
            f"error must be a torch.OutOfMemoryError, got {type(error).__name__}"
        )
    given = _Arguments(*args, **kwargs)
    return _report(error, given, None, has_state(given.optimizer))


class OomContext:
    """What ``with explain_oom(model, …)`` gives; ``report`` is None without an OOM."""

    def __init__(self, given: _Arguments) -> None:
        if not isinstance(given.model, nn.Module):
            raise TypeError(
                "the first argument must be a torch.nn.Module or an "
                f"OutOfMemoryError, got {type(given.model).__name__}"
            )
        self.report: OomReport | None = None
        self._given = given
        self._before: int | None = None
        self._had_state: bool | None = None

    def __enter__(self) -> OomContext:
        self.report = None
        self._before = allocated_on(device_of(self._given.model))
        self._had_state = has_state(self._given.optimizer)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Literal[False]:
        if isinstance(error, torch.OutOfMemoryError):
            try:
                self.report = _report(error, self._given, self._before, self._had_state)
                error.add_note(str(self.report))
            except Exception as why:  # the user's error matters more than ours
                error.add_note(
                    f"memscale cannot explain this: {type(why).__name__}: {why}"
                )
        return False


def _report(
    error: torch.OutOfMemoryError,
    given: _Arguments,
    before: int | None,
    had_state: bool | None,
) -> OomReport:
    """``before``: bytes on the device before the step; None: unknown."""
    sizes = read_message(str(error))
    seen_phase, seen_layer = read_traceback(error.__traceback__, given.model)
    step = given.step()
    made = estimate_plain(step)
    device = device_of(step.model)
    capacity = capacity_of(device, sizes, given.device)
    available = available_bytes(sizes, capacity)
    others = None
    if before is not None:
        if had_state is None:
            had_state = before >= resident(made)
        others = others_hold(made, step, before, had_state)
        if available is not None:
            available = max(0, available - others)
    first_step, index = find_place(made, available, seen_phase, had_state)
    breakdown, layers = held_at(made, index, first_step)
    op = made.trace[index]
    return OomReport(
        estimate=made,
        requested=sizes.get("requested"),
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
        allocated=allocated_on(device),
        options=find_options(step, made, available),
    )
