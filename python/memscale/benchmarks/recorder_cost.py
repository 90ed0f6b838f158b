"""What recording costs: microseconds of process time per op and per save.

On real tensors, forward and backward of a small model whose kernels take next to
no time, so that the recorder's share can be seen: with the recorder off, on, and on
with saved-tensor hooks, in alternating order; medians of the differences.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from memscale._C import Recorder
from memscale.trace.told import unpack

__all__ = ["measure"]

_PAIRS = 21
_LAYERS = 200


def measure() -> tuple[float, float]:
    """Microseconds per recorded op, and per recorded save."""
    model = nn.Sequential(
        *(layer for _ in range(_LAYERS) for layer in (nn.Linear(8, 8), nn.Tanh()))
    )
    x = torch.ones(4, 8)
    _run(model, x, record=True, saves=True)  # warm up
    per_op, per_save = [], []
    for _ in range(_PAIRS):
        plain, _, _ = _run(model, x, record=False, saves=False)
        recorded, num_ops, _ = _run(model, x, record=True, saves=False)
        saving, _, num_saves = _run(model, x, record=True, saves=True)
        per_op.append((recorded - plain) / num_ops)
        per_save.append((saving - recorded) / num_saves)
    return 1e6 * statistics.median(per_op), 1e6 * statistics.median(per_save)


def _run(
    model: nn.Module, x: torch.Tensor, *, record: bool, saves: bool
) -> tuple[float, int, int]:
    """Process seconds of a forward and backward, ops and saves recorded."""
    recorder = Recorder(x.device, FakeTensor, fake_run=False)
    for parameter in model.parameters():
        recorder.add_resident(parameter, "parameters")
    model.zero_grad()
    if record:
        recorder.start()
    start = time.process_time()
    with ExitStack() as stack:
        if saves:
            stack.enter_context(saved_tensors_hooks(recorder.save, unpack))
        loss = model(x).sum()
    loss.backward()
    seconds = time.process_time() - start
    if record:
        recorder.stop()
    trace = recorder.finish()
    return seconds, len(trace), trace.num_saves
