"""Recomputation of ops: layers keep less, backward computes it again.

::

    handle = replay.attach(model, "cheap")
    ...                                     # train as before, bit for bit
    handle.detach()

What each layer keeps is its policy:

- ``"keep"``: everything, as without MemScale.
- ``"cheap"``: what costs much per byte (matmul, attention, convolution).
- ``"block"``: nothing but the layer's inputs.
- a :class:`KeepSet`: exactly these outputs of these ops.

No policy changes a bit of the result. See docs/replay.md.
"""

from __future__ import annotations

import fnmatch
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling

from memscale import _C, _hook_stack, _use_cache
from memscale._C import KeepSet, OpTimes, PlanError, TapeRules
from memscale.inputs import tensors_in
from memscale.layers import find_layers

__all__ = [
    "DEFAULT_MIN_BYTES",
    "KeepSet",
    "Policy",
    "Replay",
    "Stats",
    "attach",
    "is_attached",
]

# A policy's name, or a keep set.
Policy = str | KeepSet

# Below this, a storage is not worth an op.
DEFAULT_MIN_BYTES = 64 * 1024

# ``call``: the attached model whose call this thread is in, and the frame that
# runs it.
_of_thread = threading.local()

_POLICIES = _C.replay_policies()


@dataclass(frozen=True)
class Stats:
    """Counts since ``attach`` or ``reset_stats``. Bytes count each storage once.

    Kept are also parameters and inputs: all that autograd saved.
    """

    saves_kept: int
    saves_dropped: int
    bytes_kept: int
    bytes_dropped: int
    ops_recorded: int
    ops_replayed: int
    bytes_copied: int
    calls_unlike_keep_set: int
    nanoseconds_replayed: int = field(compare=False)  # a time, never twice the same
    kept_because: dict[str, int]

    def __str__(self) -> str:
        text = (
            f"{self.saves_dropped} saves dropped ({self.bytes_dropped} bytes), "
            f"{self.saves_kept} kept ({self.bytes_kept} bytes); "
            f"{self.ops_replayed} of {self.ops_recorded} ops replayed"
        )
        for reason, count in self.kept_because.items():
            text += f"\n  kept {count}: {reason}"
        return text


