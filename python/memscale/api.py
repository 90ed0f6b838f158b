"""``wrap`` and ``detach``: the one call that users make, and the one that undoes it."""

from __future__ import annotations

import os
import warnings
from typing import Any

from torch import nn

from memscale import replay, verify
from memscale.config import Config, OptimizationMode

__all__ = ["detach", "wrap"]

# Where a wrapped model keeps what was attached to it.
EXECUTOR = "_memscale_executor"


def wrap(
    target: nn.Module, config: Config | None = None, sample_input: Any = None
) -> nn.Module:
    """Make ``target`` train in less memory; returns the same object.

    Its layers recompute in backward what is cheap to compute (CONSERVATIVE,
    BALANCED) or all but their inputs (AGGRESSIVE). Loss, gradients and random
    numbers are the same to the last bit. With ``enable_checkpointing=False``
    nothing is attached. With ``verify_correctness=True`` that is checked, on
    ``sample_input`` or else on the first batch.
    """
    if not isinstance(target, nn.Module):
        raise TypeError(f"target must be an nn.Module, got {type(target).__name__}")
    if os.environ.get("MEMSCALE_DISABLE") == "1":
        return target
    config = Config() if config is None else config
    effective = config.resolve()
    if getattr(target, EXECUTOR, None) is not None:
        detach(target)
    policy = "keep"
    if effective.enable_checkpointing:
        aggressive = effective.mode == OptimizationMode.AGGRESSIVE
        policy = "block" if aggressive else "cheap"
    executor = replay.attach(target, policy)
    object.__setattr__(target, EXECUTOR, executor)
    try:
        if config.verify_correctness:
            check = verify.verify_at_wrap(target, executor, sample_input, config)
            if isinstance(check, verify.FirstBatchCheck):
                executor.on_detach(check.cancel)
    except BaseException:
        detach(target)
        raise
    return target


def detach(model: nn.Module) -> None:
    """Undo ``wrap``. Warns if the model is not wrapped."""
    executor = getattr(model, EXECUTOR, None)
    if executor is None:
        warnings.warn("the model is not wrapped: nothing to detach", stacklevel=2)
        return
    executor.detach()
    object.__delattr__(model, EXECUTOR)
