"""Executors and the models they are attached to: one each, and no module twice."""

from __future__ import annotations

import functools
import os
import warnings
import weakref
from typing import Any

import torch
from torch import nn

from memscale import logs
from memscale._C import ConfigError, PlanError, check_allowed
from memscale.attach.executor import Executor
from memscale.calls.targets import check_model
from memscale.calls.way_in import remove_dead_hooks
from memscale.config import AsyncOffloadConfig, Config
from memscale.model.inputs import read_call
from memscale.model.optimizers import check_optimizer
from memscale.planning import load_plan

__all__ = ["EXECUTOR", "attach", "detach", "effective"]

# Where a wrapped model keeps what was attached to it.
EXECUTOR = "_memscale_executor"

# Models that are wrapped, by their ids.
_wrapped: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()

_SWITCH = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


def detach(model: Any) -> None:
    """Undo ``wrap``, of a model or a Trainer. Warns if it is not wrapped."""
    if not isinstance(model, nn.Module):
        model = getattr(model, "model", model)
    if not isinstance(model, nn.Module) or EXECUTOR not in vars(model):
        warnings.warn("the model is not wrapped: nothing to detach", stacklevel=2)
        return
    executor = getattr(model, EXECUTOR)
    if executor is None:  # a copy of a wrapped model
        remove_dead_hooks(model)
        object.__delattr__(model, EXECUTOR)
    else:
        executor.detach()


def _forget(model_ref: weakref.ref[nn.Module]) -> None:
    model = model_ref()
    if model is not None:
        object.__delattr__(model, EXECUTOR)
        _wrapped.pop(id(model), None)


def effective(
    config: Config | None,
    async_offload: bool | None = None,
    async_config: AsyncOffloadConfig | None = None,
) -> Config:
    """The caller's config, never changed itself, with what overrides it."""
    if config is None:
        config = Config()
    elif not isinstance(config, Config):
        what = config.__name__ if isinstance(config, type) else type(config).__name__
        raise TypeError(f"config must be a Config, got {what}")
    word = os.environ.get("MEMSCALE_ASYNC_OFFLOAD", "").strip().lower()
    if async_offload is None and word:
        if word not in _SWITCH:
            raise ConfigError(f"MEMSCALE_ASYNC_OFFLOAD must be 0 or 1, got {word!r}")
        async_offload = _SWITCH[word]
    if async_offload is not None:
        config = config.replace(async_offload=async_offload)
    if async_config is not None:
        config = config.replace(async_config=async_config)
    return config


def attach(
    model: nn.Module,
    config: Config,
    sample_input: Any,
    optimizer: torch.optim.Optimizer | None = None,
) -> Executor | None:
    """The model's executor, planned if there is a sample. None: MEMSCALE_DISABLE=1."""
    if os.environ.get("MEMSCALE_DISABLE") == "1":
        logs.logger.info("MEMSCALE_DISABLE=1: %s stays as it is", type(model).__name__)
        return None
    check_model(model)
    _check_alone(model)
    if optimizer is not None:
        check_optimizer(optimizer, model)
    call = None if sample_input is None else read_call(sample_input)
    given = None
    source = config.plan  # read once: a copy of a text of any length
    if source is not None:
        given = load_plan(source, model)
        check_allowed(given, config)
    if getattr(model, EXECUTOR, None) is not None:
        detach(model)  # from here on nothing that the caller said can be wrong
    executor = Executor(model, config, optimizer, given)
    object.__setattr__(model, EXECUTOR, executor)
    _wrapped[id(model)] = model
    executor.on_detach(functools.partial(_forget, weakref.ref(model)))
    try:
        executor.say_wrapped()
        if call is not None:
            executor.plan_for(call, is_sample=True)
    except BaseException:
        detach(model)
        raise
    return executor


def _check_alone(model: nn.Module) -> None:
    """A module belongs to one wrapped model: raises PlanError naming the other."""
    names = {id(module): name for name, module in model.named_modules()}
    for other in list(_wrapped.values()):
        if other is model:
            continue
        kind = type(other).__name__
        if id(other) in names:
            raise PlanError(
                f"{names[id(other)]!r} of the model, a {kind}, is wrapped already: "
                "detach it first"
            )
        for name, module in other.named_modules():
            if module is model:
                raise PlanError(
                    f"the model is {name!r} of a {kind} that is wrapped already: "
                    "detach that first"
                )
            if id(module) in names:
                raise PlanError(
                    f"{names[id(module)]!r} of the model belongs to a {kind} that is "
                    "wrapped already: detach that first"
                )
