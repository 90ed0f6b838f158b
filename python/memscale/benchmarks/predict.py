"""Predicted against measured peaks of training steps, and the cost of predicting."""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import time
from collections.abc import Iterator
from typing import Any

import memscale
from memscale.benchmarks import cost, predict_replayed
from memscale.benchmarks.cases import CASES, Case
from memscale.benchmarks.goals import Goal, Report
from memscale.benchmarks.measure import measure_peak

__all__ = ["run"]

DEVICES = ("sim", "cpu")
_MIB = 1 << 20
_HEADER = (
    f"{'case':<28} {'optimizer':<13} {'device':<6} {'way':<6} {'predicted':>13} "
    f"{'measured':>13} {'error':>9}"
)


def _rows_of(case: Case) -> Iterator[dict[str, Any]]:
    """A row for each device. One that fails says why instead of having an error."""
    model = None
    batch = case.sample("cpu")
    for device in DEVICES:
        row: dict[str, Any] = {
            "case": case.name,
            "optimizer": case.optimizer,
            "device": device,
            "way": "plain",
        }
        try:
            if model is None:
                model = case.build()
            started = time.perf_counter()
            # Before measuring: a prediction must not need what a run leaves behind.
            row["predicted"] = memscale.estimate(
                model,
                batch,
                optimizer=case.optimizer_argument,
                loss_fn=case.loss_fn,
                device=device,
            ).peak_bytes
            row["predict_seconds"] = time.perf_counter() - started
            started = time.perf_counter()
            row["measured"] = measure_peak(
                model, batch, case.loss_fn, case.optimizer_factory, device
            )
            row["measure_seconds"] = time.perf_counter() - started
            row["error_percent"] = 100.0 * (row["predicted"] / row["measured"] - 1.0)
        except Exception as error:
            # One failing case must not hide the others; it misses a goal.
            row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0]
        yield row


def _print(row: dict[str, Any]) -> None:
    start = (
        f"{row['case']:<28} {row['optimizer']:<13} {row['device']:<6} {row['way']:<6}"
    )
    if "failed" in row:
        print(f"{start} failed: {row['failed']}", flush=True)
        return
    print(
        f"{start} {row['predicted']:>13,} {row['measured']:>13,} "
        f"{row['error_percent']:>+8.2f}%",
        flush=True,
    )


def _accuracy(rows: list[dict[str, Any]]) -> list[Goal]:
    errors = [row["error_percent"] for row in rows if "error_percent" in row]
    failed = len(rows) - len(errors)
    goals = [Goal("cases that failed", failed, 0)]
    if not errors:
        return goals
    sizes = [abs(error) for error in errors]
    return [
        *goals,
        Goal("median |error|", statistics.median(sizes), 1.0, "<=", "%"),
        Goal("worst |error|", max(sizes), 3.0, "<=", "%"),
        Goal("most negative error", min(errors), -1.0, ">=", "%"),
    ]


def _replayed(rows: list[dict[str, Any]]) -> list[Goal]:
    """Of steps that recompute: the tapes that predict are those that train.

    What is left is kernels' workspaces, some of which are upper bounds.
    """
    errors = [abs(row["error_percent"]) for row in rows if "error_percent" in row]
    beyond = sum(error > 0.1 for error in errors)
    share = 100.0 * beyond / max(len(errors), 1)
    return [
        Goal("recomputing, cases that failed", len(rows) - len(errors), 0),
        Goal("recomputing, rows beyond 0.1 %", share, 1.0, "<=", "%"),
        Goal("recomputing, worst |error|", max(errors, default=0.0), 3.0, "<=", "%"),
    ]


def _costs(quick: bool) -> tuple[list[dict[str, Any]], list[Goal]]:
    rows: list[dict[str, Any]] = []
    for device in DEVICES:
        try:
            xl = cost.measure_xl(device, runs=1 if quick else 3)
            depth = cost.measure_depth(device)
        except RuntimeError as error:
            # The table above took minutes and should still reach its file.
            print(error, flush=True)
            continue
        print(
            f"GPT-2 XL 1x512 AdamW, {device}: {xl['seconds']:.2f} s "
            f"(again {xl['second_call_seconds']:.2f} s, building "
            f"{xl['build_seconds']:.2f} s), {xl['extra_bytes'] / _MIB:.0f} MiB extra, "
            f"predicts {xl['predicted']:,.0f} bytes\n"
            f"GPT-2 medium's width, {device}: 24 layers {depth['seconds_24']:.3f} s, "
            f"96 layers {depth['seconds_96']:.3f} s, {depth['ratio']:.2f}x",
            flush=True,
        )
        rows += [
            {"cost": "xl", "device": device, **xl},
            {"cost": "depth", "device": device, **depth},
        ]

    def worst(what: str, key: str) -> float:
        figures = [row[key] for row in rows if row["cost"] == what]
        return max(figures) if len(figures) == len(DEVICES) else float("nan")

    return rows, [
        Goal("GPT-2 XL time", worst("xl", "seconds"), 3.0, "<=", "s"),
        Goal("GPT-2 XL memory", worst("xl", "extra_bytes") / _MIB, 300, "<=", "MiB"),
        Goal("96 to 24 layers", worst("depth", "ratio"), 2.0, "<", "x"),
    ]


def _overhead() -> list[Goal]:
    """The recorder's cost, from ``memscale.benchmarks.recorder_cost``.

    Its ``measure() -> tuple[float, float]`` gives microseconds for each operator
    and for each saved tensor. Without it the goals stand as not measured.
    """
    name = "memscale.benchmarks.recorder_cost"
    per_op = per_save = float("nan")
    if importlib.util.find_spec(name) is not None:
        per_op, per_save = importlib.import_module(name).measure()
    return [
        Goal("recorder overhead per op", per_op, 3.0, "<=", "us"),
        Goal("recorder overhead per save", per_save, 3.0, "<=", "us"),
    ]


def run(quick: bool = False) -> Report:
    memscale.simdev.enable(memory="8GiB")
    report = Report("predict")
    started = time.perf_counter()
    print(_HEADER)
    cases = [case for case in CASES if case.quick or not quick]
    for case in cases:
        for row in _rows_of(case):
            _print(row)
            report.rows.append(row)
    report.goals += _accuracy(report.rows)
    replayed = []
    for case in cases[:: 3 if quick else 1]:
        for row in predict_replayed.rows_of(case):
            _print(row)
            replayed.append(row)
    report.rows += replayed
    report.goals += _replayed(replayed)
    seconds = time.perf_counter() - started
    print(f"\n{len(report.rows)} rows in {seconds:.0f} s\n")
    rows, goals = _costs(quick)
    report.rows += rows
    report.goals += goals
    report.goals += _overhead()
    return report
