"""Mode balanced: the knee of time and peak, and what it does where memory is short.

The shapes are of GPT-2 small and TinyLlama on an RTX 3090, as in docs/plans.md.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import memscale
from memscale import Config, Plan

CARD = "RTX 3090"
GIB = 1 << 30


def _gpt2() -> tuple[nn.Module, dict[str, Any]]:
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config())
    ids = torch.zeros(8, 1024, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids}


def _tinyllama() -> tuple[nn.Module, dict[str, Any]]:
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    ids = torch.zeros(2, 2048, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids}


MODELS = {"gpt2": _gpt2, "tinyllama": _tinyllama}


@functools.cache
def _plan(name: str, **fields: Any) -> Plan:
    model, batch = MODELS[name]()
    return memscale.plan(model, batch, config=Config(**fields), device=CARD)


def _said(plan: Plan) -> str:
    return plan.verdicts[-1].text


def test_stops_where_time_buys_nothing() -> None:
    """TinyLlama: 17 points of time would buy 16 MiB of 10 GiB."""
    plan = _plan("tinyllama")
    smallest = _plan("tinyllama", mode="aggressive", use_8bit_optimizer=False)
    assert smallest.slowdown <= 0.25  # it would have been taken
    assert plan.slowdown < smallest.slowdown / 3
    assert plan.peak_bytes - smallest.peak_bytes < plan.peak_bytes // 500
    assert _said(plan) == (
        f"stops at {100 * plan.slowdown:.1f} % more time: a further percent would buy "
        "less than a percent of the peak"
    )


def test_goes_on_where_time_buys_memory() -> None:
    """GPT-2 small: 12 points of time beyond conservative buy a third of the peak."""
    plan, careful = _plan("gpt2"), _plan("gpt2", mode="conservative")
    assert plan.slowdown > 2 * careful.slowdown
    assert plan.peak_bytes < 0.75 * careful.peak_bytes


@pytest.mark.parametrize("name", MODELS)
def test_no_other_plan_is_a_better_buy(name: str) -> None:
    model, batch = MODELS[name]()
    plan = _plan(name)
    product = (plan.plain_nanoseconds + plan.nanoseconds) * plan.peak_bytes
    others = memscale.pareto(model, batch, device=CARD, max_plans=24)
    products = [
        (other.plain_nanoseconds + other.nanoseconds) * other.peak_bytes
        for other in others
        if other.slowdown <= 0.25
    ]
    assert product == min(products)


@pytest.mark.parametrize("name", ["tinyllama"])
def test_spends_the_whole_quarter_where_it_does_not_fit(name: str) -> None:
    """A share of the card that the knee just fits, and one that it just does not."""
    knee = _plan(name)
    fits = _plan(name, target_gpu_utilization=(knee.peak_bytes + 1) / (24 * GIB))
    assert fits.peak_bytes == knee.peak_bytes
    short = _plan(name, target_gpu_utilization=(knee.peak_bytes - 1) / (24 * GIB))
    smallest = _plan(name, mode="aggressive", use_8bit_optimizer=False)
    assert short.peak_bytes == smallest.peak_bytes
    assert short.slowdown == smallest.slowdown
    assert _said(short).startswith("the step does not fit at ")
    assert "so more is spent: the smallest peak for at most 25 % more time" in (
        _said(short)
    )


def test_a_budget_stays_a_budget() -> None:
    """The fastest plan under it, on either side of the knee."""
    knee = _plan("tinyllama")
    for budget in (knee.peak_bytes - (8 << 20), knee.peak_bytes + GIB):
        plan = _plan("tinyllama", budget=budget)
        assert plan.peak_bytes <= budget
        assert _said(plan) == "the fastest plan under the budget"
        assert (plan.nanoseconds > knee.nanoseconds) == (budget < knee.peak_bytes)
