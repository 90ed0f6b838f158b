"""wrap, detach and optimize: what they take, refuse, and leave behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from compat_twins import (
    Block,
    Net,
    Record,
    assert_same,
    batch,
    config_of,
    copy_of,
    each_mode,
    executor_of,
    make,
    run,
    steps,
    untouched_process,  # noqa: F401
)
from memscale import Config, PlanError
from memscale import OptimizationMode as Mode
from memscale.attach import planner
from memscale.calls import hook_stack
from never_wrapped import assert_as_never_wrapped

# ---- wrap and detach ----


@each_mode
def test_detach_before_and_after_training(mode: Mode) -> None:
    model = make()
    twin = copy_of(model)
    identities = [id(p) for p in model.parameters()]
    assert memscale.wrap(model, config_of(mode)) is model
    assert memscale.detach(model) is None
    assert_as_never_wrapped(model, twin)
    memscale.wrap(model, config_of(mode))
    assert_same(run(steps(), twin), run(steps(), model))
    memscale.detach(model)
    assert_as_never_wrapped(model, twin)
    assert [id(p) for p in model.parameters()] == identities
    # And it trains as before.
    assert_same(run(steps(), twin), run(steps(), model))


def test_the_comparison_sees_what_is_attached() -> None:
    """assert_as_never_wrapped can fail: on hooks, attributes, flags and values."""

    def changed(change: Callable[[Any], object]) -> None:
        model = make()
        twin = copy_of(model)
        change(model)
        with pytest.raises(AssertionError):
            assert_as_never_wrapped(model, twin)

    changed(lambda m: memscale.wrap(m))
    changed(lambda m: m.blocks[0].register_forward_hook(lambda *_: None))
    changed(lambda m: setattr(m.head, "extra", 1))
    changed(lambda m: m.blocks[1].eval())
    changed(lambda m: setattr(m, "forward", m.forward))
    changed(lambda m: m.head.weight.requires_grad_(False))
    changed(lambda m: m.head.bias.data.add_(1))
    changed(lambda m: m.head.bias.register_hook(lambda g: g))
    gc.collect()


def test_backward_after_detach() -> None:
    plain, ours = make(), memscale.wrap(make(), config_of(Mode.AGGRESSIVE))
    for model in (plain, ours):
        torch.manual_seed(1)
        loss = model(batch()).square().mean()
        if model is ours:
            memscale.detach(model)
        loss.backward()
    assert_as_never_wrapped(ours, plain)


def test_detach_twice_warns() -> None:
    model = memscale.wrap(make())
    memscale.detach(model)
    with pytest.warns(UserWarning, match="not wrapped"):
        memscale.detach(model)


def test_wrap_twice_takes_the_new_config() -> None:
    model = make()
    twin = copy_of(model)
    memscale.wrap(model)
    first = executor_of(model)
    memscale.wrap(model, config_of(Mode.AGGRESSIVE))
    assert executor_of(model) is not first
    assert executor_of(model).config.mode is Mode.AGGRESSIVE
    assert_same(run(steps(), twin), run(steps(), model))
    assert first.stats().ops_recorded == 0
    memscale.detach(model)
    assert_as_never_wrapped(model, twin)


@pytest.mark.parametrize(
    "part", ["blocks.0", "blocks.0.up", "head"], ids=["a layer", "deep", "outside"]
)
def test_a_part_of_a_wrapped_model_is_refused(part: str) -> None:
    model = make()
    twin = copy_of(model)
    memscale.wrap(model)
    with pytest.raises(PlanError, match=rf"{part}.*Net"):
        memscale.wrap(model.get_submodule(part))
    assert_same(run(steps(), twin), run(steps(), model))
    memscale.detach(model)
    assert_as_never_wrapped(model, twin)


@pytest.mark.parametrize(
    "part", ["blocks.0", "blocks.0.up", "head"], ids=["a layer", "deep", "outside"]
)
@pytest.mark.parametrize("checkpointing", [True, False])
def test_the_parent_of_a_wrapped_model_is_refused(
    part: str, checkpointing: bool
) -> None:
    model = make()
    twin = copy_of(model)
    inner = model.get_submodule(part)
    memscale.wrap(inner, Config(enable_checkpointing=checkpointing))
    with pytest.raises(PlanError, match=part):
        memscale.wrap(model)
    assert not hasattr(model, "_memscale_executor")
    assert executor_of(inner) is not None
    memscale.detach(inner)
    assert_as_never_wrapped(model, twin)
    memscale.detach(memscale.wrap(model))


def test_models_that_share_a_module_are_refused() -> None:
    first, second = make(), make()
    second.head = first.head
    twin = copy_of(second)
    memscale.wrap(first)
    with pytest.raises(PlanError, match="head"):
        memscale.wrap(second)
    assert executor_of(first) is not None
    memscale.detach(first)
    assert_as_never_wrapped(second, twin)


def test_a_dropped_model_is_freed_at_once() -> None:
    """Without the garbage collector: its memory is wanted for the next model."""
    gc.collect()
    gc.disable()
    try:
        model = memscale.wrap(make())
        model(batch()).sum().backward()
        parameter = weakref.ref(model.head.weight)
        watched = weakref.ref(model)
        del model
        assert watched() is None
        assert parameter() is None
    finally:
        gc.enable()


def test_disabled_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSCALE_DISABLE", "1")
    for model in (make(), nn.DataParallel(make())):
        twin = copy_of(model)
        assert memscale.wrap(model) is model
        assert_as_never_wrapped(model, twin)
        with memscale.optimize(model) as executor:
            assert executor is None
        assert_as_never_wrapped(model, twin)
    with pytest.raises(TypeError):
        memscale.wrap(3)


# ---- optimize ----


@each_mode
def test_optimize(mode: Mode) -> None:
    plain, ours = make(), make()
    expected = run(steps(), plain)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    with memscale.optimize(ours, optimizer, config_of(mode), batch()) as executor:
        assert executor is executor_of(ours)
        assert executor.plan.optimizer.lower().startswith("sgd")
        assert_same(expected, run(steps(), ours))
        assert executor.stats().saves_dropped > 0
    assert_as_never_wrapped(ours, plain)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_optimize_with_an_exception_inside(error: type[BaseException]) -> None:
    model = make()
    twin = copy_of(model)
    with pytest.raises(error), memscale.optimize(model):
        raise error
    assert_as_never_wrapped(model, twin)


def test_optimize_with_detach_and_wrap_inside() -> None:
    model = make()
    twin = copy_of(model)
    with memscale.optimize(model):
        memscale.detach(model)
    assert_as_never_wrapped(model, twin)
    with memscale.optimize(model):
        memscale.wrap(model)
    assert executor_of(model) is not None  # the newer one stays
    memscale.detach(model)
    assert_as_never_wrapped(model, twin)


# ---- after a failure ----


def test_interrupt_while_planning(monkeypatch: pytest.MonkeyPatch) -> None:

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    model = make()
    twin = copy_of(model)
    monkeypatch.setattr(planner, "question_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        memscale.wrap(model, sample_input=batch())
    assert_as_never_wrapped(model, twin)


class Interrupted(Block):
    """Raises in its forward, or in its backward, while ``error`` is set."""

    error: type[BaseException] | None = None
    where = "forward"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if Interrupted.error is not None and not hasattr(x, "fake_mode"):
            if Interrupted.where == "forward":
                raise Interrupted.error
            y.register_hook(self._raise)
        return y

    def _raise(self, gradient: torch.Tensor) -> None:
        if Interrupted.error is not None:
            raise Interrupted.error


@each_mode
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("then", ["step", "detach", "evaluate"])
def test_exception_in_a_step(
    mode: Mode,
    error: type[BaseException],
    where: str,
    then: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next step is clean, and so is the model after detach."""

    def drive(model: nn.Module, record: Record) -> None:
        steps(count=1)(model, record)
        monkeypatch.setattr(Interrupted, "where", where)
        monkeypatch.setattr(Interrupted, "error", error)
        with pytest.raises(error):
            model(batch()).square().mean().backward()
        monkeypatch.setattr(Interrupted, "error", None)
        record.gradients(model)
        model.zero_grad()
        if then == "evaluate":
            with torch.no_grad():
                record("evaluated", model(batch()))
            assert hook_stack.top() is None
        elif then == "detach" and hasattr(model, "_memscale_executor"):
            memscale.detach(model)
            assert hook_stack.top() is None
        steps()(model, record)

    plain = make(lambda: Net(block=Interrupted))
    ours = make(lambda: Net(block=Interrupted))
    memscale.wrap(ours, config_of(mode))
    assert_same(run(drive, plain), run(drive, ours))
    if then != "detach":
        memscale.detach(ours)
    assert_as_never_wrapped(ours, plain)


def test_a_plain_model_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the wrapped one is called again: its gradients are right."""
    other, twin = make(), make()
    model = memscale.wrap(make(lambda: Net(block=Interrupted)))
    monkeypatch.setattr(Interrupted, "error", KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        model(batch())
    ours = run(steps(), other)
    memscale.detach(model)
    assert_same(run(steps(), twin), ours)


def test_an_argument_that_counts_steps_does_not_plan_for_ever() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
            return self.linear(x) * (step + 1)

    model = memscale.wrap(Counting(), memscale.Config(enable_logging=False))
    for step in range(20):
        model(torch.randn(2, 8), step).sum().backward()
    assert len(model._memscale_executor.plans) == 16
