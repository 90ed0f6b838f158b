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
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from memscale._C import MemoryTracker, OpTimes, Plan, can_time, format_bytes

__all__ = ["PEAK_MARGIN", "TIME_MARGIN", "Entry", "Watch"]

# A peak above the prediction by more than this share of it, or a slowdown above it by
# more than this share of a step, and a plan is made anew.
PEAK_MARGIN = 0.03
TIME_MARGIN = 0.05


@dataclass(frozen=True)
class Entry:
    """One step: predicted and measured. Time is None where a device tells none."""

    predicted_peak: int
    measured_peak: int
    predicted_slowdown: float
    measured_slowdown: float | None

    def __str__(self) -> str:
        text = (
            f"peak {format_bytes(self.measured_peak)} measured, "
            f"{format_bytes(self.predicted_peak)} predicted"
        )
        if self.measured_slowdown is not None:
            text += (
                f"; {self.measured_slowdown:.1%} slower measured, "
                f"{self.predicted_slowdown:.1%} predicted"
            )
        return text


class Watch:
    """Measures steps of one plan, until there are enough."""

    def __init__(self, plan: Plan, resident: int, num_steps: int) -> None:
        self.plan = plan
        self.done = num_steps == 0
        self.entries: list[Entry] = []
        self.op_times = OpTimes()
        self._resident = resident  # what the plan takes to be there between steps
        self._left = num_steps
        self._is_first = True
        self._tracker: MemoryTracker | None = None
        self._start = 0
        self._replayed = 0

    def begin_step(self, device: torch.device, nanoseconds_replayed: int) -> None:
        """The model is called. ``nanoseconds_replayed``: so far."""
        _wait_for(device)
        self._tracker = MemoryTracker(device)
        self._tracker.start()
        self._start = time.perf_counter_ns()
        self._replayed = nanoseconds_replayed

    def cancel(self) -> None:
        """This step does not count."""
        if self._tracker is not None:
            self._tracker.stop()
            self._tracker = None

    def _predicted(self) -> float:
        """The slowdown by replay, which is what is measured: not the optimizer's."""
        plain = self.plan.plain_nanoseconds
        return self.plan.nanoseconds / plain if plain else 0.0

    def end_step(self, device: torch.device, nanoseconds_replayed: int) -> None:
        """The next call is about to begin."""
        tracker, self._tracker = self._tracker, None
        if tracker is None:
            return
        _wait_for(device)
        tracker.stop()
        if self._is_first:
            self._is_first = False
            return
        self._left -= 1
        self.done = self._left == 0
        step = time.perf_counter_ns() - self._start
        replayed = nanoseconds_replayed - self._replayed
        slowdown = None
        if can_time(device):
            slowdown = max(replayed, 0) / max(step - replayed, 1)
        peak = tracker.peak
        if device.type == "cpu":  # whose tensors are not all of this training
            peak += self._resident - tracker.before
        self.entries.append(
            Entry(self.plan.peak_bytes, peak, self._predicted(), slowdown)
        )

    def margin(self) -> int:
        """Bytes by which the prediction was too low; 0 within PEAK_MARGIN."""
        measured = max(entry.measured_peak for entry in self.entries)
        predicted = self.plan.peak_bytes
        return measured - predicted if measured > predicted * (1 + PEAK_MARGIN) else 0

    def is_slow(self) -> bool:
        """Whether steps are slower than predicted, by more than TIME_MARGIN."""
        excess = [
            each.measured_slowdown - each.predicted_slowdown
            for each in self.entries
            if each.measured_slowdown is not None
        ]
        # The least: whatever else the machine did, it took no less.
        return bool(excess) and min(excess) > TIME_MARGIN


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu" and can_time(device):
        torch.accelerator.synchronize(device)
