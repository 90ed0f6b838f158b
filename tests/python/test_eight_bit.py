"""Wrapped models whose optimizer's state is held in 8 bits."""

from __future__ import annotations

import gc
import logging
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from transformers import GPT2Config, GPT2LMHeadModel

import memscale
from memscale import Config, OptimizationMode
from memscale._C import Timeline, plan_for, step_under
from memscale.optim import AdamW8bit, bitsandbytes, is_8bit
from memscale.planning import question_of
from memscale.techniques import optimizer_state
from replay_twins import Block

WIDTH, ROWS = 128, 256


def _model(device: torch.device | str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(WIDTH) for _ in range(3))).to(device)


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3
) -> list[float]:
    torch.manual_seed(1)
    device = next(model.parameters()).device
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(ROWS, WIDTH, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _weight_state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    weight = max(model.parameters(), key=torch.numel)
    state: dict[str, torch.Tensor] = optimizer.state[weight]
    return state


def test_found_at_its_first_step_and_given_back() -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    memscale.wrap(model, Config(use_8bit_optimizer=True, force_optimize=True))
    assert type(optimizer) is torch.optim.AdamW  # not yet
    losses = _train(model, optimizer)
    scheduler.step()
    assert type(optimizer) is AdamW8bit
    assert _weight_state(model, optimizer)["exp_avg_codes"].dtype == torch.uint8
    assert optimizer.param_groups[0]["lr"] == 5e-4
    plan = model._memscale_executor.plan
    assert plan.optimizer_bits == 8
    assert plan.optimizer == "AdamW"
    memscale.detach(model)

    twin = _model()
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-3, weight_decay=0.1)
    expected = _train(twin, plain)
    assert losses[:2] == expected[:2]  # before any state was rounded
    assert losses[2] == pytest.approx(expected[2], rel=1e-3)
    assert type(optimizer) is torch.optim.AdamW
    theirs, ours = _weight_state(twin, plain), _weight_state(model, optimizer)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape)
    assert optimizer.param_groups[0].keys() - {"initial_lr"} == (
        plain.param_groups[0].keys()
    )
    assert optimizer.defaults == plain.defaults
    _train(model, optimizer)  # and goes on


def test_a_known_optimizer_is_converted_with_its_state() -> None:
    model = _model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    _train(model, optimizer)
    before = _weight_state(model, optimizer)["exp_avg"].clone()
    config = Config(use_8bit_optimizer=True, force_optimize=True)
    with memscale.optimize(model, optimizer, config) as executor:
        assert is_8bit(optimizer)
        _train(model, optimizer)
        assert executor is not None
        assert executor.plan is not None
        # The plain step, to compare with, is that of the optimizer as it was.
        assert executor.plan.optimizer == "Adam"
        assert executor.plan.optimizer_bits == 8
    assert type(optimizer) is torch.optim.Adam
    model_2 = _model()
    optimizer = torch.optim.Adam(model_2.parameters(), lr=1e-3)
    _train(model_2, optimizer)
    with memscale.optimize(model_2, optimizer, config):
        pass
    after = _weight_state(model_2, optimizer)["exp_avg"]
    # Half of the widest gap between two codes, of the largest in a block.
    assert (after - before).abs().max() <= 0.01 * before.abs().max()


