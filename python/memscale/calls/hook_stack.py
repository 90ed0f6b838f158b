"""The calling thread's stack of saved-tensor hooks, and what torch does not tell.

While models are attached, two functions of torch are replaced:

- ``torch.autograd.graph.disable_saved_tensors_hooks``: ``torch.func`` transforms call
  it, as they refuse to run while saved-tensor hooks are on. It takes our hooks off the
  stack for as long as it lasts: what is saved then is held by autograd itself, as
  without MemScale.
- ``torch.UntypedStorage.resize_``: reversible layers free activations with it that
  autograd did not save. What recomputation still needs of them is copied first. No op
  tells of this call, and afterwards the bytes are gone.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.autograd.graph
from torch._C import _autograd

from memscale import _C

__all__ = ["aside", "is_free", "pop", "push", "step_aside", "stop_stepping_aside"]

_ours = threading.local()
_lock = threading.RLock()  # a finalizer may come at any time
_num_attached = 0
_disable = torch.autograd.graph.disable_saved_tensors_hooks


def top() -> Any:
    """The hooks that autograd would call now; None: it holds tensors itself."""
    # True: also while ours are paused, in a custom Function.
    return _autograd._top_saved_tensors_default_hooks(True)


def is_free() -> bool:
    """Whether nobody else has hooks, to see what is saved, or forbids them."""
    # Torch's stub does not know this function.
    is_enabled = _autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
    return top() is None and bool(is_enabled())


def push(hooks: tuple[Any, Any]) -> None:
    _autograd._push_saved_tensors_default_hooks(*hooks)
    _ours.hooks = hooks


def pop(hooks: tuple[Any, Any]) -> None:
    """Take ours off, if they are on top: others' are not touched."""
    found = top()
    if found is not None and found[0] is hooks[0]:
        _autograd._pop_saved_tensors_default_hooks()
    _ours.hooks = None


@contextmanager
def aside() -> Iterator[None]:
    """Within it ours are off, if they are on top."""
    hooks: tuple[Any, Any] | None = getattr(_ours, "hooks", None)
    found = top()
    if found is None or hooks is None or found[0] is not hooks[0]:
        hooks = None  # not ours
    if hooks is not None:
        _autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        if hooks is not None:
            _autograd._push_saved_tensors_default_hooks(*hooks)


@contextmanager
def _disable_after_ours(error_message: str) -> Iterator[None]:
    with aside(), _disable(error_message):
        yield


functools.update_wrapper(_disable_after_ours, _disable)

_resize = torch.UntypedStorage.resize_


@functools.wraps(_resize)
def _resize_after_copies(storage: torch.UntypedStorage, size: int) -> Any:
    _C.before_resize(storage)
    return _resize(storage, size)


def step_aside() -> None:
    """From now on, for one more attached model."""
    global _num_attached
    with _lock:
        _num_attached += 1
        torch.autograd.graph.disable_saved_tensors_hooks = _disable_after_ours
        torch.UntypedStorage.resize_ = _resize_after_copies  # type: ignore[assignment, method-assign]


def stop_stepping_aside() -> None:
    global _num_attached
    with _lock:
        _num_attached -= 1
        if _num_attached == 0:
            torch.autograd.graph.disable_saved_tensors_hooks = _disable
            torch.UntypedStorage.resize_ = _resize  # type: ignore[assignment, method-assign]
