"""How calls of a model's layers come to us, unseen by torch.

torch looks at the hooks of modules: ``nn.TransformerEncoderLayer`` leaves its fast
path, and so computes other bits, if it or a part of it has any. So no hook is ours.
``Module.__call__`` goes to ``_compiled_call_impl`` where a module has one, which is how
``Module.compile`` gets its calls; ours stand there. torch leaves that attribute out of
copies and pickles, and replaces it when the module is compiled: both as we want it.

Where somebody has pre-hooks, the layer begins after them, as in a trace: what they
compute is the caller's. For that call, then, a pre-hook of ours is the last of them.
"""

from __future__ import annotations

import sys
import threading
import weakref
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn
from torch.compiler import is_compiling

from memscale.calls.before_call import BeforeCall, say_compiled

__all__ = [
    "Begin",
    "Calls",
    "Hook",
    "WayIn",
    "has_pre_hooks",
    "place",
    "remove_dead_hooks",
    "take_away",
    "way_in_of",
]

_PLACE = "_compiled_call_impl"
_CALL = nn.Module._wrapped_call_impl.__code__


class Calls(Protocol):
    """Where the calls go."""

    def run(
        self,
        index: int,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: BeforeCall | None,
    ) -> Any: ...

    def begin(self, index: int) -> bool: ...

    def evaluates(self) -> None: ...

    def is_alive(self) -> bool: ...


class WayIn:
    """Stands in a layer where its compiled call would. A copy of it is nothing.

    Without gradients, and where torch.compile looks on, nothing is done: what is
    compiled holds what the compiler chose. It reads no number of the layer's then, so
    that equal layers share what is compiled.
    """

    def __init__(self, module: nn.Module, calls: Calls, index: int) -> None:
        self._module = weakref.ref(module)  # which owns this
        self._calls = calls
        self._index = index

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return self._module()._call_impl(*args, **kwargs)  # type: ignore[union-attr]
        module, is_ours = self._called(sys._getframe(1))
        if not is_ours:
            return _call_copy(module, args, kwargs)
        if not torch.is_grad_enabled():
            return module._call_impl(*args, **kwargs)
        return self._calls.run(self._index, module, args, kwargs, None)

    def _called(self, frame: FrameType) -> tuple[Any, bool]:
        """Whom torch calls, and whether it is the module that this was made for."""
        module = self._module()
        called = frame.f_locals["self"] if frame.f_code is _CALL else module
        return called, called is module

    def is_of(self, module: nn.Module) -> bool:
        return self._module() is module

    def is_dead(self) -> bool:
        return not self._calls.is_alive()

    def leads_to(self, calls: Calls) -> bool:
        return self._calls is calls

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class WayIntoModel(WayIn):
    """That of the model itself, whose calls are steps."""

    def __init__(
        self, module: nn.Module, calls: Calls, before: BeforeCall | None
    ) -> None:
        super().__init__(module, calls, 0)
        self._before = before
        # torch.compile would look into an object, not into a number.
        self._number = -1 if before is None else before.number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            if self._number >= 0 and torch.is_grad_enabled():
                say_compiled(self._number)
            return self._module()._call_impl(*args, **kwargs)  # type: ignore[union-attr]
        module, is_ours = self._called(sys._getframe(1))
        if not is_ours:
            return _call_copy(module, args, kwargs)
        if torch.is_grad_enabled():
            return self._calls.run(0, module, args, kwargs, self._before)
        self._calls.evaluates()
        if self._before is not None:
            self._before.evaluation()
        return module._call_impl(*args, **kwargs)


def _call_copy(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A module that was given the attributes of ours, by DataParallel say."""
    for part in module.modules():
        found = way_in_of(part)
        if found is not None and not found.is_of(part):
            del vars(part)[_PLACE]
    return module._call_impl(*args, **kwargs)


def place(
    module: nn.Module, calls: Calls, index: int, before: BeforeCall | None = None
) -> None:
    """Have the calls of ``module`` go to ``calls``. One that is compiled stays so."""
    if vars(module).get(_PLACE) is None:
        way_in = (
            WayIn(module, calls, index)
            if index > 0
            else WayIntoModel(module, calls, before)
        )
        vars(module)[_PLACE] = way_in
        if before is not None:
            before.watch(module, way_in)


def take_away(module: nn.Module, calls: Calls) -> None:
    found = way_in_of(module)
    if found is not None and found.leads_to(calls):
        del vars(module)[_PLACE]


def take_away_dead(model: nn.Module) -> None:
    """Ways into a model that is gone, of which these are parts."""
    for module in model.modules():
        found = way_in_of(module)
        if found is not None and found.is_dead():
            del vars(module)[_PLACE]


def way_in_of(module: nn.Module) -> WayIn | None:
    found = vars(module).get(_PLACE)
    return found if isinstance(found, WayIn) else None


def has_pre_hooks(module: nn.Module) -> bool:
    # Not those of all modules: torch's fast paths do not mind them, but ours.
    return bool(module._forward_pre_hooks)


class Hook:
    """A hook of ours. One that came with a copy of the model has no owner."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook()

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, ()

    def __call__(self, *_: Any) -> None:
        pass


class Begin(Hook):
    """Begins one call of a layer, behind the pre-hooks of others. Once."""

    def __init__(self, calls: Calls, index: int) -> None:
        self._calls, self._index = calls, index
        self._thread = threading.get_ident()
        self.is_done = False
        self.has_entered = False

    def __call__(self, *_: Any) -> None:
        # Other threads may call the same layer meanwhile.
        if not self.is_done and threading.get_ident() == self._thread:
            self.is_done = True
            self.has_entered = self._calls.begin(self._index)


def remove_dead_hooks(model: nn.Module) -> None:
    """Those that came with a copy of an attached model."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [k for k, hook in hooks.items() if isinstance(hook, Hook)]:
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)
                module._forward_pre_hooks_with_kwargs.pop(key, None)
