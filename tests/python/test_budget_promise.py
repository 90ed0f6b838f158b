"""A budget is a promise: every step is measured, and planned anew if it is above.

Bytes are exact on the simulated device, and those of this training on the CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import Config, PlanError
from memscale._C import MemoryTracker
from replay_twins import Block

WIDTH, ROWS, MICRO_BATCHES = 128, 512, 4


def _model(device: torch.device | str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(WIDTH) for _ in range(4))).to(device)


def _executor(model: nn.Module) -> memscale.Executor:
    found: memscale.Executor = model._memscale_executor
    return found


def _batch(model: nn.Module, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH, device=next(model.parameters()).device)


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: torch.Tensor,
    micro_batches: int = 1,
    set_to_none: bool = True,
) -> None:
    for _ in range(micro_batches):
        model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)


def _own_bytes(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor
) -> int:
    """What this training holds between steps."""
    tensors = [*model.parameters(), *model.buffers(), batch]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    for state in optimizer.state.values():
        tensors += [x for x in state.values() if isinstance(x, torch.Tensor)]
    seen = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in seen.values())


def _peak(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: torch.Tensor,
    work: Callable[[], object],
) -> int:
    """Of the work, in bytes of this training."""
    own = _own_bytes(model, optimizer, batch)
    with memscale.memory.track(batch.device) as memory:
        work()
    return (
        memory.peak if batch.device.type != "cpu" else own + memory.peak - memory.before
    )


@pytest.fixture(params=["cpu", "sim"])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "sim":
        found: torch.device = request.getfixturevalue("sim")
        return found
    return torch.device("cpu")


# ---- accumulation over micro-batches ----


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_accumulation_keeps_the_budget(
    device: torch.device, set_to_none: bool, share: float
) -> None:
    model = _model(device)
    batch = _batch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    frontier = memscale.pareto(model, batch, optimizer)
    gradients = sum(p.nbytes for p in model.parameters())
    low, high = frontier[0].peak_bytes, frontier[-1].peak_bytes
    budget = low + gradients + int((high - low) * share)
    memscale.wrap(model, Config(budget=budget, enable_logging=False))
    for _ in range(4):
        _train(model, optimizer, batch, MICRO_BATCHES, set_to_none)

    def work() -> None:
        _train(model, optimizer, batch, MICRO_BATCHES, set_to_none)

    peak = _peak(model, optimizer, batch, work)
    executor = _executor(model)
    assert peak <= budget
    assert len(executor.plans) == 2  # without gradients, and onto gradients
    onto = executor.plans[1]
    assert "onto gradients" in onto.call
    assert abs(onto.peak_bytes - peak) <= 0.01 * peak


def test_a_budget_without_room_for_accumulation_is_refused(sim: torch.device) -> None:
    model = _model(sim)
    batch = _batch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    budget = memscale.pareto(model, batch, optimizer)[0].peak_bytes
    memscale.wrap(model, Config(budget=budget, enable_logging=False))
    with pytest.raises(PlanError, match="onto gradients that are there"):
        _train(model, optimizer, batch, MICRO_BATCHES)


# ---- steps above the budget ----


class Hoarder(nn.Module):
    """It holds bytes that no trace can see, in its calls number ``first`` and later."""

    def __init__(self, first: int, num_bytes: int) -> None:
        super().__init__()
        self.layers = _model("cpu")
        self.first, self.num_bytes, self.num_calls = first, num_bytes, 0
        self.hoard: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        if not isinstance(x, torch._subclasses.FakeTensor):
            self.num_calls += 1
            if self.num_calls >= self.first:
                self.hoard = [
                    torch.empty(self.num_bytes, dtype=torch.uint8).to(x.device)
                ]
        return out


@pytest.mark.parametrize("warmup_steps", [0, 2])
@pytest.mark.parametrize("first", [1, 9])
def test_a_step_above_the_budget_is_planned_anew_at_once(
    warmup_steps: int,
    first: int,
    sim: torch.device,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By a few bytes, far below the tolerance of predictions; also late."""
    model = Hoarder(first, 4096).to(sim)
    batch = _batch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    budget = memscale.pareto(model, batch, optimizer)[-1].peak_bytes
    memscale.wrap(model, Config(budget=budget, warmup_steps=warmup_steps))
    with caplog.at_level(logging.INFO, logger="memscale"):
        for _ in range(first + 2):
            _train(model, optimizer, batch)
    assert caplog.text.count("planned anew: a step took") == 1
    assert "more than the budget" in caplog.text
    plan = _executor(model).plan
    assert plan is not None
    assert any(layer.recomputes for layer in plan.layers)
    assert plan.peak_bytes <= plan.plain_peak_bytes
    peak = _peak(model, optimizer, batch, lambda: _train(model, optimizer, batch))
    assert peak <= budget


