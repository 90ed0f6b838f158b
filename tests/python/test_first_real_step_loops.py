"""Loops around a model whose first real step is recorded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.optim.optimizer as torch_optimizer
from torch import nn

import memscale
from compat_twins import (
    ROWS,
    WIDTH,
    batch,
    config_of,
    executor_of,
)
from untraceable import (
    STEPS,
    Branching,
    make,
    train,
)


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
