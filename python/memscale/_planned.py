"""What the executor keeps for one kind of batch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from memscale._C import Plan, Timeline
from memscale._first_real_step import FirstRealStep
from memscale.estimator import Estimate
from memscale.ledger import Watch

__all__ = [
    "Planned",
    "doubts_about",
    "is_for_another_batch",
    "resident_bytes",
    "state_of",
]


@dataclass
class Planned:
    """For one kind of batch; all None if there is nothing to plan with."""

    plan: Plan | None = None
    traced: Estimate | None = None  # until the plan is final
    watch: Watch | None = None
    # Its first real step, to plan with; None: traced before, or not to be had.
    first_step: FirstRealStep | None = None


def resident_bytes(traced: Estimate, plan: Plan) -> int:
    """Bytes that are there between steps under the plan."""
    if plan.optimizer_bits == 32:
        return traced.timeline.resident
    trace = traced.trace.with_8bit_state(on_cpu=traced.device.type == "cpu")
    return Timeline(trace, "device", traced.granularity).resident


def doubts_about(plan: Plan) -> str | None:
    """What of a plan that was given could not be compared with the model."""
    if all(layer.parameter_bytes is not None for layer in plan.layers):
        return None
    return (
        "the plan does not say how large its layers' parameters are, as those of "
        "earlier versions do not: if it was made for a model of other sizes, its "
        "prediction does not hold"
    )


def is_for_another_batch(plan: Plan, call: object) -> bool:
    """Whether a call's tensors have other shapes than those the plan was made for.

    One of them may have arguments that the other has not: labels, a mask.
    """
    made_for, now = (
        set(re.findall(r"\w+\[[^]]*\]", str(x))) for x in (plan.call, call)
    )
    return not (made_for <= now or now <= made_for)


def state_of(model: nn.Module) -> tuple[Any, ...]:
    """What of a model makes its steps differ, beside the batch."""
    first = next(model.parameters(), None)
    where = None if first is None else (first.device, first.dtype)
    trained = hash(tuple(p.requires_grad for p in model.parameters()))
    return where, model.training, trained
