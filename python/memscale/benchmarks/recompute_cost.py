"""What replay costs where it drops nothing: microseconds per op and per save.

Forward and backward of deep models whose kernels take next to no time, plain and
with all ops taped and all saves kept, in alternating order. In the first model,
of additions, autograd saves nothing: its extra time is the ops'. The second has
saves as well: its extra time, less its ops' by the first model's median, is the
saves', packing and unpacking.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import nn

from memscale import replay
from memscale.benchmarks.recompute_case import spread

__all__ = ["measure_cost"]

_ROUNDS = 41
_STEPS = 4
_BLOCKS, _PER_BLOCK = 10, 20
_SHAPE = (8, 8)
# More than any tensor has: all are kept, though the policy would drop them.
_KEEP_ALL = 1 << 60


class _Shift(nn.Module):
    """One op, of which autograd saves nothing."""

    def __init__(self) -> None:
        super().__init__()
        # As large as the input: a smaller one would be summed up in backward.
        self.shift = nn.Parameter(torch.zeros(_SHAPE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


def _shifts() -> nn.Module:
    # In blocks, as real models are: what a layer costs is shared by its ops.
    return nn.Sequential(
        *(nn.Sequential(*(_Shift() for _ in range(_PER_BLOCK))) for _ in range(_BLOCKS))
    )


def _linears() -> nn.Module:
    width = _SHAPE[1]
    return nn.Sequential(
        *(
            nn.Sequential(
                *(
                    layer
                    for _ in range(_PER_BLOCK)
                    for layer in (nn.Linear(width, width), nn.Tanh())
                )
            )
            for _ in range(_BLOCKS)
        )
    )


def _steps(model: nn.Module, x: torch.Tensor) -> float:
    """Process seconds of a step, once caches are warm."""
    model.zero_grad(set_to_none=True)
    for step in range(1 + _STEPS):
        if step == 1:
            start = time.process_time()
        model(x).sum().backward()
    return (time.process_time() - start) / _STEPS


def _taped(model: nn.Module, x: torch.Tensor) -> tuple[float, int, int]:
    """Process seconds, ops and saves of a step with all taped and nothing dropped."""
    handle = replay.attach(model, "block", min_bytes=_KEEP_ALL)
    try:
        seconds = _steps(model, x)
        stats = handle.stats()
    finally:
        handle.detach()
    if stats.saves_dropped:
        raise RuntimeError(f"{stats.saves_dropped} saves were dropped, not kept")
    steps = 1 + _STEPS
    return seconds, stats.ops_recorded // steps, stats.saves_kept // steps


def _extra(model: nn.Module, x: torch.Tensor, turn: int) -> tuple[float, int, int]:
    """The seconds that taping adds to a step, its ops and its saves."""
    if turn % 2:
        taped, ops, saves = _taped(model, x)
        plain = _steps(model, x)
    else:
        plain = _steps(model, x)
        taped, ops, saves = _taped(model, x)
    return taped - plain, ops, saves


def _microseconds(seconds: float, count: int) -> float:
    return 1e6 * seconds / count if count else math.nan


def measure_cost(rounds: int = _ROUNDS) -> dict[str, Any]:
    """Spreads ``per_op`` and ``per_save`` in microseconds, and what was counted."""
    x = torch.ones(_SHAPE)
    models = _shifts(), _linears()
    for model in models:
        _extra(model, x, 0)  # warm up
    shifts, linears = [], []
    for turn in range(rounds):
        shifts.append(_extra(models[0], x, turn))
        linears.append(_extra(models[1], x, turn))
    per_op = spread([_microseconds(extra, ops) for extra, ops, _ in shifts])
    of_op = per_op["median"] / 1e6
    _, num_ops, num_saves = linears[0]
    return {
        "cost": "nothing dropped",
        "rounds": rounds,
        "ops": num_ops,
        "saves": num_saves,
        "ops_without_saves": shifts[0][1],
        "per_op": per_op,
        "per_save": spread(
            [_microseconds(extra - of_op * ops, saves) for extra, ops, saves in linears]
        ),
    }
