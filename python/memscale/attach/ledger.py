"""What was predicted beside what the first steps showed.

::

    for entry in model._memscale_executor.ledger:
        print(entry)        # predicted and measured peak, predicted and measured time

A step is what lies between two calls of the model in training: forward, backward, the
optimizer's step. The first one is left out, as the optimizer makes its state in it, and
so are steps with an evaluation in between. A device that computes on its own is waited
for between the steps that are measured, and asked for its times; where it has none to
give, none are measured. On the CPU, where a process has many other
tensors, the measured peak is the predicted start of a step and what the step adds.

What follows from it is decided in C++ (core/session): here, steps are measured.
"""

from __future__ import annotations

import time
from typing import TypedDict

import torch

from memscale._C import LedgerEntry, MemoryTracker, Tolerance, can_time

__all__ = ["TOLERANCE", "Entry", "Measured", "Measurement"]

Entry = LedgerEntry

# Of the first steps, before a plan is made anew.
TOLERANCE = Tolerance()


class Measured(TypedDict):
    """One step; see MeasuredStep in core/session."""

    before: int
    peak: int
    nanoseconds: int | None
    nanoseconds_replayed: int


class Measurement:
    """Of one step, from its construction to ``end``.

    ``nanoseconds_replayed``: by all steps so far.
    """

    def __init__(self, device: torch.device, nanoseconds_replayed: int) -> None:
        _wait_for(device)
        self._device = device
        self._tracker = MemoryTracker(device)
        self._tracker.start()
        self._start = time.perf_counter_ns()
        self._replayed = nanoseconds_replayed

    def end(self, nanoseconds_replayed: int) -> Measured:
        """The next step is about to begin."""
        _wait_for(self._device)
        self._tracker.stop()
        step = time.perf_counter_ns() - self._start
        return {
            "before": self._tracker.before,
            "peak": self._tracker.peak,
            "nanoseconds": step if can_time(self._device) else None,
            "nanoseconds_replayed": nanoseconds_replayed - self._replayed,
        }

    def cancel(self) -> None:
        """This step does not count."""
        self._tracker.stop()


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu" and can_time(device):
        torch.accelerator.synchronize(device)
