"""The budget benchmark: its goals, its cases, and that it measures what it says."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale.benchmarks import budget, budget_case
from memscale.benchmarks.budget_case import (
    Bench,
    Effort,
    budgets_between,
    measure_case,
    uniform_variants,
)
from memscale.benchmarks.models import BENCHMARK_MODELS, BenchmarkModel
from memscale.benchmarks.recompute_case import Case, checkpointed
from memscale.model.layers import find_layers

_BATCH, _WIDTH, _INNER, _BLOCKS = 512, 64, 256, 4
_FLOAT = 4


class _Toy(nn.Module):
    """Of its activations, tanh's are cheap to make again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Linear(_WIDTH, _INNER), nn.Tanh(), nn.Linear(_INNER, _WIDTH)
                )
                for _ in range(_BLOCKS)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.blocks(x)
        return y.square().mean()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the benchmark has it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Case:
    def sample(
        batch: int, seq: int, device: torch.device | str
    ) -> tuple[torch.Tensor, ...]:
        return (torch.ones(batch, seq, device=device),)

    entry = BenchmarkModel("toy", "four blocks", _Toy, sample, _BATCH, _WIDTH)
    monkeypatch.setitem(BENCHMARK_MODELS, "toy", entry)
    return Case("toy", "toy", _BATCH, _WIDTH)


# ---- what is compared ----


def test_uniform_choices_are_all_there_once() -> None:
    assert uniform_variants(["a", "b", "c", "d"]) == {
        "every": ["a", "b", "c", "d"],
        "1 of 2": ["a", "c"],
        "1 of 3": ["a", "d"],
        "all but 1 of 3": ["a", "b", "d"],
        "1 of 4": ["a"],
        "all but 1 of 4": ["a", "b", "c"],
    }
    assert uniform_variants(["a"]) == {"every": ["a"]}


def test_budgets_are_even_and_have_both_ends() -> None:
    assert budgets_between(10, 20, 3) == [10, 15, 20]
    found = budgets_between(1_000, 2_001, 8)
    assert (found[0], found[-1], len(found)) == (1_000, 2_001, 8)
    assert found == sorted(set(found))


@pytest.mark.parametrize(
    ("cases", "blocks"), [(budget.CASES, [6, 4, 8, 6]), (budget.QUICK_CASES, [3, 8])]
)
def test_cases_build_with_their_blocks(cases: list[Case], blocks: list[int]) -> None:
    with torch.device("meta"):
        models = [case.build() for case in cases]
    assert [len(find_layers(model).blocks) for model in models] == blocks


@pytest.mark.parametrize("case", budget.CASES, ids=lambda case: case.model)
def test_cases_have_room_between_the_smallest_budget_and_eager(case: Case) -> None:
    with torch.device("meta"):
        model = case.build()
    plans = memscale.pareto(model, case.sample(), "sgd", device="RTX 3090")
    assert plans[0].peak_bytes < 0.9 * plans[-1].peak_bytes
    assert plans[-1].peak_bytes == plans[-1].plain_peak_bytes


def test_only_the_named_blocks_are_checkpointed() -> None:
    model = _Toy()
    with checkpointed(model, ["blocks.0", "blocks.2"]):
        changed = ["forward" in vars(block) for block in model.blocks]
        assert changed == [True, False, True, False]
    assert not any("forward" in vars(block) for block in model.blocks)


# ---- measuring ----


def test_peaks_are_counted_to_the_byte(toy: Case, sim: torch.device) -> None:
    bench = Bench(toy, sim)
    bench.step()
    parameters = sum(p.numel() * _FLOAT for p in bench.model.parameters())
    narrow, wide = _BATCH * _WIDTH * _FLOAT, _BATCH * _INNER * _FLOAT
    plain = bench.peak()
    # The batch, what blocks hold, and the gradients that backward begins with.
    held = parameters + narrow + _BLOCKS * (narrow + wide)
    assert held < plain < held + 2 * (narrow + wide)
    other = torch.empty(1 << 20, device=sim)  # not the step's, and there before
    assert bench.peak() == plain + other.nbytes
    del other


def test_others_on_the_device_do_not_count(toy: Case, sim: torch.device) -> None:
    alone = Bench(toy, sim)
    alone.step()
    expected = alone.peak()
    del alone
    other = torch.empty(1 << 20, device=sim)
    bench = Bench(toy, sim)
    bench.step()
    assert bench.peak() == expected
    del other


def test_the_same_training_again(toy: Case, sim: torch.device) -> None:
    bench = Bench(toy, sim)
    first = bench.result()
    assert [name for name in first if name.startswith("loss")] == [
        "loss 0",
        "loss 1",
        "loss 2",
    ]
    assert not torch.equal(first["loss 0"], first["loss 2"])
    again = bench.result()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_rows_are_under_their_budgets(toy: Case, sim: torch.device) -> None:
    rows = list(measure_case(toy, sim, Effort(3, 2, 1)))
    assert not any("failed" in row for row in rows)
    assert [row["budget"] for row in rows] == budgets_between(
        rows[0]["budget"], rows[0]["eager_peak"], 3
    )
    for row in rows:
        assert row["measured_peak"] <= row["budget"]
        assert row["equal_to_eager"]
        assert row["calls_unlike_keep_set"] == 0
        assert (row["uniform"] is None) == ("time_over_uniform" not in row)
        if row["uniform"] is not None:
            assert row["uniform_peak"] <= row["budget"]
    assert rows[0]["recomputing_layers"] > 0
    assert rows[0]["predicted_slowdown"] > rows[-1]["predicted_slowdown"]


