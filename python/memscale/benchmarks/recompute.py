"""Replay against plain training and against checkpointing: bytes and time.

Time is the process's CPU time on one thread, and always a ratio to another variant's
in the same round: what the machine does to one it mostly does to both. Bytes are
what a step adds to the model and its batch, in tensors, to the byte. ``peak`` is of
a step that makes its gradients; ``again`` of one that adds to those it finds.
"""

from __future__ import annotations

from typing import Any

import torch

from memscale.benchmarks.goals import Goal, Report
from memscale.benchmarks.recompute_case import CASES, QUICK_CASES, Case, measure_case
from memscale.benchmarks.recompute_cost import measure_cost

__all__ = ["case_goals", "cost_goals", "run"]

_ROUNDS, _QUICK_ROUNDS = 15, 7
_MIB = 1 << 20
_HEADER = (
    f"  {'MiB':<10} {'after forward':>13} {'/ eager':>7} {'peak':>7} {'again':>7} "
    f"{'seconds':>8} {'/ eager':>7} {'quartiles':<11} {'/ ckpt':>7} {'quartiles':<11}"
    f" {'dropped':>7} {'kept':>5} {'ops':>5} {'rerun':>5}"
)


def _ratio(figures: dict[str, float]) -> str:
    quartiles = f"{figures['q1']:.3f}-{figures['q3']:.3f}"
    return f"{figures['median']:>7.3f} {quartiles:<11}"


def _line(row: dict[str, Any], eager: dict[str, Any]) -> str:
    text = (
        f"  {row['variant']:<10} {row['activation_bytes'] / _MIB:>13.1f} "
        f"{row['activation_bytes'] / eager['activation_bytes']:>7.3f} "
        f"{row['peak_bytes'] / _MIB:>7.1f} "
        f"{row['accumulating_peak_bytes'] / _MIB:>7.1f} "
        f"{row['seconds']['median']:>8.3f} "
        f"{_ratio(row['time_over_eager'])} {_ratio(row['time_over_checkpoint'])}"
    )
    if "ops_recorded" in row:
        text += (
            f" {row['saves_dropped']:>7} {row['saves_kept']:>5} "
            f"{row['ops_recorded']:>5} {row['ops_replayed']:>5}"
        )
    return text


def _print_case(rows: list[dict[str, Any]]) -> None:
    print(f"{rows[0]['case']}, {rows[0]['rounds']} rounds\n{_HEADER}")
    for row in rows:
        print(_line(row, rows[0]))
    for row in rows:
        for reason, count in row.get("kept_because", {}).items():
            print(f"  {row['variant']} kept {count}: {reason}")
    print(flush=True)


def case_goals(case: Case, rows: list[dict[str, Any]]) -> list[Goal]:
    row = {each["variant"]: each for each in rows}
    label = case.label

    def share(variant: str, peer: str, key: str) -> float:
        return float(row[variant][key] / row[peer][key])

    def time(variant: str, peer: str) -> float:
        return float(row[variant][f"time_over_{peer}"]["median"])

    return [
        Goal(f"{label}: empty plan, time / eager", time("keep", "eager"), 1.02),
        Goal(
            f"{label}: cheap, bytes after forward / eager",
            share("cheap", "eager", "activation_bytes"),
            case.bytes_share,
        ),
        Goal(f"{label}: cheap, time / eager", time("cheap", "eager"), 1.08),
        Goal(
            f"{label}: block, peak / checkpoint",
            share("block", "checkpoint", "peak_bytes"),
            1.01,
        ),
        Goal(f"{label}: block, time / checkpoint", time("block", "checkpoint"), 1.00),
    ]


def cost_goals(cost: dict[str, Any]) -> list[Goal]:
    return [
        Goal("per op", cost["per_op"]["median"], 2.0, "<=", "us"),
        Goal("per save", cost["per_save"]["median"], 2.0, "<=", "us"),
    ]


def _print_cost(cost: dict[str, Any]) -> None:
    print(f"nothing dropped, {cost['ops']} ops and {cost['saves']} saves a step")
    for key in ("per_op", "per_save"):
        figures = cost[key]
        print(
            f"  {key.replace('_', ' '):<8} {figures['median']:.2f} us, "
            f"quartiles {figures['q1']:.2f}-{figures['q3']:.2f}",
            flush=True,
        )


def run(quick: bool = False) -> Report:
    report = Report("recompute")
    torch.set_num_threads(1)
    cost = measure_cost()
    _print_cost(cost)
    print()
    goals = cost_goals(cost)
    for case in QUICK_CASES if quick else CASES:
        rows = measure_case(case, _QUICK_ROUNDS if quick else _ROUNDS)
        _print_case(rows)
        goals += case_goals(case, rows)
        report.rows += rows
    report.rows.append(cost)
    report.goals = goals
    return report
