"""Plans for people: tables, notebooks, reasons and differences."""

from __future__ import annotations

import torch
from torch import nn

import memscale
from compat_twins import untouched_process  # noqa: F401
from memscale import Config
from memscale._C import Plan
from memscale.planning import Frontier
from test_plan_budget import _batch, _model

_MARKED = "<b>&[/b]:smile:[red]"


class Marked(nn.Module):
    """With a name that HTML, and rich, would read as something else."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.parts = nn.ModuleDict({_MARKED: nn.Tanh()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.parts[_MARKED](self.first(x)).square().mean()
        return out


def _plans() -> Frontier:
    return memscale.pareto(_model(), _batch(), max_plans=5)


def test_a_table_of_layers_and_what_is_predicted() -> None:
    plan = _plans()[0]
    text = str(plan)
    lines = text.splitlines()
    assert lines[0].startswith("Blocks with float32[512, 256]")
    heads = [line.split() for line in lines if line.split()[:1] == ["layer"]]
    assert heads == [["layer", "technique", "activations", "held", "change"]]
    assert "blocks.0 … 3" in text
    assert text.count("each") == 2
    assert any(line.split()[:1] == ["total"] for line in lines)
    assert any(line.startswith("predicted on cpu with AdamW: peak") for line in lines)
    assert not any(line != line.rstrip() for line in lines)


def test_names_are_shown_as_they_are() -> None:
    plan = memscale.plan(
        Marked(), torch.randn(4096, 64), config=Config(force_optimize=True)
    )
    assert f"parts.{_MARKED}" in str(plan)
    shown = plan._repr_html_()
    assert "parts.&lt;b&gt;&amp;[/b]:smile:[red]" in shown
    assert "<b>" not in shown
    frontier = memscale.pareto(Marked(), torch.randn(4096, 64), max_plans=2)
    assert "<b>" not in frontier._repr_html_()


def test_names_from_a_file_are_shown_as_they_are() -> None:
    text = _plans()[0].to_json()
    for field in ('"Blocks"', '"AdamW"', '"cpu"', '"blocks.0"', '"recompute_layers"'):
        assert field in text, field
        text = text.replace(field, '"<script>[/]x' + field[1:])
    plan = Plan.from_json(text)
    assert "<script>[/]xBlocks" in str(plan)
    assert "<script>[/]xblocks.0" in str(plan)
    assert "<script>" not in plan._repr_html_()
    assert "&lt;script&gt;[/]xblocks.0" in plan._repr_html_()
    assert "<script>[/]xBlocks" in str(Frontier([plan]))


def test_a_frontier_is_a_table() -> None:
    plans = _plans()
    lines = str(plans).splitlines()
    assert lines[0].startswith("Blocks with float32[512, 256]")
    assert lines[0].endswith("for cpu")
    assert len([line for line in lines if " of 6" in line]) == len(plans)
    assert plans._repr_html_().count("<tr>") == len(plans) + 1
    assert str(Frontier()) == "no plans"


def test_explain_gives_reasons() -> None:
    plan = memscale.plan(_model(), _batch(), config=Config(force_optimize=True))
    text = plan.explain()
    assert text.startswith("Blocks with float32[512, 256]")
    assert ", mode balanced\n" in text
    assert "\nrule weigh_memory: the plain step needs " in text
    assert "\nrule recompute_layers: the smallest peak for at most 25 % more" in text
    assert "\nblocks.3: recompute" in text


def test_diff_of_two_budgets() -> None:
    model, batch = _model(), _batch()
    plans = memscale.pareto(model, batch)
    small, large = (
        memscale.plan(model, batch, config=Config(budget=plan.peak_bytes))
        for plan in (plans[0], plans[-1])
    )
    lines = small.diff(large).splitlines()
    heads = [line.split(":")[0] for line in lines]
    assert heads[:3] == ["budget", "predicted peak", "predicted slowdown"]
    assert any(
        line.startswith("blocks.0: recompute") and line.endswith("-> keep")
        for line in lines
    )
    assert small.diff(small) == ""
    assert large.diff(small) != small.diff(large)
