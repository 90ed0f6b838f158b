"""Estimating changes nothing and allocates nothing."""

from __future__ import annotations

import gc
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.optim.optimizer as torch_optimizer
from torch import nn

import memscale
import models
from models import loss_of, mlp

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")

KIB = 1 << 10
MIB = 1 << 20


def frozen(value: Any, seen: dict[int, int]) -> Any:
    """A copy of all that can be reached, to be compared with one made later."""
    if isinstance(value, torch.Tensor):
        gradient = None if value.grad is None else frozen(value.grad, seen)
        data = value.detach().cpu().clone() if not value.is_meta else None
        parts = {k: frozen(v, seen) for k, v in vars(value).items()}
        return (
            id(value),
            type(value),
            value.device,
            value.requires_grad,
            None
            if data is None
            else data.view(torch.uint8).numpy().tobytes()
            if data.dim()
            else (data.dtype, data.item()),
            tuple(value.shape),
            value.stride(),
            gradient,
            parts,
        )
    if isinstance(value, bool | int | float | str | bytes | type(None) | type):
        return value
    if id(value) in seen:
        return ("again", seen[id(value)])
    seen[id(value)] = len(seen)
    if isinstance(value, dict):
        items = [(frozen(k, seen), frozen(v, seen)) for k, v in value.items()]
        return (id(value), type(value), items)
    if isinstance(value, list | tuple):
        return (id(value), type(value), [frozen(v, seen) for v in value])
    if isinstance(value, set | frozenset):
        return (id(value), sorted(map(repr, value)))
    if (hasattr(value, "__dict__") and not callable(value)) or isinstance(
        value, nn.Module
    ):
        return (id(value), type(value), frozen(vars(value), seen))
    return id(value)


def everything(model: nn.Module, *others: Any) -> Any:
    """The model to its last attribute, the random states, and what else is given."""
    sim = torch.sim.get_rng_state().tolist() if hasattr(torch, "sim") else None
    seen: dict[int, int] = {}
    return (
        frozen(model, seen),
        [module.training for module in model.modules()],
        [frozen(other, seen) for other in others],
        torch.get_rng_state().tolist(),
        repr(np.random.get_state()),
        random.getstate(),
        sim,
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
    )


class Busy(nn.Module):
    """Does in its forward what models do beside computing."""

    def __init__(self, fails: bool = False, looks: bool = False) -> None:
        super().__init__()
        self.fails, self.looks = fails, looks
        self.body = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3)
        )
        self.head = nn.Linear(16, 4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(4), persistent=False)
        self.head.register_forward_hook(lambda module, args, output: None)
        self.register_forward_pre_hook(lambda module, args: None)
        self.config = type("Config", (), {})()
        self.config.uses, self.config.sizes = 0, [1, 2]
        self.calls = 0
        self.log: list[Any] = []
        self.cache: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        y = self.body(x)
        if not self.looks:  # what a recorded run cannot undo
            self.calls += 1
            self.config.uses += 1
            self.config.sizes.append(3)
            self.log.append(y)
            self.cache["y"] = y
            self.body[3].p = 0.5
            self.new_attribute = 1
        with torch.no_grad():
            self.mean.lerp_(self.head(y).mean(0), 0.1)
        if self.looks and y.sum() > 0:  # only values can tell
            y = y * 2
        torch.default_generator.manual_seed(6)
        if self.fails:
            raise ArithmeticError("half-way")
        torch.default_generator.manual_seed(5)
        torch.rand(3)
        return self.head(y).square().mean()


@pytest.fixture(params=["cpu", "sim"])
def device(request: pytest.FixtureRequest, sim: torch.device) -> torch.device:
    return torch.device("cpu") if request.param == "cpu" else sim


def with_gradients(model: nn.Module, x: torch.Tensor) -> nn.Module:
    """One that is in the middle of being trained, part of it frozen."""
    model.body[0].bias.requires_grad_(False)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    model.body[1].eval()
    return model


