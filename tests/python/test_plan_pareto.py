"""``pareto``: every plan of it can be attached, is exact, and is as predicted."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import memscale
from memscale import Config, PlanError
from plan_cases import assert_same, case, run_on
from test_plan_budget import _batch, _model


@pytest.mark.parametrize("name", ["cnn", "lstm-tied", "twice", "gpt2"])
def test_each_plan_is_what_it_says(name: str, sim: torch.device) -> None:
    one = case(name)
    plans = memscale.pareto(
        one.model, one.batch, "sgd", None, one.loss_fn, device="sim", max_plans=4
    )
    assert 2 <= len(plans) <= 4
    for small, large in pairwise(plans):
        assert small.peak_bytes < large.peak_bytes
        assert small.nanoseconds > large.nanoseconds
    assert plans[-1].nanoseconds == 0
    plain = run_on(sim, one)
    for plan in plans:
        ours = run_on(
            sim, one, lambda model, p=plan: memscale.wrap(model, Config(plan=p))
        )
        assert_same(plain, ours)
        assert -0.01 <= plan.peak_bytes / ours.peak - 1 <= 0.03


@pytest.mark.parametrize("most", [2, 3, 6])
def test_no_more_plans_than_asked_for(most: int) -> None:
    plans = memscale.pareto(_model(), _batch(), max_plans=most)
    assert 2 <= len(plans) <= most
    all_of_them = memscale.pareto(_model(), _batch(), max_plans=24)
    assert plans[0].peak_bytes == all_of_them[0].peak_bytes
    assert plans[-1].nanoseconds == 0


@pytest.mark.parametrize("most", [0, 1, -3, True, 2.0, "3", None])
def test_numbers_of_plans_that_are_none(most: object) -> None:
    with pytest.raises(PlanError, match="max_plans must be an int >= 2"):
        memscale.pareto(_model(), _batch(), max_plans=most)


def test_budget_time_and_size_do_not_matter() -> None:
    plans = memscale.pareto(_model(), _batch())
    for config in (
        Config(mode="conservative"),
        Config(budget="1KiB"),
        Config(force_optimize=True),
        Config(mode="aggressive", use_8bit_optimizer=False),
    ):
        others = memscale.pareto(_model(), _batch(), config=config)
        assert [p.peak_bytes for p in plans] == [p.peak_bytes for p in others]


def test_what_a_mode_allows_does() -> None:
    """The same rules as for one plan: aggressive may hold the state in 8 bits."""
    plans = memscale.pareto(_model(), _batch(), config=Config(mode="aggressive"))
    assert {plan.optimizer_bits for plan in plans} == {8}
    assert plans[0].peak_bytes < memscale.pareto(_model(), _batch())[0].peak_bytes
    kept = memscale.pareto(
        _model(), _batch(), config=Config(enable_checkpointing=False)
    )
    assert len(kept) == 1