def test_another_training_is_seen(
    toy: Case, sim: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = Bench._state

    def off_by_a_bit(bench: Bench) -> dict[str, torch.Tensor]:
        found = state(bench)
        if getattr(bench.model, "_memscale_executor", None) is not None:
            weight = found["blocks.3.2.bias"]
            weight[0] = torch.nextafter(weight[0], torch.tensor(math.inf))
        return found

    monkeypatch.setattr(budget_case.Bench, "_state", off_by_a_bit)
    rows = list(measure_case(toy, sim, Effort(2, 1, 1)))
    assert [row["equal_to_eager"] for row in rows] == [False, False]


def test_a_row_that_fails_says_why(
    toy: Case, sim: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Half of what works: no plan is so small.
    def halves(smallest: int, largest: int, count: int) -> list[int]:
        return [smallest // 2, largest]

    monkeypatch.setattr(budget_case, "budgets_between", halves)
    first, second = measure_case(toy, sim, Effort(2, 1, 1))
    assert first["failed"].startswith("PlanError: budget must be at least")
    assert "failed" not in second
    goals = {goal.name: goal for goal in budget.budget_goals([first, second])}
    assert not goals["rows that failed"].met
    assert "failed" in budget._line(first)


# ---- goals ----


def _around(median: float) -> dict[str, float]:
    return {"q1": median - 0.01, "median": median, "q3": median + 0.01}


def _row(index: int, ours: float, **changed: Any) -> dict[str, Any]:
    row = {
        "case": "toy",
        "eager_peak": 800,
        "budget": 100 * (index + 1),
        "predicted_peak": 100 * (index + 1),
        "measured_peak": 100 * (index + 1),
        "predicted_slowdown": 0.1 * (7 - index),
        "equal_to_eager": True,
        "calls_unlike_keep_set": 0,
        "time_over_eager": _around(1.01),
        "uniform": "every",
        "uniform_peak": 100,
        "uniform_over_eager": _around(1.2),
        "time_over_uniform": _around(ours),
    }
    return {**row, **changed}


ROWS = [_row(i, 0.9) for i in range(8)]


def _missed(rows: list[dict[str, Any]]) -> list[str]:
    return [goal.name for goal in budget.budget_goals(rows) if not goal.met]


def test_good_rows_meet_every_goal() -> None:
    assert _missed(ROWS) == []


@pytest.mark.parametrize(
    ("index", "changed", "missed"),
    [
        (3, {"measured_peak": 401}, "measured peak / budget, worst"),
        (3, {"predicted_peak": 385}, "|predicted - measured peak|, worst"),
        (3, {"predicted_peak": 415}, "|predicted - measured peak|, worst"),
        (3, {"equal_to_eager": False}, "rows not bit-equal"),
        (3, {"calls_unlike_keep_set": 1}, "calls unlike their keep set"),
        (3, {"predicted_slowdown": 0.9}, "rises of the predicted slowdown"),
        (
            0,
            {"time_over_uniform": _around(1.001)},
            "time / best uniform checkpointing, worst median",
        ),
        (
            7,
            {"time_over_uniform": _around(1.001)},
            "time / best uniform checkpointing, worst median",
        ),
        (
            7,
            {"time_over_eager": _around(1.03)},
            "budget of eager's peak, time / eager, worst",
        ),
    ],
)
def test_one_bad_row_misses_its_goal(
    index: int, changed: dict[str, Any], missed: str
) -> None:
    rows = copy.deepcopy(ROWS)
    rows[index].update(changed)
    assert _missed(rows) == [missed]


def test_the_middle_rows_are_to_be_clearly_faster() -> None:
    name = "time / best uniform checkpointing, median of the middle rows"
    rows = [_row(i, 0.1 * i) for i in range(8)]
    figures = {goal.name: goal.figure for goal in budget.budget_goals(rows)}
    assert figures[name] == pytest.approx(0.35)  # of 0.2, 0.3, 0.4, 0.5
    rows = [_row(i, 0.98 if 2 <= i <= 5 else 0.9) for i in range(8)]
    assert _missed(rows) == [name]


def test_slowdowns_of_two_models_are_not_compared() -> None:
    rows = [*ROWS, *(_row(i, 0.9, case="other") for i in range(8))]
    assert _missed(rows) == []


def test_where_nothing_uniform_fits_there_is_no_ratio() -> None:
    row = _row(0, 0.9, uniform=None)
    del row["time_over_uniform"]
    assert "none is so small" in budget._line(row)
    assert _missed([row, *ROWS[1:]]) == []


def test_what_was_not_measured_misses_its_goals() -> None:
    assert "measured peak / budget, worst" in _missed([])
