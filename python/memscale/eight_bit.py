"""The optimizer of a wrapped model, with its state in 8 bits; back at detach.

An optimizer that is known is converted at once, any other that holds parameters of the
model at its first step, before it steps. The object stays the same: see
memscale.optim.to_8bit. Those that cannot be converted are left alone, and that is said.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from memscale.optim import from_8bit, is_8bit, to_8bit

__all__ = ["EightBitState", "find_optimizer"]

Say = Callable[[str, int], None]


class EightBitState:
    """Of one model. Holds neither the model nor its optimizers alive."""

    def __init__(self, model: nn.Module, say: Say) -> None:
        self._model = weakref.ref(model)
        self._say = say
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._converted: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        _watch(self)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        model = self._model()
        if (
            model is not None
            and optimizer not in self._seen
            and holds_parameters(optimizer, model)
        ):
            self.convert(optimizer)

    def convert(self, optimizer: torch.optim.Optimizer) -> None:
        """Make it 8-bit, if it can be. Says what was done, or why nothing was."""
        inner = getattr(optimizer, "optimizer", None)
        if isinstance(inner, torch.optim.Optimizer):  # accelerate's wraps another
            self._seen.add(optimizer)
            optimizer = inner
        if optimizer in self._seen:
            return
        self._seen.add(optimizer)
        name = type(optimizer).__name__
        if is_8bit(optimizer):
            return  # the user's own
        why_not = to_8bit(optimizer)
        if why_not is not None:
            self._say(f"use_8bit_optimizer: {why_not}", logging.WARNING)
            return
        self._converted.add(optimizer)
        self._say(f"the state of {name} is held in 8 bits", logging.INFO)

    def before(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | str:
        """What it was before it was converted, to predict the plain step with."""
        if optimizer not in self._converted:
            return optimizer
        return "adamw" if isinstance(optimizer, torch.optim.AdamW) else "adam"

    def detach(self) -> None:
        """Give every optimizer that was converted its own state back."""
        _stop_watching(self)
        for optimizer in list(self._converted):
            if is_8bit(optimizer):
                from_8bit(optimizer)
        self._converted.clear()
        self._seen.clear()


# ---- every step of every optimizer ----

# Weak: a model that is dropped without being detached is watched no longer.
_watching: weakref.WeakSet[EightBitState] = weakref.WeakSet()
_hook: RemovableHandle | None = None


def _before_any_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for state in list(_watching):
        state.before_step(optimizer)


def _watch(state: EightBitState) -> None:
    global _hook
    _watching.add(state)
    if _hook is None:
        _hook = register_optimizer_step_pre_hook(_before_any_step)


def _stop_watching(state: EightBitState) -> None:
    # Not when a model is dropped: torch may be going through its hooks right then.
    global _hook
    _watching.discard(state)
    if not _watching and _hook is not None:
        _hook.remove()
        _hook = None


def holds_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    parameters = set(model.parameters())
    return any(
        parameter in parameters
        for group in optimizer.param_groups
        for parameter in group["params"]
    )


def find_optimizer(model: nn.Module) -> torch.optim.Optimizer | None:
    """The optimizer that holds the model's parameters, if the program has made one."""
    for thing in gc.get_objects():
        # By its type: proxies among the objects may do anything when they are asked.
        if issubclass(type(thing), torch.optim.Optimizer) and holds_parameters(
            thing, model
        ):
            # Some wrap another, accelerate's for one.
            inner = getattr(thing, "optimizer", None)
            found = inner if isinstance(inner, torch.optim.Optimizer) else thing
            assert isinstance(found, torch.optim.Optimizer)
            return found
    return None