class Replay:
    """A model's attached recomputation. Made by :func:`attach`."""

    def __init__(
        self,
        model: nn.Module,
        layers: list[tuple[nn.Module, Policy]],
        min_bytes: int,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._min_bytes = min_bytes
        self._engine = _C.Replay(
            _device_of(model), [_rules(policy, min_bytes) for _, policy in layers]
        )
        self._hooks = (self._engine.pack_hook(), _C.unpack_hook())
        self._around = around
        self._paused = 0
        self._idle = False
        self._of_thread = threading.local()
        self._handles: list[Any] = []
        self._on_detach: list[Callable[[], object]] = []
        if any(policy != "keep" for _, policy in layers):
            _hook_stack.step_aside()
            # Also when the model is dropped without detaching.
            self._come_back = weakref.finalize(self, _hook_stack.stop_stepping_aside)
            for index, (module, _) in enumerate(layers):
                self._watch(module, index)

    def _watch(self, module: nn.Module, index: int) -> None:
        before, after = _Before(self, index), _After(self, index)
        self._handles.append(module.register_forward_pre_hook(before))
        self._handles.append(module.register_forward_hook(after, always_call=True))

    def _before(self, index: int, frame: FrameType) -> None:
        _end_interrupted_call()
        self._calls().append((index, self._enter(frame)))
        if index > 0:
            self._engine.enter_layer(index)

    def _after(self, index: int, output: Any) -> None:
        calls = self._calls()
        if not calls or calls[-1][0] != index:
            return  # a hook before ours raised
        if index > 0:
            _use_cache.leave_layer()
            self._engine.leave_layer()
        if calls.pop()[1]:
            self._leave(output)

    def _calls(self) -> list[tuple[int, bool]]:
        """Layers that this thread is in, and with which of them it entered."""
        if not hasattr(self._of_thread, "calls"):
            self._of_thread.calls = []
        calls: list[tuple[int, bool]] = self._of_thread.calls
        return calls

    def _enter(self, frame: FrameType) -> bool:
        if self._paused or getattr(_of_thread, "call", None) is not None:
            return False
        if not self._idle and not (_hook_stack.is_free() and self._engine.enter()):
            return False
        around = self._around()
        around.__enter__()
        # First of all, so that what Ctrl-C leaves can be found.
        _of_thread.call = (self, frame, around)
        if not self._idle:
            _hook_stack.push(self._hooks)
        return True

    def _leave(self, output: Any) -> None:
        _, _, around = _of_thread.call
        _of_thread.call = None
        around.__exit__(None, None, None)
        if self._engine.is_entered:
            _hook_stack.pop(self._hooks)
            self._engine.leave(tensors_in(output))

    @property
    def is_paused(self) -> bool:
        return self._paused > 0

    def set_policies(self, policies: list[Policy]) -> None:
        """Other policies, one for each layer, from the next call on."""
        self._engine.set_layers([_rules(each, self._min_bytes) for each in policies])
        self._idle = all(policy == "keep" for policy in policies)

    def time_ops(self, times: OpTimes | None) -> None:
        """From the next call on, add how long each op takes to ``times``."""
        self._engine.time_ops(times)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within it, the model runs as if it were not attached."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copy of the model is not attached

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def stats(self) -> Stats:
        return Stats(**self._engine.counts(), kept_because=self._engine.reasons())

    def reset_stats(self) -> None:
        self._engine.reset_stats()

    def on_detach(self, work: Callable[[], object]) -> None:
        """Have ``work`` done when this is detached."""
        self._on_detach.append(work)

    def detach(self) -> None:
        """Remove the hooks. Graphs that exist still can go backward."""
        _end_interrupted_call()
        call = getattr(_of_thread, "call", None)
        if call is not None and call[0] is self:  # from inside of a call
            self._calls().clear()
            self._leave(None)
        for work in self._on_detach:
            work()
        self._on_detach.clear()
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._come_back()


class Hook:
    """A hook of ours. One that came with a copy of the model has no owner."""

    is_on = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook()

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, ()

    def __call__(self, *_: Any) -> None:
        pass


class _LayerHook(Hook):
    is_on = True

    def __init__(self, replay: Replay, index: int) -> None:
        self._replay, self._index = replay, index


# Without gradients, and where torch.compile looks on, hooks do nothing: what is
# compiled holds what the compiler chose.


class _Before(_LayerHook):
    def __call__(self, _module: nn.Module, _args: Any) -> None:
        if is_compiling():
            return
        if torch.is_grad_enabled():
            self._replay._before(self._index, sys._getframe(1))
        else:
            _end_interrupted_call()  # its hooks, and its use_cache


class _After(_LayerHook):
    def __call__(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if not is_compiling():
            self._replay._after(self._index, output)


def _end_interrupted_call() -> None:
    """End the call that this thread was in, if Ctrl-C did: torch then runs no hooks.

    A frame that runs no longer can be cleared; one that runs refuses.
    """
    call = getattr(_of_thread, "call", None)
    if call is None:
        return
    replay, frame, _ = call
    try:
        frame.clear()
    except RuntimeError:
        return
    replay._calls().clear()
    replay._leave(None)


def is_attached(model: nn.Module) -> bool:
    """Whether the model or a part of it is."""
    return any(
        isinstance(hook, Hook) and hook.is_on
        for module in model.modules()
        for hook in module._forward_pre_hooks.values()
    )


def remove_dead_hooks(model: nn.Module) -> None:
    """Those that came with a copy of an attached model."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [k for k, hook in hooks.items() if isinstance(hook, Hook)]:
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def attach(
    model: nn.Module,
    policy: Policy | Mapping[str, Policy] = "cheap",
    *,
    min_bytes: int = DEFAULT_MIN_BYTES,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Replay:
    """Recompute from now on what ``policy`` does not keep.

    One policy for all layers, or policies by layer name or pattern
    (``{"transformer.h.*": "block"}``; the first that matches counts, layers
    without one keep everything). Storages smaller than ``min_bytes`` are kept.
    ``around()`` gives a context for each call that is recorded.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if is_attached(model):
        raise PlanError("the model, or a part of it, is attached already: detach it")
    remove_dead_hooks(model)
    if isinstance(min_bytes, bool) or not isinstance(min_bytes, int) or min_bytes < 0:
        raise PlanError(f"min_bytes must be an int >= 0, got {min_bytes!r}")
    layers = _choose(find_layers(model).modules, policy)
    return Replay(model, layers, min_bytes, around)


def _choose(
    layers: dict[str, nn.Module], policy: Policy | Mapping[str, Policy]
) -> list[tuple[nn.Module, Policy]]:
    """Each layer with its policy; the first is the model itself."""
    by_pattern = policy if isinstance(policy, Mapping) else {"*": policy}
    chosen: dict[str, Policy] = {}
    for pattern, choice in by_pattern.items():
        _check(choice)
        names = [name for name in layers if fnmatch.fnmatchcase(name, pattern)]
        if not names:
            raise PlanError(f"no layer is named {pattern!r}")
        for name in names:
            chosen.setdefault(name, choice)  # the first that matches
    return [(module, chosen.get(name, "keep")) for name, module in layers.items()]


def _check(policy: object) -> None:
    if not isinstance(policy, KeepSet) and policy not in _POLICIES:
        raise PlanError(
            f"policy must be one of {_POLICIES} or a KeepSet, got {policy!r}"
        )


def _rules(policy: Policy, min_bytes: int) -> TapeRules:
    if isinstance(policy, KeepSet):
        return TapeRules("keep", policy, min_bytes)
    return TapeRules(policy, None, min_bytes)


def _device_of(model: nn.Module) -> torch.device:
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        return tensor.device
    return torch.device("cpu")
