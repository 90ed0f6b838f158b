"""How many bytes a piece of code holds, now and at its peak, on any device.

::

    with memscale.memory.track() as memory:
        loss = model(batch).loss
        loss.backward()
    print(memory.peak)

On the CPU every tensor made since ``import memscale`` is counted; on an
accelerator the device's own allocator statistics are read. Blocks may nest,
overlap and run in several threads; what they see is the whole device, not the
thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from memscale._C import MemoryTracker

__all__ = ["MemoryTracker", "track"]


@contextlib.contextmanager
def track(device: torch.device | str | None = None) -> Iterator[MemoryTracker]:
    """Measure ``device`` (default: the current accelerator, else the CPU).

    Yields a tracker whose ``current`` and ``peak`` (bytes) can be read inside and
    after the block; ``before`` is what was allocated when it began. Starting to
    track an accelerator resets its peak statistics.
    """
    if device is None:
        device = torch.accelerator.current_accelerator() or "cpu"
    tracker = MemoryTracker(torch.device(device))
    tracker.start()
    try:
        yield tracker
    finally:
        tracker.stop()
