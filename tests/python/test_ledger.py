"""Predicted beside measured: the first steps, and plans that are made anew."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from torch import nn

import memscale
from memscale import Config, replay
from memscale._C import CostModel, OpTimes, Tolerance
from memscale.attach import ledger
from memscale.model.layers import find_layers
from memscale.model.optimizers import find_optimizer
from replay_twins import Block

WIDTH, ROWS = 128, 512


def _model(device: torch.device | str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(WIDTH) for _ in range(4))).to(device)


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, rows: int = ROWS
) -> torch.Tensor:
    device = next(model.parameters()).device
    loss = model(torch.randn(rows, WIDTH, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _wrapped(device: torch.device | str = "cpu", **fields: object) -> nn.Module:
    fields = {"force_optimize": True, "enable_logging": False, **fields}
    return memscale.wrap(_model(device), Config(**fields))


def _executor(model: nn.Module) -> memscale.Executor:
    found: memscale.Executor = model._memscale_executor
    return found


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_measured_is_predicted(
    make: type[torch.optim.Optimizer], sim: torch.device
) -> None:
    model = _wrapped(sim)
    optimizer = make(model.parameters(), lr=0.01)
    for _ in range(4):
        _step(model, optimizer)
    executor = _executor(model)
    assert executor.plan is not None
    assert executor.plan.optimizer == make.__name__  # found, not assumed
    assert len(executor.ledger) == 2
    for entry in executor.ledger:
        error = entry.measured_peak - entry.predicted_peak
        assert abs(error) <= entry.predicted_peak * 0.01
        assert entry.measured_slowdown is not None


def test_evaluation_in_between_does_not_count(sim: torch.device) -> None:
    model = _wrapped(sim)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        _step(model, optimizer)
        with torch.no_grad():
            model(torch.randn(64 * ROWS, WIDTH, device=sim))
    assert _executor(model).ledger == []


def test_paused_steps_are_not_planned_nor_measured() -> None:
    model = _wrapped(budget=1)  # too small for any plan
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with _executor(model).paused():
        for _ in range(4):
            _step(model, optimizer)
    assert _executor(model).plans == []
    assert _executor(model).ledger == []


def test_no_step_is_watched_without_warmup_steps() -> None:
    model = _wrapped(warmup_steps=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        _step(model, optimizer)
    assert _executor(model).ledger == []


def test_what_trains_is_part_of_the_kind() -> None:
    model = _wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    _step(model, optimizer)
    model[0].requires_grad_(False)
    _step(model, optimizer)
    assert len(_executor(model).plans) == 2


def test_a_peak_above_the_prediction_makes_a_plan_anew(
    sim: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """Bytes that no trace can see, held by the model itself in every call."""

    class Hoarder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(Block(WIDTH) for _ in range(4)))
            self.hoard: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layers(x)
            if not isinstance(x, torch._subclasses.FakeTensor):
                self.hoard = [torch.empty(1 << 20, dtype=torch.uint8, device=sim)]
            return out

    torch.manual_seed(0)
    model = Hoarder().to(sim)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    plain = memscale.pareto(model, torch.randn(ROWS, WIDTH, device=sim), "sgd")
    budget = plain[-1].peak_bytes + (1 << 19)  # enough for all that is known
    memscale.wrap(model, Config(budget=budget))
    with caplog.at_level(logging.INFO, logger="memscale"):
        for _ in range(6):
            _step(model, optimizer)
    assert "planned anew" in caplog.text
    plan = _executor(model).plan
    assert plan is not None
    assert any(layer.recomputes for layer in plan.layers)
    with memscale.memory.track(sim) as memory:
        _step(model, optimizer)
    assert memory.peak <= budget


@pytest.mark.parametrize("policy", ["keep", "block"])
def test_op_times_are_measured_in_layers(policy: str) -> None:
    """In those that keep all, too. What backward runs is not, but scaled alike."""
    model, batch = _model(), torch.randn(ROWS, WIDTH)
    trace = memscale.estimate(model, batch, "sgd").trace
    times = OpTimes()
    attached = replay.attach(model, {"": "block", "*": policy})
    attached.time_ops(times)
    model(batch).sum().backward()
    attached.time_ops(None)
    attached.detach()
    names = list(find_layers(model).modules)
    timed = times.applied_to(trace, CostModel.of_cpu(), names)
    ops = json.loads(timed.to_json())["ops"]
    assert all((op["nanoseconds"] > 0) != op["view"] for op in ops)
    # Another model's: nothing that was measured fits.
    others = [f"other.{name}" for name in names]
    assert times.applied_to(trace, CostModel.of_cpu(), others) == trace


def test_steps_slower_than_predicted_make_a_plan_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the times that were measured: the same bytes under the same budget."""
    model = _model()
    frontier = memscale.pareto(model, torch.randn(ROWS, WIDTH), "sgd")
    budget = frontier[0].peak_bytes
    monkeypatch.setattr(ledger, "TOLERANCE", Tolerance(time=-1e9))  # always too slow
    memscale.wrap(model, Config(budget=budget))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with caplog.at_level(logging.INFO, logger="memscale"):
        _step(model, optimizer)
        first = _executor(model).plan
        for _ in range(5):
            _step(model, optimizer)
    assert caplog.text.count("planned anew") == 1
    plan = _executor(model).plan
    assert first is not None
    assert plan is not None
    assert plan.plain_nanoseconds != first.plain_nanoseconds
    assert first.peak_bytes <= budget
    assert plan.peak_bytes <= budget


def test_a_budget_that_cannot_be_checked_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class ByValue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x if x.sum().item() > 0 else -x)

    config = Config(budget="1GiB", use_empirical_fallback=False)
    model = memscale.wrap(ByValue(), config)
    with caplog.at_level(logging.INFO, logger="memscale"):
        model(torch.randn(2, WIDTH)).sum().backward()
    assert "each step is measured against the budget" in caplog.text


def test_find_optimizer() -> None:
    model, other = _model(), _model()
    assert find_optimizer(model) is None
    ours = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.SGD(other.parameters(), lr=0.1)
    assert find_optimizer(model) is ours


def test_a_failed_wrap_leaves_the_old_one() -> None:
    model = _wrapped()
    before = _executor(model)
    with pytest.raises(memscale.PlanError):
        memscale.wrap(model, Config(plan="{}"))
    plan = memscale.plan(
        model, torch.randn(ROWS, WIDTH), "sgd", Config(force_optimize=True)
    )
    assert any(layer.policy != "keep" for layer in plan.layers)
    with pytest.raises(memscale.ConfigError, match="enable_checkpointing must not"):
        memscale.wrap(model, Config(plan=plan, enable_checkpointing=False))
    assert _executor(model) is before


def test_verify_with_a_budget_that_is_too_small() -> None:
    model = _wrapped(budget=1, verify_correctness=True)
    with pytest.raises(memscale.VerifyError, match="budget must be at least"):
        _step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not hasattr(model, "_memscale_executor")
