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

from memscale import _C
from memscale._C import (
    DEFAULT_MIN_BYTES,
    InputError,
    KeepSet,
    OpTimes,
    PlanError,
    Recorder,
    TapeRules,
)
from memscale.calls import call_events, hook_stack, way_in
from memscale.calls.before_call import BeforeCall
from memscale.calls.targets import ShardingCheck
from memscale.calls.way_in import Begin
from memscale.model.inputs import tensors_in
from memscale.model.layers import find_layers

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

# ``call``: the attached model whose call this thread is in, and the frame that
# runs it.
_of_thread = threading.local()

# The layers of attached models, also while they do not tell of their calls.
_replays: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Replay]] = (
    weakref.WeakKeyDictionary()
)

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
        before: BeforeCall | None = None,
    ) -> None:
        self._min_bytes = min_bytes
        self._engine = _C.Replay(
            _device_of(model), [_rules(policy, min_bytes) for _, policy in layers]
        )
        self._hooks = (self._engine.pack_hook(), _C.unpack_hook())
        self._around = around
        self._check = ShardingCheck()
        self._paused = 0
        self._idle = False
        self._tells_of_layers = False
        self._owner: Callable[[], Callable[[], object] | None] = lambda: None
        self._on_detach: list[Callable[[], object]] = []
        self._come_back: Callable[[], object] | None = None
        self._watched: list[weakref.ref[nn.Module]] = []
        self._records = any(policy != "keep" for _, policy in layers)
        if self._records:
            hook_stack.step_aside()
            # Also when the model is dropped without detaching.
            self._come_back = weakref.finalize(self, hook_stack.stop_stepping_aside)
        elif before is None:
            layers = []
        else:
            layers = layers[:1]
        for module, _ in layers:
            self._watched.append(weakref.ref(module))
            _replays[module] = weakref.ref(self)
        if layers:
            way_in.place(model, self, 0, before)
        if self._records:
            self._tell_of_layers(True)

    def run(
        self,
        index: int,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: BeforeCall | None,
    ) -> Any:
        """A call of the model, or of a layer outside of one, with gradients on."""
        _end_interrupted_call()
        if not self._is_left_alone():
            self._refuse_if_sharded(module)
            if before is not None:
                before(module, args, kwargs)
            if self._tells_of_layers:
                way_in.place_before_compiled(module, self)
        begin, handle, output = Begin(self, index), None, None
        try:
            if way_in.has_pre_hooks(module):
                handle = module.register_forward_pre_hook(begin)
            else:
                begin()
            output = module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
            return output
        finally:
            if handle is not None:
                handle.remove()
            if begin.is_done and index > 0:
                call_events.leave_layer()
                self._engine.leave_layer()
            if begin.has_entered:
                self._leave(output)

    def run_layer(
        self,
        index: int,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A call of a layer while gradients are on."""
        call = getattr(_of_thread, "call", None)
        if (
            call is None
            or call[0] is not self
            or module._forward_pre_hooks
            or not _is_running(call[1])
        ):
            return self.run(index, module, args, kwargs, None)
        # The usual case: run() would come to this, too.
        self._engine.enter_layer(index)
        try:
            return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            call_events.leave_layer()
            self._engine.leave_layer()

    def run_compiled(
        self, compiled: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of a part that is compiled: neither its ops nor its saves are seen."""
        self._engine.enter_compiled()
        try:
            with hook_stack.aside():
                return compiled(*args, **kwargs)
        finally:
            self._engine.leave_compiled()

    def begin(self, index: int) -> bool:
        """Whether the call that is recorded begins with this layer."""
        entered = not self._is_left_alone() and self._enter()
        if index > 0:
            self._engine.enter_layer(index)
        return entered

    def _is_left_alone(self) -> bool:
        """Whether a call that begins now is not ours, or one of ours is running."""
        return (
            not self._watched  # detached
            or self._paused > 0
            or getattr(_of_thread, "call", None) is not None
            or _is_capturing()
        )

    def _refuse_if_sharded(self, module: nn.Module) -> None:
        try:
            self._check(module)
        except InputError:
            owner = self._owner()
            (owner or self.detach)()  # nothing stays half attached
            raise

    def _enter(self) -> bool:
        if not self._records:
            return False
        if not self._idle and not (hook_stack.is_free() and self._engine.enter()):
            return False
        around = self._around()
        around.__enter__()
        # First of all, so that what Ctrl-C leaves can be found.
        _of_thread.call = (self, _frame_of_run(), around)
        if not self._idle:
            hook_stack.push(self._hooks)
        return True

    def _leave(self, output: Any) -> None:
        call = getattr(_of_thread, "call", None)
        if call is None or call[0] is not self:
            return  # detached from inside of it
        _of_thread.call = None
        call[2].__exit__(None, None, None)
        if self._engine.is_entered:
            hook_stack.pop(self._hooks)
            self._engine.leave(tensors_in(output))

    def is_alive(self) -> bool:
        """Whether the attached model is still there."""
        return bool(self._watched) and self._watched[0]() is not None

    def evaluates(self) -> None:
        """The model is called without gradients: nothing is observed for that."""
        _end_interrupted_call()
        _C.rest()

    def owned_by(self, detach: weakref.WeakMethod[Callable[[], object]]) -> None:
        """Whoever has more to detach than this."""
        self._owner = detach

    def set_policies(
        self,
        policies: list[Policy],
        after_difference: str = "cheap",
        tell: bool = False,
    ) -> None:
        """Other policies, one for each layer, from the next call on.

        ``after_difference``: the policy of a call that runs other ops than its keep
        set knows, from the first of them on. Where every layer keeps everything, none
        tells of its calls, unless ``tell``.
        """
        self._engine.set_layers(
            [_rules(each, self._min_bytes, after_difference) for each in policies]
        )
        self._idle = all(policy == "keep" for policy in policies)
        self._tell_of_layers(self._records and (tell or not self._idle))

    def _tell_of_layers(self, tell: bool) -> None:
        """Have layers tell of their calls, or not.

        A call that another thread is in meanwhile is observed in part: what it
        computes is the same.
        """
        model = self._watched[0]() if self._watched else None
        if tell == self._tells_of_layers or model is None:
            return
        self._tells_of_layers = tell
        if not tell:
            way_in.take_away_parts(model, self)
            return
        for index, watched in enumerate(self._watched):
            module = watched()
            if index > 0 and module is not None:
                way_in.place(module, self, index)

    def record(self, recorder: Recorder | None) -> None:
        """From the next call on, tell ``recorder`` of layers, saves and results."""
        self._engine.record(recorder)

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

    @property
    def calls_unlike_keep_set(self) -> int:
        """As in ``stats()``, without the rest of it."""
        return self._engine.calls_unlike_keep_set

    def reset_stats(self) -> None:
        self._engine.reset_stats()

    def on_detach(self, work: Callable[[], object]) -> None:
        """Have ``work`` done when this is detached."""
        self._on_detach.append(work)

    def detach(self) -> None:
        """Let go of the layers. Graphs that exist still can go backward."""
        _end_interrupted_call()
        call = getattr(_of_thread, "call", None)
        if call is not None and call[0] is self:  # from inside of a call
            self._leave(None)
        for work in self._on_detach:
            work()
        self._on_detach.clear()
        self._records = False
        _C.rest()
        for index, watched in enumerate(self._watched):
            module = watched()
            if module is None:
                continue
            way_in.take_away(module, self)
            if index == 0:
                way_in.take_away_parts(module, self)  # also what was compiled since
            _replays.pop(module, None)
        self._watched.clear()
        self._tells_of_layers = False
        if self._come_back is not None:
            self._come_back()


def _frame_of_run() -> FrameType:
    """Of the call of a layer that begins now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not Replay.run.__code__:
        frame = frame.f_back
    assert frame is not None
    return frame


def _end_interrupted_call() -> None:
    """End the call that this thread was in, if Ctrl-C came while it was ending.

    A frame that runs no longer can be cleared; one that runs refuses.
    """
    call = getattr(_of_thread, "call", None)
    if call is None:
        return
    if not _is_running(call[1]):
        call[0]._leave(None)


def _is_running(frame: FrameType) -> bool:
    try:
        frame.clear()
    except RuntimeError:
        return True
    return False


def _is_capturing() -> bool:
    """Whether what runs becomes a CUDA graph: its memory is the graph's own."""
    cuda = torch.cuda
    is_used = cuda.is_initialized()  # type: ignore[no-untyped-call]
    return bool(is_used and cuda.is_current_stream_capturing())


def is_attached(model: nn.Module) -> bool:
    """Whether the model or a part of it is."""
    for module in model.modules():
        found = _replays.get(module)
        replay = None if found is None else found()
        if replay is not None and replay.is_alive():
            return True
    return False


def attach(
    model: nn.Module,
    policy: Policy | Mapping[str, Policy] = "cheap",
    *,
    min_bytes: int = DEFAULT_MIN_BYTES,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    before: BeforeCall | None = None,
) -> Replay:
    """Recompute from now on what ``policy`` does not keep.

    One policy for all layers, or policies by layer name or pattern
    (``{"transformer.h.*": "block"}``; the first that matches counts, layers
    without one keep everything). Storages smaller than ``min_bytes`` are kept.
    ``around()`` gives a context for each call that is recorded; ``before`` is called
    before the model is.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    way_in.take_away_dead(model)
    if is_attached(model):
        raise PlanError("the model, or a part of it, is attached already: detach it")
    way_in.remove_dead_hooks(model)
    if isinstance(min_bytes, bool) or not isinstance(min_bytes, int) or min_bytes < 0:
        raise PlanError(f"min_bytes must be an int >= 0, got {min_bytes!r}")
    layers = _choose(find_layers(model).modules, policy)
    return Replay(model, layers, min_bytes, around, before)


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


def _rules(
    policy: Policy, min_bytes: int, after_difference: str = "cheap"
) -> TapeRules:
    if isinstance(policy, KeepSet):
        return TapeRules("keep", policy, min_bytes, after_difference=after_difference)
    return TapeRules(policy, None, min_bytes)


def _device_of(model: nn.Module) -> torch.device:
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        return tensor.device
    return torch.device("cpu")
