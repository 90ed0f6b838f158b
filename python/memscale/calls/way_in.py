"""How calls of a model's layers come to us, unseen by torch.

torch looks at the hooks of modules: ``nn.TransformerEncoderLayer`` leaves its fast
path, and so computes other bits, if it or a part of it has any. So no hook is ours.
``Module.__call__`` goes to ``_compiled_call_impl`` where a module has one, which is how
``Module.compile`` gets its calls; ours stand there. torch leaves that attribute out of
copies and pickles, and replaces it when the module is compiled: both as we want it.

Where somebody has pre-hooks, the layer begins after them, as in a trace: what they
compute is the caller's. For that call, then, a pre-hook of ours is the last of them.

Where a part of the model is compiled, ours stands before its compiled call and gives
the call on: what runs in it is the compiler's, and nothing of it is recorded.
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

from memscale._C import find_compiled
from memscale.calls.before_call import BeforeCall, say_compiled

__all__ = [
    "Begin",
    "Calls",
    "Hook",
    "WayIn",
    "has_pre_hooks",
    "is_compiled",
    "place",
    "place_before_compiled",
    "remove_dead_hooks",
    "take_away",
    "take_away_dead",
    "take_away_parts",
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

    def run_layer(
        self,
        index: int,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any: ...

    def run_compiled(
        self, compiled: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
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
        # Two of these lines are _called(), without the call: this runs for each layer.
        module: Any = self._module()
        frame = sys._getframe(1)
        if frame.f_code is _CALL and (called := frame.f_locals["self"]) is not module:
            return _call_copy(called, args, kwargs)
        if not torch.is_grad_enabled():
            return module._call_impl(*args, **kwargs)
        return self._calls.run_layer(self._index, module, args, kwargs)

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


class WayIntoCompiled(WayIn):
    """That of a part which is compiled: before its compiled call."""

    def __init__(self, module: nn.Module, calls: Calls, index: int) -> None:
        super().__init__(module, calls, index)
        # None: what torch.compile() made, whose own call is the compiled one.
        self.compiled = vars(module).get(_PLACE)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiled = self.compiled
        if compiled is None:
            compiled = self._module()._call_impl  # type: ignore[union-attr]
        if is_compiling() or not torch.is_grad_enabled():
            return compiled(*args, **kwargs)
        return self._calls.run_compiled(compiled, args, kwargs)


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


def place_before_compiled(model: nn.Module, calls: Calls) -> None:
    """Have ``calls`` told of each part that was compiled, since it last was told."""
    for module in find_compiled(model, WayIn):
        found = way_in_of(module)
        if module is not model and not isinstance(found, WayIntoCompiled):
            if found is not None:
                del vars(module)[_PLACE]
            vars(module)[_PLACE] = WayIntoCompiled(module, calls, 0)


def take_away(module: nn.Module, calls: Calls) -> None:
    found = way_in_of(module)
    if found is not None and found.leads_to(calls):
        _remove(module, found)


def take_away_parts(model: nn.Module, calls: Calls) -> None:
    """Ways into what is inside of the model."""
    for module in model.modules():
        if module is not model:
            take_away(module, calls)


def take_away_dead(model: nn.Module) -> None:
    """Ways into a model that is gone, of which these are parts."""
    for module in model.modules():
        found = way_in_of(module)
        if found is not None and found.is_dead():
            _remove(module, found)


def _remove(module: nn.Module, way_in: WayIn) -> None:
    del vars(module)[_PLACE]
    if isinstance(way_in, WayIntoCompiled) and way_in.compiled is not None:
        vars(module)[_PLACE] = way_in.compiled


def way_in_of(module: nn.Module) -> WayIn | None:
    found = vars(module).get(_PLACE)
    return found if isinstance(found, WayIn) else None


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile made it, or its compile() was called."""
    found = vars(module).get(_PLACE)
    if isinstance(found, WayIn):
        found = getattr(found, "compiled", None)
    # Asking for torch.compile's class would import dynamo.
    return hasattr(module, "_orig_mod") or found is not None


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
