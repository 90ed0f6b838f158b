"""Predicted against measured peaks of steps that recompute: by policy, under a budget.

On the simulated device, whose allocator counts what tapes hold to the byte.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

import memscale
from memscale import replay
from memscale._C import TapeRules, Timeline, replayed_step
from memscale.benchmarks.cases import Case
from memscale.benchmarks.measure import Attach, measure_peak

__all__ = ["WAYS", "rows_of"]

WAYS = ("cheap", "block", "budget")
_DEVICE, _GRANULARITY = "sim", 512


def _by_policy(case: Case, model: nn.Module, policy: str) -> tuple[int, Attach]:
    """The predicted peak, and what attaches the policy."""
    plain = memscale.estimate(
        model,
        case.sample("cpu"),
        optimizer=case.optimizer_argument,
        loss_fn=case.loss_fn,
        device=_DEVICE,
    ).trace
    rules = [TapeRules(policy, None, replay.DEFAULT_MIN_BYTES)] * len(plain.layers)
    step = replayed_step(plain, rules, on_cpu=False)
    peak = Timeline(step.trace, "device", _GRANULARITY).peak()
    assert peak is not None

    @contextlib.contextmanager
    def attach(trained: nn.Module) -> Iterator[None]:
        handle = replay.attach(trained, policy)
        try:
            yield
        finally:
            handle.detach()

    return peak.bytes, attach


def _by_budget(case: Case, model: nn.Module) -> tuple[int, Attach]:
    """Half-way between the smallest peak that there is and the plain one."""
    arguments: Any = {
        "optimizer": case.optimizer_argument,
        "loss_fn": case.loss_fn,
        "device": _DEVICE,
    }
    batch = case.sample("cpu")
    peaks = [plan.peak_bytes for plan in memscale.pareto(model, batch, **arguments)]
    config = memscale.Config(budget=(min(peaks) + max(peaks)) // 2)
    plan = memscale.plan(model, batch, config=config, **arguments)

    @contextlib.contextmanager
    def attach(trained: nn.Module) -> Iterator[None]:
        memscale.wrap(trained, memscale.Config(plan=plan, enable_logging=False))
        try:
            yield
        finally:
            memscale.detach(trained)

    return plan.peak_bytes, attach


def rows_of(case: Case) -> Iterator[dict[str, Any]]:
    """A row for each way to recompute. One that fails says why instead."""
    model = case.build()
    for way in WAYS:
        row: dict[str, Any] = {
            "case": case.name,
            "optimizer": case.optimizer,
            "device": _DEVICE,
            "way": way,
        }
        try:
            predicted, attach = (
                _by_budget(case, model)
                if way == "budget"
                else _by_policy(case, model, way)
            )
            row["predicted"] = predicted
            row["measured"] = measure_peak(
                model,
                case.sample("cpu"),
                case.loss_fn,
                case.optimizer_factory,
                _DEVICE,
                attach=attach,
            )
            row["error_percent"] = 100.0 * (predicted / row["measured"] - 1.0)
        except Exception as error:
            # One failing case must not hide the others; it misses a goal.
            row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0]
        yield row
