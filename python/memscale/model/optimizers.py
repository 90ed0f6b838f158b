"""The optimizer that steps a model."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterable

import torch
from torch import nn

from memscale._C import InputError

__all__ = [
    "check_optimizer",
    "find_optimizer",
    "holds_parameters",
    "innermost_optimizer",
    "only_of",
]


def innermost_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """What steps: some wrap another, accelerate's for one."""
    while isinstance(
        inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer
    ):
        optimizer = inner
    return optimizer


def only_of(
    optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """It as it would be with these parameters alone, to predict with; never stepped."""
    known = set(parameters)
    groups = [
        {**group, "params": [p for p in group["params"] if p in known]}
        for group in optimizer.param_groups
    ]
    if all(
        len(ours["params"]) == len(group["params"])
        for ours, group in zip(groups, optimizer.param_groups, strict=True)
    ):
        return optimizer
    copied = object.__new__(type(optimizer))
    copied.__dict__.update(optimizer.__dict__)
    copied.param_groups = [group for group in groups if group["params"]]
    return copied


def holds_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    parameters = set(model.parameters())
    return any(
        parameter in parameters
        for group in optimizer.param_groups
        for parameter in group["params"]
    )


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raises InputError if it holds no parameter of the model."""
    optimizer = innermost_optimizer(optimizer)
    if holds_parameters(optimizer, model):
        return
    shapes = [list(p.shape) for g in optimizer.param_groups for p in g["params"]]
    raise InputError(
        f"optimizer must hold parameters of the model, a {type(model).__name__}, got "
        f"{type(optimizer).__name__} with {len(shapes)} others, the first of shape "
        f"{shapes[0] if shapes else None}: is it another model's, or was the model "
        "copied after the optimizer was made? Leave it out to have the one that steps "
        "the model found"
    )


def find_optimizer(model: nn.Module) -> torch.optim.Optimizer | None:
    """The first of ``find_optimizers``; None: the program has made none yet."""
    return next(iter(find_optimizers(model)), None)


def find_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Those that hold parameters of the model, and no others behind them."""
    things = gc.get_objects()
    # By types: proxies among the objects may do anything when they are asked. Without
    # a loop in Python: there may be millions.
    kinds = {k for k in set(map(type, things)) if issubclass(k, torch.optim.Optimizer)}
    found: dict[int, torch.optim.Optimizer] = {}
    for thing in itertools.compress(things, map(kinds.__contains__, map(type, things))):
        if holds_parameters(thing, model):
            inner = innermost_optimizer(thing)
            found.setdefault(id(inner), inner)
    return list(found.values())
