"""Keys and values that Hugging Face's models hold for generation.

With ``use_cache`` on, as most configurations have it, a call fills a cache that holds
every layer's keys and values for as long as the output lives. In training nobody
reads them. The switch stays as it is: with it off a model runs other ops, whose
results differ in their last bits. Instead, a cache that the library made in a
training call, and that nobody asked for, lets go of what a layer wrote.

When: after the layer returned, if a trace has shown that nothing reads it again in
the call; else after the call. What is left in its place still has a shape, and raises
``ForgottenError`` when it is read. Caches of other kinds are left alone.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import nn

from memscale._C import Choice, Error, Plan, Recorder, format_bytes
from memscale.calls import call_events
from memscale.model.inputs import tensors_in

__all__ = ["Caches", "ForgottenError", "UseCache", "as_wrapped", "off"]

T = TypeVar("T")

# Frames of these between the user's call of a model and the cache that it makes.
_LIBRARIES = {"torch", "transformers", "peft", "accelerate", "memscale"}


class ForgottenError(Error):
    """Keys or values were read that a training call let go of."""

    def __init__(self) -> None:
        super().__init__(
            "the keys and values of this cache were let go: a wrapped model does not "
            "hold what it cached in a training call, because training does not read "
            "it. To use them, call the model with use_cache=True, or pass it a cache "
            "of your own as past_key_values"
        )


class _Forgotten(torch.Tensor):
    """In the place of a tensor that was let go: its shape, and no bytes."""

    @staticmethod
    def of(tensor: torch.Tensor) -> _Forgotten:
        made: _Forgotten = torch.Tensor._make_wrapper_subclass(
            _Forgotten,
            tensor.shape,
            strides=tensor.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
            storage_size=0,
        )
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        raise ForgottenError

    def _read(self, *_: Any, **__: Any) -> Any:
        raise ForgottenError

    # These ask for bytes without calling an op.
    __reduce_ex__ = __deepcopy__ = _read
    __array__ = numpy = tolist = data_ptr = _read  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<let go in a training call: {self.dtype}{list(self.shape)}>"


class Caches:
    """How the calls of one wrapped model treat the caches that are made in them."""

    def __init__(
        self, model: nn.Module, say: weakref.WeakMethod[Callable[..., None]]
    ) -> None:
        self.early = False  # after each layer: no layer reads another's entries
        self._model = weakref.ref(model)  # which owns this
        self._say = say
        self._said = False

    @contextmanager
    def in_call(self) -> Iterator[None]:
        call = _Call(self.early, self._model())
        with _entered(call):
            try:
                yield
            finally:
                call.forget_all()
        held = 0 if self._said else call.bytes_held()
        say = self._say()
        if held and say is not None:
            self._said = True
            say(
                f"the model's cache of past keys and values holds {format_bytes(held)} "
                "through each training step, because it is of a kind that cannot be "
                "let go: config.use_cache = False saves that"
            )


class UseCache:
    """The technique: see memscale.techniques.technique.Technique."""

    name = "use_cache"

    def __init__(
        self, model: nn.Module, say: weakref.WeakMethod[Callable[..., None]]
    ) -> None:
        self.caches = Caches(model, say)

    def attach(self, plan: Plan | None, otherwise: Choice | None) -> None:
        chosen = otherwise if plan is None else plan.find_choice(self.name)
        self.caches.early = chosen is not None

    def detach(self) -> None:
        self.caches.early = False

    def around_call(self) -> AbstractContextManager[object]:
        return self.caches.in_call()

    @property
    def hears_of_layers(self) -> bool:
        return self.caches.early

    def plain_optimizer(
        self, optimizer: torch.optim.Optimizer
    ) -> torch.optim.Optimizer:
        return optimizer

    def record(self, recorder: Recorder | None) -> None:
        """Nothing is told: a real step does not show what reads a layer's entries.

        So a plan that is made of it lets nothing go early, and caches are let go after
        the call, as without a plan.
        """

    def stats(self) -> dict[str, int]:
        return {}

    def describe(self) -> str | None:
        return "caches let go after each layer" if self.caches.early else None


@contextmanager
def forgetting() -> Iterator[None]:
    """While a step is traced: caches are treated as in calls of a wrapped model.

    Raises ForgottenError if a layer reads what another wrote into a cache.
    """
    with _entered(_Call(early=True, model=None)):
        yield


def as_wrapped(trace: Callable[[], T]) -> T:
    """What ``trace`` gives for a step as it runs wrapped: caches forget, if they may.

    A model whose layers read what others cached has its caches as they are.
    """
    try:
        with forgetting():
            return trace()
    except ForgottenError:
        return trace()


class _Call:
    """A training call of a model, in the thread that runs it."""

    def __init__(self, early: bool, model: nn.Module | None) -> None:
        self.early = early
        # Only what this module's own call caches is let go early: what calls inside
        # of it cache, it may pass from one to the other. None: it is a trace's.
        self._model = model
        self.recorder: Recorder | None = None
        self._made: list[weakref.ref[Any]] = []
        self._early: list[weakref.ref[Any]] = []  # among them
        self._written: list[tuple[weakref.ref[Any], int]] = []

    def made(self, cache: Any, maker: nn.Module) -> None:
        self._made.append(weakref.ref(cache))
        if self._model is None or maker is self._model:
            self._early.append(weakref.ref(cache))

    def wrote(self, cache: Any, layer: int) -> None:
        if any(each() is cache for each in self._early):
            self._written.append((weakref.ref(cache), layer))

    def layer_left(self) -> None:
        if self.early:
            self.forget_written()

    def call_left(self) -> None:
        self.forget_all()

    def forget_written(self) -> None:
        written, self._written = self._written, []
        for reference, layer in written:
            cache = reference()
            if cache is not None and _is_known(cache, cache.layers[layer]):
                self._forget(cache.layers[layer])

    def forget_all(self) -> None:
        self._written.clear()
        for cache in self._caches():
            for entry in cache.layers:
                if _is_known(cache, entry):
                    self._forget(entry)

    def bytes_held(self) -> int:
        """By entries that are not known, of caches that outlive the call."""
        storages = {}
        for cache in self._caches():
            for entry in cache.layers:
                if _is_known(cache, entry):
                    continue
                for tensor in tensors_in(vars(entry)):
                    storage = tensor.untyped_storage()
                    storages[storage._cdata] = storage.nbytes()
        return sum(storages.values())

    def _caches(self) -> Iterator[Any]:
        for reference in self._made:
            cache = reference()
            if cache is not None:
                yield cache

    def _forget(self, entry: Any) -> None:
        for name in ("keys", "values"):
            tensor = getattr(entry, name)
            if tensor is None or isinstance(tensor, _Forgotten):
                continue
            left = _Forgotten.of(tensor)
            if self.recorder is not None:
                self.recorder.forget(tensor)
                # It dies when the tensor would.
                end = weakref.finalize(left, self.recorder.end_forgotten)
                end.atexit = False
            setattr(entry, name, left)


def _is_known(cache: Any, entry: Any) -> bool:
    """Whether what it holds are keys and values, and nothing is made from them."""
    kinds = sys.modules["transformers.cache_utils"]
    return type(cache) is kinds.DynamicCache and type(entry) in (
        kinds.DynamicLayer,
        kinds.DynamicSlidingWindowLayer,
    )


# ---- seeing caches: two methods of the library's, while calls run ----

_lock = threading.Lock()
_num_calls = 0
_originals: list[tuple[type, str, Any]] = []


@contextmanager
def _entered(call: _Call) -> Iterator[None]:
    global _num_calls
    with _lock:
        _num_calls += 1
        if _num_calls == 1:
            _watch_caches()
    try:
        with call_events.listening(call):
            yield
    finally:
        with _lock:
            _num_calls -= 1
            if _num_calls == 0:
                while _originals:
                    owner, name, original = _originals.pop()
                    setattr(owner, name, original)


def _current() -> _Call | None:
    call = call_events.current()
    return call if isinstance(call, _Call) else None


def _watch_caches() -> None:
    module = sys.modules.get("transformers.cache_utils")
    # Older versions, without DynamicLayer, hold keys and values in other ways.
    if module is None or not hasattr(module, "DynamicLayer"):
        return
    for owner, name, watched in (
        (module.DynamicCache, "__init__", _watched_init),
        (module.Cache, "update", _watched_update),
    ):
        original = vars(owner)[name]
        _originals.append((owner, name, original))
        setattr(owner, name, watched(original))


def _watched_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        call = _current()
        if call is None:
            return
        maker = _maker(sys._getframe(1))
        if maker is not None:
            call.made(self, maker)

    return init


def _watched_update(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        call = _current()
        if call is not None:
            # update(key_states, value_states, layer_idx, ...)
            call.wrote(self, kwargs["layer_idx"] if len(args) < 3 else args[2])
        return result

    return update


def _maker(frame: FrameType | None) -> nn.Module | None:
    """The model of the library that makes a cache here which nobody asked for.

    None: the cache is the user's, or may be. It is not, if the model was called
    without a cache and without ``use_cache=True``.
    """
    if _package(frame) != "transformers":
        return None
    called: FrameType | None = None  # the outermost module of the library's
    while frame is not None and _package(frame) in _LIBRARIES:
        if frame.f_code is nn.Module._call_impl.__code__:
            called = frame
        frame = frame.f_back
    if called is None:
        return None
    given = called.f_locals
    named = dict(given["kwargs"])
    if given["args"]:
        try:
            signature = inspect.signature(given["self"].forward)
            named.update(signature.bind_partial(*given["args"]).arguments)
        except (TypeError, ValueError):
            return None
    is_asked_for = named.get("use_cache") or named.get("past_key_values") is not None
    maker: nn.Module = given["self"]
    return None if is_asked_for else maker


def _package(frame: FrameType | None) -> str:
    name = "" if frame is None else frame.f_globals.get("__name__", "")
    return str(name).partition(".")[0]


# ---- without caches ----


def off(model: nn.Module) -> AbstractContextManager[None]:
    """No caches: for steps that are recomputed, where each layer would write twice."""
    configs = {
        id(config): config
        for config in (module.__dict__.get("config") for module in model.modules())
        if getattr(config, "use_cache", None) is True
    }
    return _turned_off(list(configs.values())) if configs else nullcontext()


@contextmanager
def _turned_off(configs: list[Any]) -> Iterator[None]:
    for config in configs:
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs:
            config.use_cache = True


call_events.guard_repeated_layers(off)
