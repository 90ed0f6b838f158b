"""``wrap`` and ``detach``: the one call that users make, and the one that undoes it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from memscale import logs, verify
from memscale.config import AsyncOffloadConfig, Config
from memscale.executor import Executor
from memscale.inputs import read_call
from memscale.targets import find_model

__all__ = ["detach", "optimize", "wrap"]

# Where a wrapped model keeps what was attached to it.
EXECUTOR = "_memscale_executor"

T = TypeVar("T")


def wrap(
    target: T,
    config: Config | None = None,
    sample_input: Any = None,
    async_offload: bool | None = None,
    async_config: AsyncOffloadConfig | None = None,
) -> T:
    """Make ``target`` train in less memory; returns the same object.

    ``target``: a model, or a Trainer, whose model is wrapped. Its layers recompute in
    backward what is cheap to compute (CONSERVATIVE, BALANCED) or all but their inputs
    (AGGRESSIVE). Loss, gradients and random numbers are the same to the last bit.
    ``sample_input``: a batch, as for ``memscale.estimate``, to plan with at once;
    without one the plan is made with the first batch, before it runs. A model that is
    wrapped already is wrapped anew. ``async_offload`` and ``async_config`` replace the
    config's. With ``MEMSCALE_DISABLE=1`` in the environment nothing happens.
    """
    _attach(target, _with_async(config, async_offload, async_config), sample_input)
    return target


@contextmanager
def optimize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: Config | None = None,
    sample_input: Any = None,
) -> Iterator[Executor | None]:
    """``wrap`` for the length of a ``with``; gives the executor.

    ``optimizer``: the one that will step, for the prediction. With
    ``MEMSCALE_DISABLE=1`` the executor is None.
    """
    executor = _attach(model, config, sample_input, optimizer)
    try:
        yield executor
    finally:
        # Whoever wrapped it anew inside has it now.
        if executor is not None and executor is getattr(model, EXECUTOR, None):
            detach(model)


def detach(model: Any) -> None:
    """Undo ``wrap``, of a model or a Trainer. Warns if it is not wrapped."""
    if not isinstance(model, nn.Module):
        model = getattr(model, "model", model)
    executor = getattr(model, EXECUTOR, None)
    if executor is None:
        warnings.warn("the model is not wrapped: nothing to detach", stacklevel=2)
        return
    executor.detach()
    object.__delattr__(model, EXECUTOR)


def _with_async(
    config: Config | None,
    async_offload: bool | None,
    async_config: AsyncOffloadConfig | None,
) -> Config | None:
    """The caller's config with the arguments' say in it; never changed itself."""
    if async_offload is None and "MEMSCALE_ASYNC_OFFLOAD" in os.environ:
        async_offload = os.environ["MEMSCALE_ASYNC_OFFLOAD"] == "1"
    if async_offload is not None:
        config = (config or Config()).replace(async_offload=async_offload)
    if async_config is not None:
        config = (config or Config()).replace(async_config=async_config)
    return config


def _attach(
    target: Any,
    config: Config | None,
    sample_input: Any,
    optimizer: torch.optim.Optimizer | None = None,
) -> Executor | None:
    model = find_model(target)
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"config must be a Config, got {type(config).__name__}")
    if os.environ.get("MEMSCALE_DISABLE") == "1":
        logs.logger.info("MEMSCALE_DISABLE=1: %s stays as it is", type(model).__name__)
        return None
    config = Config() if config is None else config
    call = None if sample_input is None else read_call(sample_input)
    if getattr(model, EXECUTOR, None) is not None:
        detach(model)
    executor = Executor(model, config, optimizer)
    object.__setattr__(model, EXECUTOR, executor)
    try:
        executor.say_wrapped()
        if call is not None:
            executor.plan_for(call)
        if config.verify_correctness:
            check = verify.verify_at_wrap(model, executor, sample_input, config)
            if isinstance(check, verify.FirstBatchCheck):
                executor.on_detach(check.cancel)
    except BaseException:
        detach(model)
        raise
    return executor
