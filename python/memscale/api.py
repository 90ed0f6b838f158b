"""``wrap`` and ``detach``: the one call that users make, and the one that undoes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from memscale.attach.executor import Executor
from memscale.attach.wrapping import EXECUTOR, attach, detach, effective
from memscale.calls.targets import find_model
from memscale.config import AsyncOffloadConfig, Config, OptimizationMode
from memscale.verify import FirstBatchCheck, verify_at_wrap

__all__ = ["apply_all_optimizations", "detach", "optimize", "wrap"]

T = TypeVar("T")


def wrap(
    target: T,
    config: Config | None = None,
    sample_input: Any = None,
    async_offload: bool | None = None,
    async_config: AsyncOffloadConfig | None = None,
) -> T:
    """Make ``target`` train in less memory; returns the same object.

    ``target``: a model, or a Trainer, whose model is wrapped. A plan says for each
    layer what it keeps for backward and what backward computes again: the best
    peak for the time that ``config.mode`` may spend, or the fastest under
    ``config.budget``.
    Loss, gradients and random numbers are the same to the last bit, unless the config
    asks for what is lossy: ``use_8bit_optimizer``, which mode aggressive may choose.
    ``sample_input``: a batch, as for ``memscale.estimate``, to plan with at once;
    without one the plan is made with the first batch, before it runs. A model that is
    wrapped already is wrapped anew. ``async_offload`` and ``async_config`` replace the
    config's. With ``MEMSCALE_DISABLE=1`` in the environment nothing happens.
    """
    model = find_model(target)
    config = effective(config, async_offload, async_config)
    optimizer = getattr(target, "optimizer", None)  # a Trainer may have one already
    if isinstance(target, nn.Module) or not isinstance(
        optimizer, torch.optim.Optimizer
    ):
        optimizer = None
    _attach(model, config, sample_input, optimizer)
    return target


@contextmanager
def optimize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: Config | None = None,
    sample_input: Any = None,
) -> Iterator[Executor | None]:
    """``wrap`` for the length of a ``with``; gives the executor.

    ``optimizer``: the one that will step, for the prediction; with
    ``use_8bit_optimizer`` its state is converted. Raises InputError if it holds none of
    the model's parameters; of others that it holds the state stays in 32 bits. With
    ``MEMSCALE_DISABLE=1`` the executor is None.
    """
    model = find_model(model)
    executor = _attach(model, effective(config), sample_input, optimizer)
    try:
        yield executor
    finally:
        # Whoever wrapped it anew inside has it now.
        if executor is not None and executor is getattr(model, EXECUTOR, None):
            detach(model)


def apply_all_optimizations(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """``wrap`` with mode aggressive and the optimizer's state in 8 bits.

    Returns the same two objects: a torch.optim.Adam or AdamW is made 8-bit in place,
    with the state it has (lossy; see docs/optimizer.md). ``detach(model)`` undoes both.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    model = find_model(model)
    config = Config(mode=OptimizationMode.AGGRESSIVE, use_8bit_optimizer=True)
    _attach(model, config, None, optimizer)
    return model, optimizer


def _attach(
    model: nn.Module,
    config: Config,
    sample_input: Any,
    optimizer: torch.optim.Optimizer | None,
) -> Executor | None:
    executor = attach(model, config, sample_input, optimizer)
    if executor is None or not config.verify_correctness:
        return executor
    try:
        check = verify_at_wrap(model, executor, sample_input, config)
        if isinstance(check, FirstBatchCheck):
            executor.on_detach(check.cancel)
    except BaseException:
        detach(model)
        raise
    return executor
