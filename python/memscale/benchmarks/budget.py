"""Plans under a byte budget: are they kept, are they as predicted, are they fast?

Eight budgets for each model, from the smallest that a plan can meet to the peak of
plain training, on the simulated device. Beside each row is the fastest uniform
checkpointing (``torch.utils.checkpoint`` on every k-th block, or on all but every
k-th) whose measured peak is within the same budget. Time is the process's CPU time
of a whole step on one thread, and always a ratio to another variant's in the same
round; planning is not in it. Models have fewer layers and words than those they are
named after, and transformers are narrower, so that activations are most of the peak.
"""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import torch

from memscale import simdev
from memscale.benchmarks.budget_case import Effort, measure_case
from memscale.benchmarks.goals import Goal, Report
from memscale.benchmarks.recompute_case import Case

__all__ = ["CASES", "QUICK_CASES", "budget_goals", "run"]

_FULL = Effort(budgets=8, rounds=15, choosing_rounds=3)
_QUICK = Effort(budgets=4, rounds=5, choosing_rounds=2)
_MEMORY = "8GiB"
_MIB = 1 << 20

_GPT2 = {
    "n_embd": 384,
    "n_head": 6,
    "vocab_size": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    # Checkpointing, which would fill a cache twice, cannot run with one.
    "use_cache": False,
}
_BERT = {
    "hidden_size": 384,
    "num_attention_heads": 6,
    "intermediate_size": 1536,
    "vocab_size": 1024,
}
_T5 = {
    "d_model": 256,
    "d_kv": 32,
    "d_ff": 1024,
    "vocab_size": 1024,
    "use_cache": False,
}
CASES = [
    Case("GPT-2, 6 layers 384 wide", "gpt2", 2, 256, {**_GPT2, "n_layer": 6}),
    Case(
        "BERT, 4 layers 384 wide",
        "bert-base",
        6,
        128,
        {**_BERT, "num_hidden_layers": 4},
    ),
    Case("ResNet-18", "resnet18", 4, 224),
    Case("T5, 3 + 3 layers 256 wide", "t5-small", 6, 128, {**_T5, "num_layers": 3}),
]
# Fewer models, layers, budgets and rounds.
QUICK_CASES = [
    Case("GPT-2, 3 layers 384 wide", "gpt2", 2, 128, {**_GPT2, "n_layer": 3}),
    Case("ResNet-18", "resnet18", 2, 128),
]

_HEADER = (
    f"  {'MiB':>7} {'predicted':>9} {'measured':>8} {'equal':>5} {'unlike':>6} "
    f"{'predicted':>9} {'/ eager':>7} {'quartiles':<11} {'uniform':<14} {'its MiB':>7} "
    f"{'/ eager':>7} {'ours / uniform':>14} {'quartiles':<11}"
)


# ---- the table ----


def _ratio(figures: dict[str, float], width: int = 7) -> str:
    quartiles = f"{figures['q1']:.3f}-{figures['q3']:.3f}"
    return f"{figures['median']:>{width}.3f} {quartiles:<11}"


def _line(row: dict[str, Any]) -> str:
    start = f"  {row['budget'] / _MIB:>7.1f}"
    if "failed" in row:
        return f"{start} failed: {row['failed']}"
    text = (
        f"{start} {row['predicted_peak'] / _MIB:>9.1f} "
        f"{row['measured_peak'] / _MIB:>8.1f} "
        f"{'yes' if row['equal_to_eager'] else 'NO':>5} "
        f"{row['calls_unlike_keep_set']:>6} "
        f"{1 + row['predicted_slowdown']:>9.3f} {_ratio(row['time_over_eager'])} "
    )
    if row["uniform"] is None:
        return text + "none is so small"
    return text + (
        f"{row['uniform']:<14} {row['uniform_peak'] / _MIB:>7.1f} "
        f"{row['uniform_over_eager']['median']:>7.3f} "
        f"{_ratio(row['time_over_uniform'], 14)}"
    )


# ---- goals ----


def _rises(rows: list[dict[str, Any]]) -> int:
    """How often more memory is predicted to cost more time."""
    return sum(
        later["predicted_slowdown"] > earlier["predicted_slowdown"]
        for earlier, later in itertools.pairwise(rows)
        if earlier["case"] == later["case"]
    )


def _middle(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each case, all but the first and the last quarter of its budgets."""
    found = []
    for _, group in itertools.groupby(rows, lambda row: row["case"]):
        of_case = list(group)
        quarter = len(of_case) // 4
        found += of_case[quarter : len(of_case) - quarter]
    return found


def _times(rows: list[dict[str, Any]], peer: str) -> list[float]:
    key = f"time_over_{peer}"
    return [row[key]["median"] for row in rows if key in row]


def budget_goals(rows: list[dict[str, Any]]) -> list[Goal]:
    """What was not measured is NaN, which misses every goal."""
    done = [row for row in rows if "failed" not in row]
    # There nobody checkpoints: a plan should cost no more than an empty one may.
    loose = [row for row in done if row["budget"] >= row["eager_peak"]]
    middle = _times(_middle(rows), "uniform")

    def worst(figures: list[float]) -> float:
        return max(figures, default=math.nan)

    return [
        Goal("rows that failed", len(rows) - len(done), 0),
        Goal(
            "measured peak / budget, worst",
            worst([row["measured_peak"] / row["budget"] for row in done]),
            1,
        ),
        Goal(
            "|predicted - measured peak|, worst",
            worst(
                [
                    100 * abs(row["predicted_peak"] / row["measured_peak"] - 1)
                    for row in done
                ]
            ),
            3,
            "<=",
            "%",
        ),
        Goal("rows not bit-equal", sum(not row["equal_to_eager"] for row in done), 0),
        Goal(
            "calls unlike their keep set",
            sum(row["calls_unlike_keep_set"] for row in done),
            0,
        ),
        Goal("rises of the predicted slowdown", _rises(done), 0),
        Goal(
            "time / best uniform checkpointing, worst median",
            worst(_times(done, "uniform")),
            1,
        ),
        Goal(
            "time / best uniform checkpointing, median of the middle rows",
            statistics.median(middle) if middle else math.nan,
            0.97,
        ),
        Goal(
            "budget of eager's peak, time / eager, worst",
            worst(_times(loose, "eager")),
            1.02,
        ),
    ]


def run(quick: bool = False) -> Report:
    report = Report("budget")
    torch.set_num_threads(1)
    device = simdev.enable(memory=_MEMORY)
    effort = _QUICK if quick else _FULL
    for case in QUICK_CASES if quick else CASES:
        print(f"{case.label}, SGD, {effort.rounds} rounds\n{_HEADER}", flush=True)
        for row in measure_case(case, device, effort):
            print(_line(row), flush=True)
            report.rows.append(row)
        print()
    report.goals = budget_goals(report.rows)
    return report
