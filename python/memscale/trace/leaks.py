"""No fake tensor outlives its trace.

What a model's code names is swapped for copies while it is traced (see
memscale.trace.untouched), so what it keeps there goes with the trace. Code of libraries
is not read; should it keep tensors in a container or a cache of its own, they are
taken out again.
"""

from __future__ import annotations

import functools
import gc
import logging
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memscale._C import TraceError

__all__ = [
    "note_failure",
    "only_new_objects",
    "remove_fakes",
    "remove_fakes_of_failures",
]

_log = logging.getLogger("memscale")


@contextmanager
def only_new_objects() -> Iterator[None]:
    """Collections within it look at what was made within it, which takes no time."""
    if gc.get_freeze_count():  # by an outer call, or the user
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def remove_fakes(modes: Iterable[weakref.ref[Any]]) -> None:
    """Of these fake modes no tensor is left when it returns.

    Raises TraceError, saying where, if some cannot be removed. Every fake has its
    mode, so that a mode which is gone has none.
    """
    if not _alive(modes):
        return
    gc.collect()  # torch's own cycles
    left = _fakes(modes)
    if not left:
        return
    gc.unfreeze()  # a frozen object is nobody's referrer
    for holder in gc.get_referrers(*left):
        if holder is not left:
            _take_out(holder)
    del left
    gc.collect()
    left = _fakes(modes)
    if left:
        kinds = {
            type(holder).__name__
            for holder in gc.get_referrers(*left)
            if holder is not left
        }
        raise TraceError(
            f"{len(left)} tensors of the trace are kept by code of a library, in "
            f"objects of {', '.join(sorted(kinds)) or 'C++'}: what it keeps has no "
            "values now"
        )


_failed: list[weakref.ref[Any]] = []


def note_failure(modes: Iterable[weakref.ref[Any]]) -> None:
    """Their trace failed: while its error is alive, so are fakes in its frames."""
    _failed[:] = [ref for ref in (*_failed, *modes) if ref() is not None]


def remove_fakes_of_failures() -> None:
    """Once the errors are gone. What cannot be removed is logged."""
    gc.collect()
    modes = _failed[:]
    _failed.clear()
    try:
        remove_fakes(modes)
    except TraceError as error:
        # Its text: handlers may keep what they are given, and errors hold frames.
        _log.warning("%s", str(error))


def _alive(modes: Iterable[weakref.ref[Any]]) -> list[FakeTensorMode]:
    return [mode for ref in modes if (mode := ref()) is not None]


def _fakes(modes: Iterable[weakref.ref[Any]]) -> list[FakeTensor]:
    alive = _alive(modes)
    return [
        each
        for each in gc.get_objects()
        if issubclass(type(each), FakeTensor) and each.fake_mode in alive
    ]


def _take_out(holder: Any) -> None:
    """Every fake, from a container; what was written over by it is not known."""
    if type(holder).__name__ == "_lru_list_elem":
        for cache in gc.get_referrers(holder):
            _take_out(cache)
    elif isinstance(holder, functools._lru_cache_wrapper):
        holder.cache_clear()
    elif isinstance(holder, dict) and not _is_namespace(holder):
        for key in [k for k, v in holder.items() if isinstance(v, FakeTensor)]:
            del holder[key]
    elif isinstance(holder, list | deque):
        kept = [each for each in holder if not isinstance(each, FakeTensor)]
        holder.clear()
        holder.extend(kept)
    elif isinstance(holder, set):
        holder.difference_update([e for e in holder if isinstance(e, FakeTensor)])


def _is_namespace(holder: dict[Any, Any]) -> bool:
    return any(
        isinstance(owner, type) or getattr(owner, "__dict__", None) is holder
        for owner in gc.get_referrers(holder)
    )