class TestNothingChanges:
    def test_the_comparison_sees_changes(self) -> None:
        model = with_gradients(Busy(), torch.randn(4, 8))
        before = everything(model)
        assert everything(model) == before
        model.config.sizes.append(4)
        assert everything(model) != before
        model.config.sizes.pop()
        assert everything(model) == before
        model.steps += 1
        assert everything(model) != before
        model.steps -= 1
        next(model.parameters()).grad[0] = 3
        assert everything(model) != before

    def test_by_tracing(self, device: torch.device) -> None:
        x = torch.randn(4, 8, device=device)
        model = with_gradients(Busy().to(device), x)
        before = everything(model, x)
        estimate = memscale.estimate(model, x)
        assert estimate.method == "static"
        assert everything(model, x) == before

    def test_by_tracing_in_evaluation_mode(self, device: torch.device) -> None:
        x = torch.randn(4, 8, device=device)
        model = Busy().to(device).eval()
        before = everything(model, x)
        trace = memscale.estimate(model, x).trace
        assert everything(model, x) == before
        # It is training that is estimated.
        assert any(trace[i].random for i in range(len(trace)))

    def test_by_a_model_that_fails(self, device: torch.device) -> None:
        x = torch.randn(4, 8, device=device)
        model = with_gradients(Busy(fails=True).to(device), x)
        before = everything(model, x)
        with pytest.raises(ArithmeticError, match="half-way"):
            memscale.estimate(model, x)
        assert everything(model, x) == before

    def test_by_a_loss_that_fails(self) -> None:
        x = torch.randn(4, 8)
        model = with_gradients(Busy(), x)
        loss_fn = nn.CrossEntropyLoss(weight=torch.ones(4))
        before = everything(model, x, loss_fn)
        with pytest.raises(IndexError, match="out of range"):
            memscale.estimate(model, (x, torch.zeros(3)), loss_fn=loss_fn)
        assert everything(model, x, loss_fn) == before

    def test_by_recording(self, device: torch.device) -> None:
        x = torch.randn(4, 8, device=device)
        model = with_gradients(Busy(looks=True).to(device), x)
        before = everything(model, x)
        estimate = memscale.estimate(model, x)
        assert estimate.method == "recorded"
        assert everything(model, x) == before

    def test_by_recording_a_model_that_fails(self) -> None:
        x = torch.randn(4, 8)
        model = with_gradients(Busy(fails=True, looks=True), x)
        before = everything(model, x)
        with pytest.raises(ArithmeticError, match="half-way"):
            memscale.estimate(model, x)
        assert everything(model, x) == before

    @pytest.mark.parametrize("name", ["gpt2", "bert"])
    def test_of_hugging_faces_models(self, name: str) -> None:
        make, batch = models.MODELS[name]
        model, sample = make(), batch()
        model.train()
        before = everything(model, sample)
        memscale.estimate(model, sample)
        memscale.estimate(model, sample, device="sim")
        assert everything(model, sample) == before

    def test_a_model_trains_as_its_twin(self) -> None:
        torch.manual_seed(0)
        model, batch = models.cnn(), models.images()
        twin = models.train(model, batch, "cpu", steps=2)
        memscale.estimate(model, batch)
        run = models.train(model, batch, "cpu", steps=2)
        assert models.first_difference(twin, run) is None

    def test_of_an_optimizer(self) -> None:
        model, x = mlp(), torch.randn(5, 8)
        optimizer = torch.optim.AdamW(
            [
                {"params": model[0].parameters(), "lr": 0.1},
                {"params": [*model[2].parameters(), *model[4].parameters()]},
            ]
        )
        loss_of(model(x)).backward()
        optimizer.step()
        calls: list[Any] = []
        optimizer.register_step_pre_hook(lambda *args: calls.append(args))
        before = everything(model, x, vars(optimizer))
        memscale.estimate(model, x, optimizer)
        assert everything(model, x, vars(optimizer)) == before
        assert calls == []


class TestNothingIsAllocated:
    def test_for_a_model_on_meta(self) -> None:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(32)))
        x = torch.randn(64, 4096)
        gc.collect()
        with memscale.memory.track("cpu") as memory:
            estimate = memscale.estimate(model, x, device="cpu")
        assert memory.peak - memory.before < 20 * MIB
        assert estimate.breakdown["parameters"] == 32 * (4096 * 4096 + 4096) * 4
        assert estimate.peak_bytes > 8 << 30

    def test_for_a_model_on_the_cpu(self) -> None:
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
        x = torch.randn(1024, 1024)
        gc.collect()
        with memscale.memory.track("cpu") as memory:
            memscale.estimate(model, x)
            memscale.estimate(model, x, device="RTX 3090")
        assert memory.peak - memory.before < MIB

    def test_on_the_device(self, sim: torch.device) -> None:
        model = models.gpt2().to(sim)
        batch = [t.to(sim) for t in models.tokens()]
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        memscale.estimate(model, batch)
        assert torch.accelerator.memory_allocated() == before
        # A batch's integers are looked at on the host.
        assert torch.accelerator.max_memory_allocated() == before


def test_hooks_on_all_optimizers_are_for_the_users_steps() -> None:
    calls: list[str] = []
    register = (
        torch_optimizer.register_optimizer_step_pre_hook,
        torch_optimizer.register_optimizer_step_post_hook,
    )
    handles = [each(lambda *_: calls.append("stepped")) for each in register]
    try:
        model = torch.nn.Linear(4, 4)
        memscale.estimate(
            model, torch.ones(2, 4), torch.optim.AdamW(model.parameters())
        )
    finally:
        for handle in handles:
            handle.remove()
    assert calls == []
