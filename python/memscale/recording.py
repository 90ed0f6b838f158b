"""A training step as a trace, recorded while it really runs."""

from __future__ import annotations

import torch
from torch import nn

from memscale._C import TraceError
from memscale._optimizer_step import OptimizerLike
from memscale.inputs import Call, LossFn
from memscale.tracing import TracedStep

__all__ = ["record_step"]


def record_step(
    model: nn.Module,
    call: Call,
    device: torch.device,
    *,
    loss_fn: LossFn | None = None,
    optimizer: OptimizerLike = "adamw",
) -> TracedStep:
    raise TraceError("in progress")