def test_apply_all_optimizations() -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    assert memscale.apply_all_optimizations(model, optimizer) == (model, optimizer)
    assert is_8bit(optimizer)
    assert model._memscale_executor.config.mode == OptimizationMode.AGGRESSIVE
    _train(model, optimizer)
    memscale.detach(model)
    assert not is_8bit(optimizer)
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim"):
        memscale.apply_all_optimizations(model, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: torch.optim.SGD(p, 0.1), "SGD is not torch.optim.Adam or AdamW"),
        (
            lambda p: torch.optim.AdamW(p, amsgrad=True),
            "AdamW cannot be 8-bit: amsgrad must be False with bits=8",
        ),
    ],
)
def test_others_are_left_alone_and_said(
    make: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = _model()
    optimizer = make(model.parameters())
    memscale.wrap(model, Config(use_8bit_optimizer=True, force_optimize=True))
    with caplog.at_level(logging.INFO, logger="memscale"):
        _train(model, optimizer)
    assert [r for r in caplog.messages if reason in r] == [
        f"use_8bit_optimizer: {reason}; its state stays as it is"
        if "SGD" in reason
        else f"use_8bit_optimizer: {reason}, got True"
    ]  # once
    assert not is_8bit(optimizer)
    assert model._memscale_executor.plan.optimizer_bits == 32


class Outer(torch.optim.Optimizer):
    """As accelerate's: what is set on it is set on the inner one."""

    def __init__(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        setattr(self, name, optimizer)
        self._name = name

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return getattr(self, self._name).param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        getattr(self, self._name).param_groups = groups

    def step(self, closure: Any = None) -> Any:
        return getattr(self, self._name).step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        getattr(self, self._name).zero_grad(set_to_none)


def test_one_that_wraps_another() -> None:
    """It is the inner one that steps, and nothing is set on either."""
    model = _model()
    inner = torch.optim.AdamW(model.parameters())
    outer = Outer(inner, "optimizer")
    batch = torch.randn(ROWS, WIDTH)
    plan = memscale.plan(model, batch, outer, Config(use_8bit_optimizer=True))
    assert (plan.optimizer, plan.optimizer_bits) == ("AdamW", 8)
    assert inner.param_groups[0]["params"][0] is next(model.parameters())
    memscale.apply_all_optimizations(model, outer)
    assert type(inner) is AdamW8bit
    before = next(model.parameters()).clone()
    _train(model, outer, 1)
    assert not torch.equal(next(model.parameters()), before)
    memscale.detach(model)
    assert type(inner) is torch.optim.AdamW


def test_one_that_passes_on_another_is_refused() -> None:
    model = _model()
    outer = Outer(torch.optim.AdamW(model.parameters()), "other")
    with pytest.raises(memscale.InputError, match="must hold its param_groups itself"):
        memscale.estimate(model, torch.randn(ROWS, WIDTH), outer)


def test_one_optimizer_of_two_models() -> None:
    one, two = _model(), _model()
    optimizer = torch.optim.AdamW([*one.parameters(), *two.parameters()])
    for model in (one, two):
        memscale.wrap(model, Config(use_8bit_optimizer=True))
    _train(one, optimizer)
    memscale.detach(one)
    _train(two, optimizer)
    assert is_8bit(optimizer)  # two's
    memscale.detach(two)
    assert type(optimizer) is torch.optim.AdamW


def test_a_failed_conversion_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object, **options: object) -> None:
        raise torch.OutOfMemoryError("no")

    model = memscale.wrap(_model(), Config(use_8bit_optimizer=True))
    optimizer = torch.optim.AdamW(model.parameters())
    with monkeypatch.context() as broken:
        broken.setattr(optimizer_state, "to_8bit", fail)
        with pytest.raises(torch.OutOfMemoryError):
            _train(model, optimizer)
    _train(model, optimizer)
    assert is_8bit(optimizer)


def test_nothing_is_kept_alive() -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    gc.collect()
    gc.disable()
    try:
        with memscale.optimize(model, optimizer, Config(use_8bit_optimizer=True)):
            pass
        executor = memscale.wrap(model, Config(use_8bit_optimizer=True))
        executor = weakref.ref(model._memscale_executor)
        gone = weakref.ref(optimizer)
        del optimizer, model
        assert gone() is None
        assert executor() is None
    finally:
        gc.enable()


def test_a_group_that_is_not_all_of_the_model() -> None:
    """The plain step is predicted with the groups that there are."""
    model = _model()
    optimizer = torch.optim.AdamW(model[0].parameters())
    config = Config(use_8bit_optimizer=True, force_optimize=True)
    with memscale.optimize(model, optimizer, config) as executor:
        _train(model, optimizer)
        assert executor is not None
        assert executor.plan is not None
        peak = executor.plans[0].plain_peak_bytes
    batch = torch.randn(ROWS, WIDTH)
    assert peak == memscale.estimate(model, batch, optimizer).peak_bytes


def test_a_plan_against_the_field() -> None:
    model = _model()
    config = Config(use_8bit_optimizer=True, force_optimize=True)
    plan = memscale.plan(model, torch.randn(ROWS, WIDTH), "adamw", config)
    with pytest.raises(memscale.ConfigError, match="use_8bit_optimizer must not be"):
        memscale.wrap(model, Config(plan=plan, use_8bit_optimizer=False))
    assert not hasattr(model, "_memscale_executor")


def test_an_optimizer_of_the_users_own_stays() -> None:
    model = _model()
    optimizer = AdamW8bit(model.parameters())
    memscale.wrap(model, Config(use_8bit_optimizer=True))
    _train(model, optimizer)
    memscale.detach(model)
    assert type(optimizer) is AdamW8bit


def test_another_models_optimizer_is_not_touched() -> None:
    model, other = _model(), _model()
    memscale.wrap(model, Config(use_8bit_optimizer=True))
    optimizer = torch.optim.AdamW(other.parameters())
    _train(other, optimizer)
    assert type(optimizer) is torch.optim.AdamW


@pytest.mark.parametrize("use_8bit_optimizer", [False, True])
@pytest.mark.parametrize("way", ["optimize", "apply_all", "trainer"])
def test_a_known_optimizer_of_another_model_is_refused(
    way: str, use_8bit_optimizer: bool
) -> None:
    model, other = _model(), _model()
    optimizer = torch.optim.AdamW(other.parameters())
    config = Config(use_8bit_optimizer=use_8bit_optimizer)

    def attach() -> None:
        if way == "optimize":
            with memscale.optimize(model, optimizer, config):
                pass
        elif way == "apply_all":
            memscale.apply_all_optimizations(model, Outer(optimizer, "optimizer"))
        else:
            trainer = SimpleNamespace(model=model, optimizer=optimizer, train=print)
            memscale.wrap(trainer, config)

    with pytest.raises(
        memscale.InputError,
        match=r"optimizer must hold parameters of the model, a Sequential, got AdamW "
        r"with \d+ others, the first of shape",
    ):
        attach()
    assert type(optimizer) is torch.optim.AdamW
    assert not hasattr(model, "_memscale_executor")


def test_parameters_that_are_not_the_models_stay_in_32_bits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One optimizer of two models, and a parameter of none: each its own bits."""
    one, two = _model(), _model()
    alone = nn.Parameter(torch.zeros(80, 80))
    optimizer = torch.optim.AdamW([*one.parameters(), *two.parameters(), alone])

    def bits() -> list[int]:
        alone.grad = torch.ones_like(alone)
        _train(one, optimizer, 1)
        _train(two, optimizer, 1)
        assert isinstance(optimizer, AdamW8bit)
        weights = (max(m.parameters(), key=torch.numel) for m in (one, two))
        kept = [*weights, alone]
        for p in kept:
            assert ("exp_avg" in optimizer.state[p]) == (optimizer.bits_of(p) == 32)
        return [optimizer.bits_of(p) for p in kept]

    config = Config(use_8bit_optimizer=True, force_optimize=True)
    with caplog.at_level(logging.INFO, logger="memscale"):
        memscale.wrap(one, config)
        assert bits() == [8, 32, 32]
    others = len([*two.parameters()]) + 1
    assert f"but for {others} of its parameters, which are not of this" in caplog.text
    assert one._memscale_executor.plan.optimizer_bits == 8  # and it has a plan
    memscale.wrap(two, config)
    assert bits() == [8, 8, 32]
    memscale.detach(one)
    memscale.detach(two)
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.state[alone].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_no_hook_is_left() -> None:
    before = len(_global_optimizer_pre_hooks)
    model = _model()
    memscale.wrap(model, Config(use_8bit_optimizer=True))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    other = _model()
    _train(other, torch.optim.AdamW(other.parameters()), 1)
    memscale.wrap(other, Config(use_8bit_optimizer=True))
    memscale.detach(other)
    assert len(_global_optimizer_pre_hooks) <= before


# ---- plans ----


def test_bits_are_chosen_by_mode_field_and_budget() -> None:
    model, batch = _model(), torch.randn(ROWS, WIDTH)

    def bits(**fields: Any) -> int:
        config = Config(force_optimize=True, **fields)
        return memscale.plan(model, batch, "adamw", config).optimizer_bits

    aggressive = {"mode": OptimizationMode.AGGRESSIVE}
    assert bits() == 32  # lossy: not unless it is asked for
    assert bits(use_8bit_optimizer=True) == 8
    assert bits(**aggressive) == 8
    assert bits(**aggressive, use_8bit_optimizer=False) == 32
    # With a budget only if nothing exact is enough.
    exact = memscale.pareto(model, batch, "adamw")[0].peak_bytes
    assert bits(**aggressive, budget=exact) == 32
    assert bits(**aggressive, budget=exact - 4096) == 8
    with pytest.raises(memscale.PlanError, match="budget must be at least"):
        bits(budget=exact - 4096)


def test_a_saved_plan_says_so_too() -> None:
    model, batch = _model(), torch.randn(ROWS, WIDTH)
    config = Config(use_8bit_optimizer=True, force_optimize=True)
    plan = memscale.plan(model, batch, "adamw", config)
    assert "8 bits" in plan.explain()
    assert "optimizer_state: 8 bits -> not used" in plan.diff(
        memscale.plan(model, batch, "adamw", Config(force_optimize=True))
    )
    memscale.wrap(model, Config(plan=plan))
    optimizer = torch.optim.AdamW(model.parameters())
    _train(model, optimizer)
    assert is_8bit(optimizer)


# ---- devices without a kernel ----


def test_a_step_without_a_kernel_is_not_chosen_by_a_mode(sim: torch.device) -> None:
    model, batch = _model(sim), torch.randn(ROWS, WIDTH, device=sim)

    def plan(**fields: Any) -> memscale.Plan:
        config = Config(force_optimize=True, **fields)
        return memscale.plan(model, batch, "adamw", config)

    aggressive = {"mode": OptimizationMode.AGGRESSIVE}
    by_mode = plan(**aggressive)
    assert (by_mode.optimizer_bits, by_mode.optimizer_nanoseconds) == (32, 0)
    assert "stays in 32 bits: a step with 8 would take about" in by_mode.explain()
    exact = memscale.pareto(model, batch, "adamw")[0].peak_bytes
    assert plan(**aggressive, budget=exact).optimizer_bits == 32
    # What it costs is said wherever it is chosen, and is in the slowdown.
    for chosen in (
        plan(use_8bit_optimizer=True),
        plan(**aggressive, budget=exact - 4096),
        *memscale.pareto(model, batch, "adamw", Config(use_8bit_optimizer=True)),
    ):
        assert chosen.optimizer_bits == 8
        assert chosen.optimizer_nanoseconds > 0
        total = chosen.nanoseconds + chosen.optimizer_nanoseconds
        assert chosen.slowdown == total / chosen.plain_nanoseconds
        if chosen.verdicts[0].rule != "frontier":
            assert "times as long as the optimizer's own step" in chosen.explain()
            assert "install bitsandbytes or build with CUDA" in chosen.explain()


def test_a_step_by_a_kernel_has_no_price() -> None:
    batch = torch.randn(ROWS, WIDTH)
    config = Config(use_8bit_optimizer=True, force_optimize=True)
    plan = memscale.plan(_model(), batch, "adamw", config)
    assert plan.optimizer_bits == 8
    assert plan.optimizer_nanoseconds == 0
    assert "times as long" not in plan.explain()


@pytest.mark.parametrize("installed", [False, True])
def test_a_card_steps_by_bitsandbytes_if_that_is_there(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bitsandbytes, "find", lambda: installed or None)
    mode = OptimizationMode.AGGRESSIVE
    config = Config(mode=mode, force_optimize=True)
    batch = torch.randn(ROWS, WIDTH)
    plan = memscale.plan(_model(), batch, "adamw", config, device="RTX 3090")
    assert plan.optimizer_bits == (8 if installed else 32)
    assert plan.optimizer_nanoseconds == 0


@pytest.mark.parametrize("asked_for", [False, True])
def test_without_a_plan_a_mode_does_not_choose_it_either(
    sim: torch.device, asked_for: bool, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {"use_8bit_optimizer": True} if asked_for else {}
    model = _model(sim)
    model[1] = torch.compile(model[1], backend="eager")  # no plan with that
    optimizer = torch.optim.AdamW(model.parameters())
    memscale.wrap(model, Config(mode=OptimizationMode.AGGRESSIVE, **fields))
    with caplog.at_level(logging.INFO, logger="memscale"):
        _train(model, optimizer, 1)
    assert "runs without a prediction" in caplog.text
    assert is_8bit(optimizer) == asked_for
    assert ("a step takes many times as long" in caplog.text) == asked_for
    memscale.detach(model)


@pytest.mark.parametrize("own", [False, True])
def test_predicted_is_measured_on_sim(sim: torch.device, own: bool) -> None:
    """Within 3 %, and the optimizer's step does not hold the peak any longer."""
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=512, n_positions=256)
    ).to(sim)
    make = AdamW8bit if own else torch.optim.AdamW
    optimizer = make(model.parameters(), lr=1e-3)
    memscale.wrap(model, Config(use_8bit_optimizer=True, force_optimize=True))
    ids = torch.randint(0, 512, (8, 256), device=sim)
    for _ in range(4):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    executor = model._memscale_executor
    assert is_8bit(optimizer)
    for entry in executor.ledger:
        assert entry.measured_peak == pytest.approx(entry.predicted_peak, rel=0.03)
    with memscale.memory.track(sim) as step:
        model(ids, labels=ids).loss.backward()
        with memscale.memory.track(sim) as in_optimizer:
            optimizer.step()
    assert in_optimizer.peak < step.peak


def test_the_timeline_knows_it(sim: torch.device) -> None:
    """By the formula, from a plain trace, as by tracing the 8-bit optimizer."""
    model = _model(sim)
    batch = torch.randn(ROWS, WIDTH, device=sim)
    optimizer = torch.optim.AdamW(model.parameters())
    plain = memscale.estimate(model, batch, optimizer)
    config = Config(use_8bit_optimizer=True, enable_checkpointing=False)
    question = question_of(plain, config, "Net", model, optimizer)
    made = step_under(question, plan_for(question))
    traced = memscale.estimate(model, batch, AdamW8bit(model.parameters()))
    resident = Timeline(made, "device", traced.granularity).resident
    assert resident == traced.timeline.resident
    state = traced.breakdown["optimizer_state"]
    count = sum(p.numel() for p in model.parameters() if p.numel() >= 4096)
    assert state < plain.breakdown["optimizer_state"] / 3
    assert state >= 2 * count
