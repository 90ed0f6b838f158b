"""300 steps: the bytes alive after a step are the same to the byte, as plainly.

Nothing may wait for Python's garbage collector, which is off in these runs.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

from memscale import memory, replay
from replay_training import ARCHITECTURES

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim", "steady")

STEPS = 300
# By kind: attention, recurrence, writes in place, shapes that vary.
NAMES = ["attention", "gru", "residual_mlp", "experts"]


@pytest.fixture
def steady() -> Iterator[None]:
    """No collector, and one thread: these tensors are too small to be shared out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    torch.set_num_threads(threads)


@dataclass
class Held:
    """Bytes of each step: alive in the end, and at most."""

    after: list[int] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)


def train(name: str, device: str, policy: str | None, steps: int) -> Held:
    torch.manual_seed(0)
    model = ARCHITECTURES[name].build().to(device).train()
    batch = [t.to(device) for t in ARCHITECTURES[name].batch()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handle = replay.attach(model, policy, min_bytes=0) if policy else None
    held = Held()
    for _ in range(steps):
        with memory.track(device) as tracker:
            optimizer.zero_grad()
            model(*batch).backward()
            optimizer.step()
        held.after.append(_allocated(device, tracker))
        held.peaks.append(tracker.peak)
    if handle is not None:
        assert handle.stats().saves_dropped >= steps
        handle.detach()
    return held


def _allocated(device: str, tracker: memory.MemoryTracker) -> int:
    if device == "cpu":
        return tracker.current
    return torch.accelerator.memory_allocated()


@pytest.mark.parametrize("policy", ["cheap", "block"])
@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("name", NAMES)
def test_bytes_alive_after_each_step_are_constant(
    name: str, device: str, policy: str
) -> None:
    plain = train(name, device, None, steps=3)
    gc.collect()  # some models hold themselves
    ours = train(name, device, policy, STEPS)
    # The first step makes gradients and the optimizer's state.
    assert len(ours.after) == STEPS
    assert set(ours.after[1:]) == {plain.after[-1]}


@pytest.mark.parametrize("policy", ["cheap", "block"])
def test_peaks_of_gpt2_are_constant(policy: str) -> None:
    plain = train("gpt2", "sim", None, steps=3)
    gc.collect()
    ours = train("gpt2", "sim", policy, 100)
    assert set(ours.after[1:]) == {plain.after[-1]}
    assert len(set(ours.peaks[1:])) == 1
    assert ours.peaks[1] < plain.peaks[1]
