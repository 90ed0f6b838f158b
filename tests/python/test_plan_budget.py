"""``Config(budget=...)``: what is refused, what is kept, and that it is measured so."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from compat_twins import untouched_process  # noqa: F401
from memscale import Config, PlanError
from memscale.config import ConfigError
from never_wrapped import assert_as_never_wrapped
from plan_cases import assert_same, case, run_on


class Blocks(nn.Module):
    def __init__(self, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = x.square().mean()
        return out


def _model(device: Any = "cpu") -> nn.Module:
    torch.manual_seed(0)
    return Blocks().to(device)


def _batch(device: Any = "cpu") -> torch.Tensor:
    return torch.randn(512, 256, generator=torch.Generator().manual_seed(1)).to(device)


def _smallest(error: PlanError) -> int:
    found = re.match(
        r"budget must be at least (\d+) bytes \([\d.]+ MiB, at a predicted slowdown of "
        r"\d+%\) for \w+ with .+, got 1024 \(1\.00 KiB\)$",
        str(error),
    )
    assert found, error
    return int(found[1])


@pytest.mark.parametrize(
    ("budget", "text"),
    [(-1, "got -1"), (0, "got 0"), ("0", "> 0"), ("-1GiB", "size"), ("banana", "size")],
)
def test_no_budgets(budget: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Config(budget=budget)


def test_more_than_there_is_means_nothing_to_do() -> None:
    model = _model()
    memscale.wrap(model, Config(budget="1000TiB"), _batch())
    plan = model._memscale_executor.plan
    assert plan.slowdown == 0
    assert plan.peak_bytes == plan.plain_peak_bytes
    assert not any(layer.recomputes for layer in plan.layers)
    model(_batch()).backward()
    assert model._memscale_executor.stats().saves_dropped == 0
    memscale.detach(model)


def test_too_small_a_budget_at_wrap_attaches_nothing() -> None:
    model, twin = _model(), _model()
    with pytest.raises(PlanError) as error:
        memscale.wrap(model, Config(budget="1KiB"), _batch())
    smallest = _smallest(error.value)
    assert_as_never_wrapped(model, twin)
    memscale.wrap(model, Config(budget=smallest), _batch())
    assert model._memscale_executor.plan.peak_bytes <= smallest
    memscale.detach(model)
    with pytest.raises(PlanError, match=f"at least {smallest} bytes"):
        memscale.wrap(model, Config(budget=smallest - 1), _batch())
    assert_as_never_wrapped(model, twin)


def test_too_small_a_budget_at_the_first_batch_leaves_nothing_attached() -> None:
    model, twin = _model(), _model()
    memscale.wrap(model, Config(budget="1KiB"))
    with pytest.raises(PlanError) as error:
        model(_batch())
    assert_as_never_wrapped(model, twin)
    loss, expected = model(_batch()), twin(_batch())  # it runs, plain
    assert torch.equal(loss, expected)
    memscale.wrap(model, Config(budget=_smallest(error.value)))
    assert torch.equal(model(_batch()), expected)
    memscale.detach(model)


def test_what_may_not_be_recomputed_counts_against_the_budget() -> None:
    model = _model()
    plain = memscale.plan(model, _batch(), config=Config(enable_checkpointing=False))
    config = Config(budget=plain.peak_bytes - 1, enable_checkpointing=False)
    with pytest.raises(PlanError, match=f"at least {plain.peak_bytes} bytes"):
        memscale.plan(model, _batch(), config=config)


@pytest.mark.parametrize("name", ["cnn", "gpt2", "lstm-tied"])
def test_the_smallest_budget_works_and_is_measured(
    name: str, sim: torch.device
) -> None:
    one = case(name)
    with pytest.raises(PlanError) as error:
        memscale.plan(
            one.model, one.batch, "sgd", Config(budget=1024), one.loss_fn, device="sim"
        )
    smallest = _smallest(error.value)
    plan = memscale.plan(
        one.model, one.batch, "sgd", Config(budget=smallest), one.loss_fn, device="sim"
    )
    plain = run_on(sim, one)
    ours = run_on(sim, one, lambda model: memscale.wrap(model, Config(plan=plan)))
    assert_same(plain, ours)
    assert ours.peak <= smallest
    assert ours.peak < plain.peak


def test_larger_budgets_are_never_slower() -> None:
    model, batch = copy.deepcopy(_model()), _batch()
    plans = memscale.pareto(model, batch)
    low, high = plans[0].peak_bytes, plans[-1].peak_bytes
    last = float("inf")
    for i in range(12):
        budget = low + (high - low) * i // 11
        plan = memscale.plan(model, batch, config=Config(budget=budget))
        assert plan.peak_bytes <= budget
        assert plan.nanoseconds <= last
        last = plan.nanoseconds
    assert last == 0
