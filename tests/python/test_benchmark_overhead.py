"""The overhead benchmark: its goals, its rows, and that it measures what it says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from memscale.benchmarks import overhead
from memscale.benchmarks.recompute_case import spread


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_goals_are_medians_with_the_issues_bounds() -> None:
    rows = [
        {"variant": "eager", "time_over_eager": spread([1.0])},
        {"variant": "empty plan", "time_over_eager": spread([1.0, 1.02, 1.5])},
        {"variant": "cheap", "time_over_eager": spread([1.2, 1.2, 3.0])},
    ]
    hooks = [
        {"hook": "idle", "microseconds": spread([4.0])},
        {"hook": "recording", "microseconds": spread([6.0])},
    ]
    goals = overhead.goals_of(rows, hooks)
    assert [(goal.figure, goal.bound, goal.met) for goal in goals] == [
        (1.02, 1.01, False),
        (1.2, 1.25, True),
        (4.0, 5.0, True),
        (6.0, 5.0, False),
    ]


def test_rows_of_all_variants() -> None:
    rows = overhead.measure_steps(rounds=2)
    assert [row["variant"] for row in rows] == list(overhead.VARIANTS)
    assert rows[0]["time_over_eager"] == {"q1": 1.0, "median": 1.0, "q3": 1.0}
    assert all(row["forward_seconds"]["median"] > 0 for row in rows)


def test_a_plan_that_is_not_empty_is_no_measure_of_an_empty_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def recorded(model: torch.nn.Module) -> None:
        overhead._wrap(model)
        replay = model._memscale_executor._replay  # type: ignore[union-attr]
        replay._min_bytes = 0
        model._memscale_executor._recompute.attach = (  # type: ignore[union-attr, method-assign]
            lambda plan, otherwise: replay.set_policies(["block"] * 27)
        )

    monkeypatch.setitem(overhead.VARIANTS, "empty plan", recorded)
    with pytest.raises(RuntimeError, match="not empty"):
        overhead.measure_steps(rounds=1)


@pytest.mark.parametrize("recording", [False, True])
def test_hooks_are_of_a_hundred_layers(recording: bool) -> None:
    row = overhead.measure_hook(recording, rounds=2)
    assert row["hook"] == ("recording" if recording else "idle")
    assert row["layers"] == 100
    assert row["microseconds"]["q1"] <= row["microseconds"]["q3"]
