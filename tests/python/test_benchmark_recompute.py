"""The recompute benchmark: its goals, its cases, and that it counts rightly."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from memscale.benchmarks import recompute, recompute_case
from memscale.benchmarks.models import BENCHMARK_MODELS, BenchmarkModel
from memscale.benchmarks.recompute_case import (
    CASES,
    QUICK_CASES,
    VARIANTS,
    Case,
    checkpointed,
    measure_case,
    order_of,
    spread,
)
from memscale.benchmarks.recompute_cost import measure_cost
from memscale.model.layers import find_layers

pytestmark = pytest.mark.usefixtures("sim")

# The inner tensors are larger than what replay always keeps.
_BATCH, _WIDTH, _INNER, _BLOCKS = 32, 256, 1024, 3
_FLOAT = 4


class _Toy(nn.Module):
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
    """As the benchmark has it; more of them only wait for each other here."""
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

    entry = BenchmarkModel("toy", "three blocks", _Toy, sample, _BATCH, _WIDTH)
    monkeypatch.setitem(BENCHMARK_MODELS, "toy", entry)
    return Case("toy", "toy", _BATCH, _WIDTH)


def _row(variant: str, alive: int, peak: int, eager: float, ckpt: float) -> dict:
    def around(median: float) -> dict[str, float]:
        return {"q1": median - 0.5, "median": median, "q3": median + 0.5}

    return {
        "variant": variant,
        "activation_bytes": alive,
        "peak_bytes": peak,
        "time_over_eager": around(eager),
        "time_over_checkpoint": around(ckpt),
    }


_ROWS: list[dict[str, Any]] = [
    _row("eager", 1000, 2000, 1.0, 0.8),
    _row("keep", 1000, 2000, 1.01, 0.81),
    _row("cheap", 500, 1500, 1.07, 0.85),
    _row("checkpoint", 100, 1200, 1.25, 1.0),
    _row("block", 100, 1218, 1.2, 0.99),
]


def test_goals_of_a_case_are_ratios_of_its_rows() -> None:
    goals = recompute.case_goals(CASES[0], _ROWS)
    assert [(goal.figure, goal.bound, goal.met) for goal in goals] == [
        (1.01, 1.02, True),
        (0.5, 0.45, False),
        (1.07, 1.08, True),
        (1.015, 1.01, False),
        (0.99, 1.0, True),
    ]
    assert all(goal.name.startswith("GPT-2 small 2x256: ") for goal in goals)


def test_the_convolutional_case_may_hold_more() -> None:
    bounds = [recompute.case_goals(case, _ROWS)[1].bound for case in CASES]
    assert bounds == [0.45, 0.45, 0.45, 0.55]
    assert [case.bytes_share for case in QUICK_CASES] == bounds


def test_costs_that_were_not_measured_miss_their_goals() -> None:
    cost = {"per_op": spread([1.0, 3.0, 2.0]), "per_save": spread([math.nan])}
    goals = recompute.cost_goals(cost)
    assert [goal.met for goal in goals] == [True, False]
    assert goals[0].figure == 2.0


def test_spread_is_median_and_quartiles() -> None:
    assert spread([5.0, 1.0, 3.0, 2.0, 4.0]) == {"q1": 2.0, "median": 3.0, "q3": 4.0}
    assert spread([7.0]) == {"q1": 7.0, "median": 7.0, "q3": 7.0}


def test_no_variant_has_the_better_place() -> None:
    names = list(VARIANTS)
    orders = [order_of(names, turn) for turn in range(2 * len(names))]
    assert all(sorted(order) == sorted(names) for order in orders)
    for name in names:
        assert sum(order[0] == name for order in orders) == 2
        for other in set(names) - {name}:
            before = sum(order.index(name) < order.index(other) for order in orders)
            assert before == len(names)


@pytest.mark.parametrize(
    ("cases", "blocks"), [(CASES, [12, 6, 12, 8]), (QUICK_CASES, [2, 2, 2, 8])]
)
def test_cases_build_with_their_blocks(cases: list[Case], blocks: list[int]) -> None:
    with torch.device("meta"):
        models = [case.build() for case in cases]
    assert [len(find_layers(model).blocks) for model in models] == blocks
    for case, model in zip(cases, models, strict=True):
        assert model.training
        dropout = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
        assert case.model == "resnet18" or (dropout and set(dropout) == {0.1})


def test_quick_cases_are_the_cases() -> None:
    assert [case.model for case in QUICK_CASES] == [case.model for case in CASES]


def test_checkpointing_is_taken_off_again(toy: Case) -> None:
    model = toy.build()
    blocks = list(model.blocks)
    with checkpointed(model):
        assert all("forward" in vars(block) for block in blocks)
    assert not any("forward" in vars(block) for block in blocks)


def test_bytes_are_counted_to_the_byte(toy: Case) -> None:
    pair = {name: VARIANTS[name] for name in ("eager", "checkpoint")}
    eager, checkpoint = measure_case(toy, 2, pair)
    between = _BLOCKS * _BATCH * _WIDTH * _FLOAT
    inside = _BATCH * _INNER * _FLOAT
    loss = _FLOAT
    assert eager["activation_bytes"] == between + _BLOCKS * inside + loss
    # Checkpointing holds the state of the random numbers for each block.
    states = _BLOCKS * torch.get_rng_state().nbytes
    assert checkpoint["activation_bytes"] == between + states + loss
    parameters = sum(p.nbytes for p in toy.build().parameters())
    assert eager["peak_bytes"] > parameters
    assert eager["accumulating_peak_bytes"] < parameters
    assert eager["time_over_eager"]["median"] == 1.0
    assert checkpoint["equal_to_eager"] is True
    assert checkpoint["rounds"] == 2


def test_a_wrong_gradient_stops_the_benchmark(toy: Case) -> None:
    @contextlib.contextmanager
    def wrong(model: nn.Module) -> Iterator[None]:
        weight = model.get_parameter("blocks.1.0.weight")
        hook = weight.register_hook(lambda gradient: gradient * 1.001)
        try:
            yield
        finally:
            hook.remove()

    unlike = r"toy 32x256, cheap: unlike eager: gradient of blocks\.1\.0\.weight"
    with pytest.raises(RuntimeError, match=unlike):
        measure_case(toy, 1, {**VARIANTS, "cheap": wrong})


def test_a_missing_gradient_stops_the_benchmark(toy: Case) -> None:
    @contextlib.contextmanager
    def frozen(model: nn.Module) -> Iterator[None]:
        bias = model.get_parameter("blocks.2.2.bias").requires_grad_(False)
        try:
            yield
        finally:
            bias.requires_grad_(True)

    with pytest.raises(RuntimeError, match=r"unlike eager: gradient of blocks\.2\.2"):
        measure_case(toy, 1, {"keep": frozen})


def test_all_variants_of_a_case(toy: Case) -> None:
    rows = {row["variant"]: row for row in measure_case(toy, 1)}
    assert list(rows) == list(VARIANTS)
    assert all(row["equal_to_eager"] for row in rows.values())
    alive = {name: row["activation_bytes"] for name, row in rows.items()}
    assert alive["keep"] == alive["eager"]
    assert alive["block"] < alive["eager"]
    assert "ops_recorded" not in rows["eager"]
    assert rows["keep"]["saves_dropped"] == rows["keep"]["ops_replayed"] == 0
    # One tanh in each block is what block cannot do without.
    assert rows["block"]["saves_dropped"] >= _BLOCKS
    assert rows["block"]["ops_replayed"] >= _BLOCKS
    assert len(recompute.case_goals(toy, list(rows.values()))) == 5


def test_costs_are_per_op_and_per_save() -> None:
    cost = measure_cost(rounds=2)
    # Additions and the sum; per linear layer a transpose, a product and a tanh.
    assert cost["ops_without_saves"] >= 200
    assert cost["ops"] >= 600
    assert cost["saves"] >= 400
    assert cost["per_op"].keys() == {"q1", "median", "q3"}
    assert not math.isnan(cost["per_save"]["median"])


def test_tables_print(toy: Case, capsys: pytest.CaptureFixture[str]) -> None:
    rows = measure_case(toy, 1)
    rows[-1]["kept_because"] = {"aten::odd cannot be replayed": 3}
    recompute._print_case(rows)
    printed = capsys.readouterr().out
    assert printed.startswith("toy 32x256, 1 rounds\n")
    assert "block kept 3: aten::odd cannot be replayed" in printed
    assert [line.split()[0] for line in printed.splitlines()[2:7]] == list(VARIANTS)


def test_frozen_objects_are_thawed(toy: Case) -> None:
    before = recompute_case.gc.get_freeze_count()
    measure_case(toy, 1, {name: VARIANTS[name] for name in ("eager", "checkpoint")})
    assert recompute_case.gc.get_freeze_count() <= before
