"""What can be said of a plan that was given."""

from __future__ import annotations

import re

from memscale._C import Plan

__all__ = ["doubts_about", "is_for_another_batch"]


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
