"""Who is told that an optimizer is about to step, whichever it is.

torch has hooks for that, one list for the process. A hook must not take itself off that
list while torch goes through it, and objects that are dropped must not stay in it. So
there is one hook, for as long as anybody watches, and it asks those that are alive.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

__all__ = ["Watcher", "stop_watching", "watch"]


class Watcher(Protocol):
    def before_step(self, optimizer: torch.optim.Optimizer) -> None: ...


# Weak: a model that is dropped without being detached is watched no longer.
_watchers: weakref.WeakSet[Any] = weakref.WeakSet()
_hook: RemovableHandle | None = None


def _before_any_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for watcher in list(_watchers):
        watcher.before_step(optimizer)


def watch(watcher: Watcher) -> None:
    """From now on, ``watcher`` is told; it is not kept alive."""
    global _hook
    _watchers.add(watcher)
    if _hook is None:
        _hook = register_optimizer_step_pre_hook(_before_any_step)


def stop_watching(watcher: Watcher) -> None:
    """Never from ``before_step``, nor from a finalizer: torch may be at its hooks."""
    global _hook
    _watchers.discard(watcher)
    if not _watchers and _hook is not None:
        _hook.remove()
        _hook = None
