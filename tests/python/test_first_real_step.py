"""Models that cannot be traced are planned with their first real step."""

from __future__ import annotations

import ctypes
import logging
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from compat_twins import (
    ROWS,
    Block,
    Net,
    assert_same,
    batch,
    config_of,
    executor_of,
    run,
)
from memscale import Config, PlanError
from never_wrapped import assert_as_never_wrapped
from untraceable import (
    STEPS,
    Branching,
    Routed,
    WithFunc,
    WithFunction,
    drive,
    make,
    train,
)


@pytest.mark.parametrize("kind", [Branching, Routed, WithFunction, WithFunc])
def test_trains_as_plain_and_follows_a_plan(kind: type[nn.Module]) -> None:
    plain, ours = make(kind), make(kind)
    expected = run(drive, plain)
    memscale.wrap(ours, config_of())
    assert_same(expected, run(drive, ours))
    executor = executor_of(ours)
    assert executor.plan is not None
    assert any(layer.recomputes for layer in executor.plan.layers)
    assert executor.stats().calls_unlike_keep_set == 0
    memscale.detach(ours)
    assert_as_never_wrapped(ours, plain)


def test_runs_nothing_twice() -> None:
    model = make(Branching)
    memscale.wrap(model, config_of())
    train(model)
    assert model.num_calls == STEPS


@pytest.mark.parametrize("mode", ["balanced", "aggressive"])
def test_plans_as_from_a_trace(mode: str) -> None:
    """A model that can be traced, planned both ways."""
    traced, recorded = make(Net, depth=4), make(Net, depth=4)
    memscale.wrap(traced, config_of(mode=mode))
    memscale.wrap(recorded, config_of(mode=mode, use_static_profiling=False))
    for model in (traced, recorded):
        train(model)
    expected, plan = executor_of(traced).plan, executor_of(recorded).plan
    assert plan is not None
    assert expected is not None
    # A loop's loss is one op more than the stand-in's.
    assert plan.plain_peak_bytes == pytest.approx(expected.plain_peak_bytes, rel=0.01)
    assert plan.peak_bytes == pytest.approx(expected.peak_bytes, rel=0.01)
    for layer, other in zip(plan.layers, expected.layers, strict=True):
        assert layer.layer == other.layer
        assert layer.plain_bytes == other.plain_bytes
        assert layer.held_bytes == other.held_bytes
        assert layer.keep_set == other.keep_set or layer.policy == other.policy
    assert executor_of(recorded).stats().calls_unlike_keep_set == 0


@pytest.mark.parametrize("kind", [Branching, Routed])
def test_predicts_what_is_measured(kind: type[nn.Module], sim: torch.device) -> None:
    """On the simulated device, for batches that all go one way."""
    model = make(kind, depth=4).to(sim)
    memscale.wrap(model, config_of())
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)  # the same rows each step
    x = batch(0).to(sim)
    for _ in range(5):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    entries = executor_of(model).ledger
    assert len(entries) == 2
    for entry in entries:
        assert entry.measured_peak == pytest.approx(entry.predicted_peak, rel=0.01)


def test_a_budget_holds_from_the_first_step(sim: torch.device) -> None:
    plain = make(Branching, depth=6).to(sim)
    train(plain, 1)
    torch.accelerator.reset_peak_memory_stats()
    train(plain, 2)
    eager = torch.accelerator.max_memory_allocated()
    del plain
    model = make(Branching, depth=6).to(sim)
    budget = int(eager * 0.8)
    memscale.wrap(model, config_of(budget=budget))
    torch.accelerator.reset_peak_memory_stats()
    train(model)
    assert executor_of(model).plan is not None
    assert torch.accelerator.max_memory_allocated() <= budget


def test_a_budget_that_is_too_small_is_an_error_at_the_second_step() -> None:
    plain, model = make(Branching), make(Branching)
    memscale.wrap(model, config_of(budget="64KiB"))
    torch.manual_seed(1)
    with pytest.raises(PlanError, match="budget must be at least"):
        train(model)
    assert model.num_calls == 1
    torch.manual_seed(1)
    train(plain, 1)
    assert_as_never_wrapped(model, plain)


def test_larger_batches_are_recorded_too() -> None:
    model = make(Branching)
    memscale.wrap(model, config_of())
    train(model, 2)
    train(model, 2, rows=2 * ROWS)
    small, large = executor_of(model).plans
    assert large.plain_peak_bytes > small.plain_peak_bytes


def test_arguments_that_have_no_shape() -> None:
    class Flexible(Branching):
        def forward(self, x: torch.Tensor, other: Any = None) -> torch.Tensor:
            return super().forward(x)

    model = make(Flexible)
    memscale.wrap(model, config_of())
    for _ in range(3):
        other = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        model(batch(), other).square().mean().backward()
    assert executor_of(model).plan is not None


def test_the_log_says_it_once(caplog: pytest.LogCaptureFixture) -> None:
    model = make(Branching)
    memscale.wrap(model, config_of())
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="memscale"):
        train(model)
    assert caplog.text.count("is planned after its first step") == 1
    assert caplog.text.count("runs without a prediction") == 0


def test_it_can_be_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    model = make(Branching)
    memscale.wrap(model, config_of(use_empirical_fallback=False))
    train(model, 3)
    assert executor_of(model).plan is None
    assert caplog.text.count("runs without a prediction") == 1


def test_with_8_bit_state() -> None:
    model = make(Branching)
    memscale.wrap(model, Config(use_8bit_optimizer=True, force_optimize=True))
    train(model)
    plan = executor_of(model).plan
    assert plan is not None
    assert plan.optimizer_bits == 8


def test_blocks_of_a_layer_are_known(sim: torch.device) -> None:
    """Layers are told apart in the recorded step: each block has its own bytes."""
    model = nn.Sequential(*(Block() for _ in range(3))).to(sim)
    memscale.wrap(model, config_of(use_static_profiling=False))
    train(model)
    plan = executor_of(model).plan
    assert plan is not None
    sizes = {layer.layer: layer.plain_bytes for layer in plan.layers}
    assert sizes["0"] == sizes["1"] == sizes["2"] > 0


def test_raw_pointers() -> None:
    """A kernel in C must never be given the address of a tensor without bytes."""

    class WithPointer(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.empty_like(x)
            ctypes.memmove(y.data_ptr(), x.contiguous().data_ptr(), x.nbytes)
            return super().forward(y)

    plain, model = make(WithPointer), make(WithPointer)
    memscale.wrap(model, config_of())
    for each in (plain, model):
        torch.manual_seed(1)
        train(each, 4)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
    assert executor_of(model).plan is not None
