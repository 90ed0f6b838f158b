"""What happens inside a call of a model, for techniques that act between its layers.

Whoever runs a model's layers (replay, the tracer, the recorder) says here when one has
returned; a technique that wants to know listens for the length of a call. Listeners
are of one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

from torch import nn

from memscale._C import Recorder

__all__ = [
    "Listener",
    "current",
    "guard_repeated_layers",
    "layers_run_twice",
    "leave_call",
    "leave_layer",
    "listening",
    "telling",
]

_of_thread = threading.local()


class Listener(Protocol):
    """Hears of the call that its thread is in."""

    # Told of what the listener does to tensors, while a step is recorded.
    recorder: Recorder | None

    def layer_left(self) -> None: ...

    def call_left(self) -> None: ...


def current() -> Listener | None:
    """Who listens in this thread."""
    listener: Listener | None = getattr(_of_thread, "listener", None)
    return listener


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    before = current()
    _of_thread.listener = listener
    try:
        yield
    finally:
        _of_thread.listener = before


@contextmanager
def telling(recorder: Recorder) -> Iterator[None]:
    """Have the listener tell the recorder what it does."""
    listener = current()
    if listener is None:
        yield
        return
    listener.recorder = recorder
    try:
        yield
    finally:
        listener.recorder = None


def leave_layer() -> None:
    """A layer has returned, in this thread."""
    listener = current()
    if listener is not None:
        listener.layer_left()


def leave_call() -> None:
    """The model that is traced has returned."""
    listener = current()
    if listener is not None:
        listener.call_left()


# ---- steps whose layers run twice ----

Guard = Callable[[nn.Module], AbstractContextManager[None]]
_guards: list[Guard] = []


def guard_repeated_layers(guard: Guard) -> None:
    """Enter ``guard(model)`` around every step whose layers run twice."""
    _guards.append(guard)


@contextmanager
def layers_run_twice(model: nn.Module) -> Iterator[None]:
    """Around a step whose layers are recomputed, in Python, in backward."""
    with ExitStack() as stack:
        for guard in _guards:
            stack.enter_context(guard(model))
        yield
