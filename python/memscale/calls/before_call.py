"""What happens before each call of a wrapped model."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from memscale._C import InputError, PlanError
from memscale.calls import hook_stack
from memscale.model.inputs import Call

__all__ = ["BeforeCall", "say_compiled"]


class Attached(Protocol):
    """What is asked and told, of what is attached to a model."""

    first_checks: list[Callable[..., object]]

    def say_compiled(self) -> None: ...
    def evaluates(self) -> None: ...
    def begin_step(self, call: Call) -> None: ...
    def called_under_hooks(self) -> None: ...
    def detach(self) -> None: ...


_executors: weakref.WeakValueDictionary[int, Attached] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def say_compiled(number: int) -> bool:
    """Run by torch.compile, as it looks on."""
    executor = _executors.get(number)
    if executor is not None:
        executor.say_compiled()
    return True


# What torch.compiler.assume_constant_result does, which would import dynamo.
say_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _say_if_compiled(model: weakref.ref[nn.Module], number: int) -> None:
    """The model has no way in any more: detached, dropped, or compiled in place."""
    if getattr(model(), "_compiled_call_impl", None) is not None:
        say_compiled(number)


class BeforeCall:
    """Of one wrapped model, before any hook of it runs."""

    def __init__(self, executor: Attached) -> None:
        self._executor = executor
        self.number = next(_numbers)
        _executors[self.number] = executor

    def watch(self, model: nn.Module, way_in: object) -> None:
        """Be told when the way in is gone."""
        told = weakref.finalize(
            way_in, _say_if_compiled, weakref.ref(model), self.number
        )
        told.atexit = False

    def evaluation(self) -> None:
        self._executor.evaluates()

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """The model is called with gradients on, by nobody whom we record."""
        for check in list(self._executor.first_checks):
            check(model, args, kwargs)
        if torch._C._get_tracing_state() is not None:  # torch.jit.trace looks on
            return
        try:
            # Where others watch what is saved, or forbid it, this call is not ours to
            # record.
            if hook_stack.is_free():
                call = Call(args, kwargs, source="your batch", is_made_now=True)
                self._executor.begin_step(call)
            else:
                self._executor.called_under_hooks()
        except (PlanError, InputError):
            self._executor.detach()  # nothing stays half attached
            raise
