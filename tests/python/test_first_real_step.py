"""Models that cannot be traced are planned with their first real step."""

from __future__ import annotations

import copy
import ctypes
import logging
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.optim.optimizer as torch_optimizer
from torch import nn

import memscale
from compat_twins import (
    ROWS,
    WIDTH,
    Block,
    Net,
    Record,
    assert_same,
    batch,
    config_of,
    executor_of,
    run,
)
from memscale import Config, PlanError
from memscale.calls.optimizer_steps import stop_watching
from never_wrapped import assert_as_never_wrapped

STEPS = 6


class Branching(Net):
    """Values decide what it does, so that fakes cannot run it."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__(depth)
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return super().forward(x if x.sum() > 0 else -x)


class Routed(Net):
    """A mixture of experts: how many rows go where is known when it runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.statistics(self.first(x))
        for i, block in enumerate(self.blocks):
            rows = torch.nonzero(x[:, i] > 0).squeeze(1)
            x = x.index_copy(0, rows, block(x[rows]))
        out: torch.Tensor = self.head(x)
        return out


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * gradient + 0 * x


class WithFunction(Branching):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(super().forward(x))  # type: ignore[no-any-return]


class WithFunc(Net):
    """torch.func forbids saved-tensor hooks while it runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.statistics(self.first(x))
        for block in self.blocks:
            x = block(x)
        scale = torch.func.grad(lambda y: y.square().sum())(x)
        out: torch.Tensor = self.head(x + scale)
        return out


def make(kind: type[nn.Module], **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(**options)


def drive(model: nn.Module, record: Record) -> None:
    """Batches that differ, a loss of the loop's own, clipping."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        loss = model(batch(step).to(next(model.parameters()).device)).square().mean()
        record("loss", loss)
        loss.backward()
        record.gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def train(model: nn.Module, steps: int = STEPS, rows: int = ROWS) -> None:
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        model(batch(step, rows).to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


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


def accumulating(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(STEPS):
        model(batch(step)).square().mean().backward()
        if step % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()


def without_an_optimizer(model: nn.Module) -> None:
    for step in range(STEPS):
        model(batch(step)).square().mean().backward()


def evaluating(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(STEPS):
        loss = model(batch(step)).square().mean()
        with torch.no_grad():
            model(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def failing_first(model: nn.Module) -> None:
    with pytest.raises(RuntimeError):
        model(torch.randn(ROWS, WIDTH + 1))
    train(model)


def forward_first(model: nn.Module) -> None:
    model(batch())
    train(model)


def profiled(model: nn.Module) -> None:
    """Nothing is recorded under a profiler, which would lose its own state."""
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(STEPS):
        with torch.profiler.profile() if step < 2 else nullcontext():
            model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def profiled_backward(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(STEPS):
        loss = model(batch(step)).square().mean()
        with torch.profiler.profile() if step == 0 else nullcontext():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def backward_twice(model: nn.Module) -> None:
    """The second backward comes when the first step is planned with already."""
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(STEPS):
        loss = model(batch(step)).square().mean()
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        model(batch(step + 20))
        del loss


def evaluating_between_backwards(model: nn.Module) -> None:
    for step in range(STEPS):
        loss = model(batch(step)).square().mean()
        loss.backward(retain_graph=True)
        with torch.no_grad():
            model(batch(step))
        loss.backward()


def another_hook(model: nn.Module) -> None:
    """torch must not find its list of hooks changed while it goes through it."""
    optimizer = torch.optim.AdamW(model.parameters())
    calls = []
    for step in range(STEPS):
        model(batch(step)).square().mean().backward()
        if step == 0:
            handle = torch_optimizer.register_optimizer_step_pre_hook(
                lambda *_: calls.append(1)
            )
        optimizer.step()
        optimizer.zero_grad()
    handle.remove()
    assert len(calls) == STEPS


@pytest.mark.parametrize(
    "loop",
    [
        accumulating,
        without_an_optimizer,
        evaluating,
        failing_first,
        forward_first,
        profiled,
        profiled_backward,
        backward_twice,
        evaluating_between_backwards,
        another_hook,
    ],
    ids=lambda loop: loop.__name__,
)
def test_loops(loop: Callable[[nn.Module], None]) -> None:
    plain, ours = make(Branching), make(Branching)
    memscale.wrap(ours, config_of())
    for model in (plain, ours):
        torch.manual_seed(1)
        loop(model)
    assert executor_of(ours).plan is not None
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


def test_two_calls_before_each_backward_are_not_planned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make(Branching)
    plain = copy.deepcopy(model)
    memscale.wrap(model, config_of())

    def loop(model: nn.Module) -> None:
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(4):
            a, b = model(batch(step)), model(batch(step + 10))
            (a.square().mean() + b.square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()

    loop(plain)
    loop(model)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
    assert executor_of(model).plan is None
    assert "called again before the backward of its first call" in caplog.text


def test_a_graph_that_outlives_the_recording() -> None:
    """Its saves are asked for when the trace is long finished."""
    model, plain = make(Branching), make(Branching)
    memscale.wrap(model, config_of())
    for each in (plain, model):
        torch.manual_seed(1)
        inner = torch.optim.SGD([each.head.bias], lr=0.0)
        loss = each(batch()).square().mean()
        loss.backward(retain_graph=True)
        inner.step()  # ends the recording; the weights stay as they are
        torch.autograd.grad(loss, [each.first.weight], retain_graph=True)


def test_an_optimizer_that_steps_inside_backward(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def loop(model: nn.Module) -> None:
        torch.manual_seed(1)
        optimizers = {p: torch.optim.AdamW([p]) for p in model.parameters()}

        def step(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for number in range(4):
            model(batch(number)).square().mean().backward()

    plain, model = make(Branching), make(Branching)
    loop(plain)
    memscale.wrap(model, config_of())
    loop(model)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
    assert "inside of its backward" in caplog.text
    other = make(Branching)  # the thread is free for others
    memscale.wrap(other, config_of())
    train(other)
    assert executor_of(other).plan is not None


def test_an_optimizer_whose_step_calls_the_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def loop(model: nn.Module) -> None:
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(model.parameters())

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch()).square().mean()
            loss.backward()
            return loss

        for _ in range(4):
            optimizer.step(closure)

    plain, model = make(Branching), make(Branching)
    loop(plain)
    memscale.wrap(model, config_of())
    loop(model)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
    assert "its optimizer's step calls it" in caplog.text


def test_two_models_in_one_step() -> None:
    first, second = make(Branching), make(Branching)
    for model in (first, second):
        memscale.wrap(model, config_of())
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()])
    for step in range(STEPS):
        loss = first(batch(step)).square().mean() + second(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert executor_of(first).plan is not None
    assert executor_of(second).plan is not None


def test_batches_that_grow() -> None:
    model = make(Branching)
    memscale.wrap(model, config_of())
    for step in range(4):
        train(model, 1, rows=ROWS + 32 * step)
    assert len(executor_of(model).plans) == 3  # the last is planned with the next


def test_a_cache_that_layers_read_is_not_let_go_by_a_given_plan() -> None:
    """A plan of a recorded step does not know who reads what a layer caches."""
    model = make(Branching)
    memscale.wrap(model, config_of())
    train(model, 3)
    plan = executor_of(model).plan
    assert plan is not None
    assert plan.find_choice("use_cache") is None


def test_nothing_is_left_behind() -> None:
    # A model that was dropped leaves the one hook there is, until the next one stops.
    stop_watching(nn.Module())  # type: ignore[arg-type]
    hooks = len(torch_optimizer._global_optimizer_pre_hooks)
    model = make(Branching)
    memscale.wrap(model, config_of())
    model(batch())
    assert len(torch_optimizer._global_optimizer_pre_hooks) == hooks + 1
    memscale.detach(model)  # in the middle of the step that is recorded
    assert len(torch_optimizer._global_optimizer_pre_hooks) == hooks
    plain = make(Branching)
    plain(batch())
    assert_as_never_wrapped(model, plain)
    memscale.wrap(model, config_of())
    train(model)
    assert len(torch_optimizer._global_optimizer_pre_hooks) == hooks


def test_a_model_that_is_dropped_leaves_its_thread_free() -> None:
    model = make(Branching)
    memscale.wrap(model, config_of())
    model(batch())
    gone = weakref.ref(model)
    del model
    assert gone() is None
    other = make(Branching)
    memscale.wrap(other, config_of())
    train(other)
    assert executor_of(other).plan is not None


def test_a_step_that_another_thread_ends(caplog: pytest.LogCaptureFixture) -> None:
    model = make(Branching)
    memscale.wrap(model, config_of())
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch()).square().mean().backward()
    thread = threading.Thread(target=optimizer.step)
    thread.start()
    thread.join()
    train(model)
    assert "ended by another thread" in caplog.text
    other = make(Branching)  # this thread can be recorded again
    memscale.wrap(other, config_of())
    train(other)
    assert executor_of(other).plan is not None


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