def test_a_budget_that_no_plan_keeps_is_said_once_and_training_goes_on(
    sim: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    model = Hoarder(1, 64 << 20).to(sim)
    batch = _batch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    budget = memscale.pareto(model, batch, optimizer)[-1].peak_bytes
    memscale.wrap(model, Config(budget=budget))
    with caplog.at_level(logging.WARNING, logger="memscale"):
        for _ in range(6):
            _train(model, optimizer, batch)
    said = [r.message for r in caplog.records if "is not kept" in r.message]
    assert len(said) == 1
    assert "at least" in said[0]
    peak = _peak(model, optimizer, batch, lambda: _train(model, optimizer, batch))
    assert f"at least {peak} bytes" in said[0]


def test_later_steps_leave_the_statistics_of_the_device_alone(
    sim: torch.device,
) -> None:
    model = _model(sim)
    batch = _batch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    memscale.wrap(model, Config(budget="1GiB", enable_logging=False))
    for _ in range(4):
        _train(model, optimizer, batch)
    large = torch.empty(1 << 24, dtype=torch.uint8, device=sim)
    peak = torch.accelerator.max_memory_allocated()
    del large
    for _ in range(4):
        _train(model, optimizer, batch)
    assert torch.accelerator.max_memory_allocated() == peak


def test_a_tracker_that_does_not_reset(sim: torch.device) -> None:
    def watched(num_bytes: int) -> int:
        tracker = MemoryTracker(sim, resets=False)
        tracker.start()
        torch.empty(num_bytes, dtype=torch.uint8, device=sim)
        tracker.stop()
        return tracker.peak - tracker.before

    torch.accelerator.reset_peak_memory_stats()
    assert watched(1 << 20) == 1 << 20
    assert watched(1 << 19) == 0  # below what was there before: not seen
    assert watched(1 << 21) == 1 << 21
    tracker = MemoryTracker(sim, resets=False)
    tracker.start()
    torch.accelerator.reset_peak_memory_stats()  # by somebody else
    torch.empty(1 << 19, dtype=torch.uint8, device=sim)
    tracker.stop()
    assert tracker.peak - tracker.before == 1 << 19


# ---- what the CPU's ledger counts ----


def test_the_ledger_of_the_cpu_counts_what_the_training_holds() -> None:
    """Absolute bytes; what else the process holds is not of this training."""
    model = _model("cpu")
    others = torch.ones(1 << 22)
    batch = _batch(model)
    optimizer = torch.optim.AdamW(model.parameters())
    memscale.wrap(model, Config(force_optimize=True, enable_logging=False))
    for _ in range(6):  # all but the first with gradients
        _train(model, optimizer, batch, set_to_none=False)
    entries = _executor(model).ledger
    peak = _peak(
        model, optimizer, batch, lambda: _train(model, optimizer, batch, 1, False)
    )
    assert others.nbytes > peak
    assert entries[-1].measured_peak == peak


# ---- a budget whose keeping cannot be known ----


def test_under_others_hooks_a_budget_is_refused() -> None:
    model = memscale.wrap(_model("cpu"), Config(budget="1GiB", enable_logging=False))
    with (
        torch.autograd.graph.save_on_cpu(),
        pytest.raises(PlanError, match="saved-tensor hooks of others"),
    ):
        model(_batch(model))
    assert not hasattr(model, "_memscale_executor")


def test_a_compiled_model_under_a_budget_is_refused() -> None:
    compiled = torch.compile(_model("cpu"))
    with pytest.raises(PlanError, match="is compiled"):
        memscale.wrap(compiled, Config(budget="1GiB", enable_logging=False))


def test_a_given_plan_and_a_budget() -> None:
    model = _model("cpu")
    batch = _batch(model)
    plan = memscale.plan(model, batch, "sgd", Config(force_optimize=True))
    with pytest.raises(PlanError, match="at least the given plan's peak"):
        memscale.wrap(model, Config(plan=plan, budget=plan.peak_bytes - 1))
    config = Config(plan=plan, budget=plan.peak_bytes, enable_logging=False)
    memscale.wrap(model, config)
    model(batch).sum().backward()
    with pytest.raises(PlanError, match="whether it keeps the budget is not known"):
        model(_batch(model, ROWS * 2))


def test_too_many_kinds_of_batches_hold_the_least(sim: torch.device) -> None:
    model = _model(sim)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    memscale.wrap(model, Config(budget="1GiB", enable_logging=False))
    for i in range(17):
        _train(model, optimizer, _batch(model, 64 + i))
    executor = _executor(model)
    assert len(executor.plans) == 16
    assert executor.plan is None
    executor.reset_stats()
    _train(model, optimizer, _batch(model, ROWS))
    assert executor.stats().saves_dropped > 0  # by its plans all is kept


class Routed(nn.Module):
    """What it runs changes after its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Block(WIDTH) for _ in range(2)))
        self.route = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


@pytest.fixture
def routed(monkeypatch: pytest.MonkeyPatch) -> Routed:
    model = Routed()
    plain = Block.forward

    def forward(self: Block, x: torch.Tensor) -> torch.Tensor:
        return plain(self, x * 1.5 if model.route else x)

    monkeypatch.setattr(Block, "forward", forward)
    return model


def _bytes_dropped(model: Routed, batch: torch.Tensor, **fields: Any) -> int:
    """In a call that differs from its plan from the first op of each layer on."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = Config(enable_logging=False, warmup_steps=0, **fields)
    model.route = False
    memscale.wrap(model, config, sample_input=batch)
    executor = _executor(model)
    assert executor.plan is not None
    assert any(layer.keep_set is not None for layer in executor.plan.layers)
    model.route = True
    _train(model, optimizer, batch)
    assert executor.stats().calls_unlike_keep_set == 2
    memscale.detach(model)
    return executor.stats().bytes_dropped


def test_after_a_difference_a_budget_holds_the_least(routed: Routed) -> None:
    batch = torch.randn(ROWS, WIDTH)
    frontier = memscale.pareto(routed, batch, "sgd")
    budget = frontier[len(frontier) // 2].peak_bytes
    cheap = _bytes_dropped(routed, batch, force_optimize=True)
    assert _bytes_dropped(routed, batch, budget=budget) > cheap
