"""The first hook of a wrapped model: what happens before each of its calls."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.compiler import is_compiling

from memscale import _hook_stack, replay
from memscale._C import InputError, PlanError
from memscale.inputs import Call

if TYPE_CHECKING:
    from memscale.executor import Executor

__all__ = ["BeforeCall"]

# By numbers: torch.compile would trace through an executor, not through an integer.
_executors: weakref.WeakValueDictionary[int, Executor] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def _say_compiled(number: int) -> bool:
    """Run by torch.compile, as it looks on."""
    executor = _executors.get(number)
    if executor is not None:
        executor.say_compiled()
    return True


# What torch.compiler.assume_constant_result does, which would import dynamo.
_say_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]


class BeforeCall(replay.Hook):
    is_on = True

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._number = next(_numbers)
        _executors[self._number] = executor

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if is_compiling():
            if torch.is_grad_enabled():
                _say_compiled(self._number)
            return
        if not torch.is_grad_enabled():
            self._executor.void_step()
            return
        if self._executor.is_paused:
            return
        if torch._C._get_tracing_state() is not None:  # torch.jit.trace looks on
            return
        # A shell that is traced has the hooks of its original. Where others watch
        # what is saved, or forbid it, this call is not ours to record.
        if self._executor.wraps(model) and _hook_stack.is_free():
            try:
                self._executor.begin_step(Call(args, kwargs, source="your batch"))
            except (PlanError, InputError):
                self._executor.detach()  # nothing stays half attached
                raise
