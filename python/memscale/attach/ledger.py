"""What was predicted beside what the first steps showed.

::

    for entry in model._memscale_executor.ledger:
        print(entry)        # predicted and measured peak, predicted and measured time

A step is what lies between two calls of the model in training: forward, backward, the
optimizer's step. The first one is left out, as the optimizer makes its state in it, and
so are steps with an evaluation in between. A device that computes on its own is waited
for between the steps that are measured, and asked for its times; where it has none to
give, none are measured. On the CPU, where a process has many other tensors, the
measured peak is what this training holds when a step begins (parameters, gradients,
buffers, optimizer state, the batch) and what the step adds.

Under a budget all later steps are watched as well, by their peaks alone: nothing is
waited for, and the statistics of the device's allocator are read, not reset.

What follows from it is decided in C++ (core/session): here, steps are measured.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import TypedDict

import torch

from memscale._C import LedgerEntry, MemoryTracker, Tolerance, can_time

__all__ = ["TOLERANCE", "Entry", "Measured", "Measurement", "held_bytes"]

Entry = LedgerEntry

# Of the first steps, before a plan is made anew.
TOLERANCE = Tolerance()


class Measured(TypedDict):
    """One step; see MeasuredStep in core/session."""

    before: int
    peak: int
    nanoseconds: int | None
    nanoseconds_replayed: int
    held: int | None


def held_bytes(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    """The bytes behind tensors, on that type of device, each storage once."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        if tensor.device.type == device.type and tensor.layout is torch.strided:
            with contextlib.suppress(NotImplementedError):  # a wrapper of others
                storage = tensor.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


class Measurement:
    """Of one step, from its construction to ``end``.

    ``what``: Session.measure_of's word. ``nanoseconds_replayed``: by all steps so far,
    asked for only where times are measured. ``held``: see MeasuredStep.
    """

    def __init__(
        self,
        device: torch.device,
        what: str,
        nanoseconds_replayed: Callable[[], int],
        held: int | None,
    ) -> None:
        self._is_timed = what == "all"
        self._held = held
        self._asked = nanoseconds_replayed
        self._replayed = nanoseconds_replayed() if self._is_timed else 0
        self._device = device
        if self._is_timed:
            _wait_for(device)
        self._tracker = MemoryTracker(device, resets=what != "peak")
        self._tracker.start()
        self._start = time.perf_counter_ns()

    def end(self) -> Measured:
        """The next step is about to begin."""
        if self._is_timed:
            _wait_for(self._device)
        self._tracker.stop()
        step = time.perf_counter_ns() - self._start
        is_timed = self._is_timed and can_time(self._device)
        return {
            "before": self._tracker.before,
            "peak": self._tracker.peak,
            "nanoseconds": step if is_timed else None,
            "nanoseconds_replayed": self._asked() - self._replayed if is_timed else 0,
            "held": self._held,
        }

    def cancel(self) -> None:
        """This step does not count."""
        self._tracker.stop()


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu" and can_time(device):
        torch.accelerator.synchronize(device)
