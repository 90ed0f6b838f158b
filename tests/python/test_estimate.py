"""memscale.estimate: bytes as a real step takes them, and a model left alone."""

from __future__ import annotations

import copy
import functools
import gc
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import memscale
import models
from memscale import hardware
from memscale._optimizer_step import optimizer_names
from memscale.benchmarks.measure import measure_peak

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")

KIB = 1 << 10
MIB = 1 << 20


def mlp(bias: bool = True) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 16, bias=bias),
        nn.Tanh(),
        nn.Linear(16, 16, bias=bias),
        nn.Tanh(),
        nn.Linear(16, 4, bias=bias),
    )


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


class TestPeak:
    @pytest.mark.parametrize("device", ["cpu", "sim"])
    @pytest.mark.parametrize("name", models.MODELS)
    def test_is_that_of_a_real_step(
        self, name: str, device: str, sim: torch.device
    ) -> None:
        make, batch = models.MODELS[name]
        torch.manual_seed(0)
        model, sample = make(), batch()
        for factory in (
            torch.optim.AdamW,
            functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        ):
            predicted = memscale.estimate(model, sample, factory, device=device)
            measured = measure_peak(model, sample, None, factory, device, steps=2)
            error = predicted.peak_bytes - measured
            assert -measured / 100 <= error <= max(measured / 100, 4 * KIB)

    @pytest.mark.parametrize("device", ["cpu", "sim"])
    def test_is_exact_for_linear_layers(self, device: str, sim: torch.device) -> None:
        model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 128))
        sample = torch.randn(32, 256)
        factory = functools.partial(torch.optim.SGD, lr=0.1)
        estimate = memscale.estimate(
            model, sample, factory, loss_fn=torch.sum, device=device
        )
        measured = measure_peak(model, sample, torch.sum, factory, device)
        assert abs(estimate.peak_bytes - measured) <= 64  # single numbers

    def test_grows_with_the_batch_by_the_activations(self) -> None:
        model = nn.Sequential(nn.Linear(8, 1024), nn.Tanh(), nn.Linear(1024, 8))
        peaks = [
            memscale.estimate(
                model, torch.randn(n, 8), "sgd", loss_fn=torch.sum
            ).phases["forward"]
            for n in (1000, 2000)
        ]
        # Input, the tanh's input and output (while it runs).
        assert peaks[1] - peaks[0] == 1000 * (8 + 1024 + 1024) * 4

    def test_in_lower_precision(self, sim: torch.device) -> None:
        model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 64))
        model.to(torch.bfloat16)
        sample = torch.randn(32, 256, dtype=torch.bfloat16)
        estimate = memscale.estimate(model, sample, loss_fn=torch.sum, device="sim")
        measured = measure_peak(model, sample, torch.sum, torch.optim.AdamW, "sim")
        assert abs(estimate.peak_bytes - measured) <= measured / 100

    def test_under_autocast(self, sim: torch.device) -> None:
        class Cast(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body = nn.Sequential(
                    nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)
                )

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                with torch.autocast(x.device.type, torch.bfloat16):
                    return self.body(x).float().sum()

        for device in ("cpu", "sim"):
            model, sample = Cast(), torch.randn(64, 64)
            predicted = memscale.estimate(model, sample, device=device).peak_bytes
            measured = measure_peak(model, sample, None, torch.optim.AdamW, device)
            assert abs(predicted - measured) <= measured / 100

    def test_of_checkpointed_layers(self, sim: torch.device) -> None:
        model = models.gpt2()
        model.model.gradient_checkpointing_enable()
        model.train()
        sample = models.tokens()
        kept = memscale.estimate(models.gpt2(), sample, "sgd", device="sim")
        predicted = memscale.estimate(model, sample, "sgd", device="sim")
        measured = measure_peak(model, sample, None, torch.optim.SGD, "sim")
        assert abs(predicted.peak_bytes - measured) <= measured / 100
        assert predicted.peak_bytes < kept.peak_bytes


class TestParts:
    def test_sum_up(self, sim: torch.device) -> None:
        for device in ("cpu", "sim"):
            e = memscale.estimate(models.gpt2(), models.tokens(), device=device)
            assert sum(e.breakdown.values()) == e.peak_bytes
            assert max(e.phases.values()) == e.peak_bytes
            assert e.phases[e.peak_phase] == e.peak_bytes
            assert sum(share.bytes for share in e.layers) == e.peak_bytes
            for share in e.layers:
                assert sum(share.by_category.values()) == share.bytes
            sizes = [share.bytes for share in e.layers]
            assert sizes == sorted(sizes, reverse=True)
            assert e.peak_layer in [share.name for share in e.layers]
            assert [i.bytes for i in e.timeline][e.timeline.peak().op] == e.peak_bytes

    def test_of_what_is_known_beforehand(self) -> None:
        model = mlp()
        x = torch.randn(5, 8)
        bytes_of_parameters = sum(p.nbytes for p in model.parameters())
        e = memscale.estimate(model, x, "adamw")
        assert e.breakdown["parameters"] == bytes_of_parameters
        last = e.timeline[len(e.timeline) - 1].by_category
        assert last["gradients"] == bytes_of_parameters
        assert last["activations"] == 0
        # Two moments and a step count for each of six tensors.
        assert last["optimizer_state"] == 2 * bytes_of_parameters + 6 * 4

    def test_between_steps(self) -> None:
        model, x = mlp(), torch.randn(5, 8)
        e = memscale.estimate(model, x, "adamw")
        parameters = sum(p.nbytes for p in model.parameters())
        state = 2 * parameters + 6 * 4
        assert e.timeline.resident == parameters + state + x.nbytes

    def test_as_a_dict(self) -> None:
        e = memscale.estimate(mlp(), torch.randn(5, 8), "sgd")
        data = e.to_dict()
        assert json.loads(e.to_json()) == data
        assert data["peak_bytes"] == e.peak_bytes
        assert data["call"] == "float32[5, 8] on cpu"
        assert data["optimizer"] == "SGD"
        assert data["method"] == "static"
        assert data["target"] == data["device"] == "cpu"
        assert data["peak"]["op"] == e.trace[e.timeline.peak().op].name
        assert f"{e.peak_bytes:,} bytes" in str(e)
        assert str(e.peak_bytes) in repr(e)

    def test_nothing_is_on_the_host_but_what_the_model_puts_there(
        self, sim: torch.device
    ) -> None:
        class ToHost(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(64, 64)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.layer(x).cpu().exp().sum()

        x = torch.randn(32, 64)
        on_cpu = memscale.estimate(ToHost(), x, None, device="cpu")
        assert on_cpu.host_peak_bytes == 0
        on_sim = memscale.estimate(ToHost(), x, None, device="sim")
        assert on_sim.host_peak_bytes >= 2 * 32 * 64 * 4
        plain = memscale.estimate(nn.Linear(64, 64), x, None, device="sim")
        assert plain.host_peak_bytes < KIB

    def test_does_it_fit(self) -> None:
        e = memscale.estimate(mlp(), torch.randn(5, 8))
        fit = e.fits("RTX 3090")
        assert fit.fits
        assert fit.capacity == hardware.find("RTX 3090").memory
        assert fit.needed == e.peak_bytes + fit.reserve
        with torch.device("meta"):
            large = nn.Linear(1 << 16, 1 << 15)  # 8 GiB, and as much for gradients
        e = memscale.estimate(large, torch.zeros(1, 1 << 16), device="RTX 3090")
        assert not e.fits("RTX 3090").fits
        assert e.target == hardware.find("RTX 3090").name
        assert e.fits(hardware.find("A100 80GB")).fits


# ---- nothing changes ----


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


# ---- optimizers ----


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    storages = {
        leaf.untyped_storage()._cdata: leaf.untyped_storage().nbytes()
        for leaf in tree_leaves(list(optimizer.state.values()))
        if isinstance(leaf, torch.Tensor)
    }
    return sum(storages.values())


def predicted_state(estimate: memscale.Estimate) -> int:
    data = json.loads(estimate.trace.to_json())
    return sum(
        storage["bytes"] * storage["count"]
        for storage in data["storages"]
        if storage["category"] == "optimizer_state"
    )


def stepped(
    model: nn.Module,
    x: torch.Tensor,
    make: Callable[..., torch.optim.Optimizer],
    parameters: Any = None,
) -> torch.optim.Optimizer:
    optimizer = make(parameters or [p for p in model.parameters() if p.requires_grad])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        return loss

    closure()
    optimizer.step()
    return optimizer


class _Custom(torch.optim.Optimizer):
    """Keeps the sum of all gradients in one vector, and an average of each."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            everything = torch.cat([p.grad.flatten() for p in group["params"]])
            self.state[group["params"][0]]["all"] = everything
            for p in group["params"]:
                state = self.state[p]
                if "mean" not in state:
                    state["mean"] = torch.zeros_like(p)
                state["mean"].lerp_(p.grad, 0.1)
                p.sub_(state["mean"], alpha=group["lr"])


def _real_optimizers() -> Iterator[str]:
    for name in optimizer_names():
        if name not in ("sparseadam", "lbfgs"):
            yield name


class TestOptimizers:
    @pytest.mark.parametrize("name", _real_optimizers())
    def test_by_name(self, name: str) -> None:
        model = mlp(bias=name != "muon")  # it takes matrices only
        x = torch.randn(5, 8)
        estimate = memscale.estimate(model, x, name)
        kind = optimizer_names()[name]
        assert estimate.optimizer == kind.__name__
        real = stepped(model, x, kind)
        assert predicted_state(estimate) == state_bytes(real)
        instance = memscale.estimate(model, x, kind(model.parameters()))
        assert predicted_state(instance) == state_bytes(real)

    def test_lbfgs_needs_a_closure(self) -> None:
        with pytest.raises(memscale.InputError, match="without a closure, got LBFGS"):
            memscale.estimate(mlp(), torch.randn(5, 8), "lbfgs")

    def test_sparse_adam_says_what_it_says(self) -> None:
        with pytest.raises(RuntimeError, match="dense gradients"):
            memscale.estimate(mlp(), torch.randn(5, 8), "sparseadam")

    @pytest.mark.parametrize(
        "options",
        [{"foreach": True}, {"foreach": False}, {"fused": True}, {"amsgrad": True}],
        ids=str,
    )
    @pytest.mark.parametrize("where", ["cpu", "sim"])
    def test_ways_to_step(
        self, where: str, options: dict[str, bool], sim: torch.device
    ) -> None:
        make = functools.partial(torch.optim.AdamW, **options)
        model, x = mlp().to(where), torch.randn(5, 8, device=where)
        wide = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        sample = torch.randn(2, 64)
        estimate = memscale.estimate(model, x, make)
        assert predicted_state(estimate) == state_bytes(stepped(model, x, make))
        # What the step itself takes: the peak is there.
        predicted = memscale.estimate(wide, sample, make, device=where)
        assert predicted.peak_phase == "optimizer" or "fused" in options
        measured = measure_peak(wide, sample, _mean_square, make, where)
        error = predicted.peak_bytes - measured
        assert -measured / 100 <= error <= max(measured / 100, 4 * KIB)

    def test_several_groups(self) -> None:
        model, x = mlp(), torch.randn(5, 8)
        groups = [
            {"params": [*model[0].parameters()], "momentum": 0.0},
            {"params": [*model[2].parameters(), *model[4].parameters()]},
        ]

        def make(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

        instance = make(copy.copy([dict(group) for group in groups]))
        estimate = memscale.estimate(model, x, instance)
        momenta = sum(p.nbytes for p in groups[1]["params"])
        assert predicted_state(estimate) == momenta
        real = stepped(model, x, make, [dict(group) for group in groups])
        assert predicted_state(estimate) == state_bytes(real)

    def test_one_that_has_part_of_the_parameters(self) -> None:
        model, x = mlp(), torch.randn(5, 8)
        optimizer = torch.optim.Adam(model[4].parameters())
        estimate = memscale.estimate(model, x, optimizer)
        ours = sum(p.nbytes for p in model[4].parameters())
        assert predicted_state(estimate) == 2 * ours + 2 * 4

    def test_frozen_parameters_have_no_state(self) -> None:
        model, x = mlp(), torch.randn(5, 8)
        model[0].requires_grad_(False)
        model[2].bias.requires_grad_(False)
        estimate = memscale.estimate(model, x, "adamw")
        real = stepped(model, x, torch.optim.AdamW)
        assert predicted_state(estimate) == state_bytes(real) > 0
        data = json.loads(estimate.trace.to_json())
        gradients = [s for s in data["storages"] if s["category"] == "gradients"]
        assert sum(s["bytes"] for s in gradients) == (16 * 16 + 16 * 4 + 4) * 4

    def test_unused_parameters_have_no_state(self) -> None:
        class Half(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.used, self.unused = nn.Linear(8, 8), nn.Linear(64, 64)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.used(x).sum()

        estimate = memscale.estimate(Half(), torch.randn(2, 8), "adam")
        assert predicted_state(estimate) == 2 * (72 * 4 + 4)

    def test_a_custom_one(self) -> None:
        model, x = mlp(), torch.randn(5, 8)
        for optimizer in (_Custom, _Custom(model.parameters())):
            estimate = memscale.estimate(model, x, optimizer)
            assert estimate.optimizer == "_Custom"
            real = stepped(model, x, _Custom)
            assert predicted_state(estimate) == state_bytes(real)

    def test_a_custom_one_over_repeated_layers(self) -> None:
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8))
        )
        x = torch.randn(5, 16)
        real = state_bytes(stepped(model, x, _Custom))
        for optimizer in (_Custom, _Custom(model.parameters())):
            estimate = memscale.estimate(model, x, optimizer)
            assert predicted_state(estimate) == real

    def test_none(self) -> None:
        estimate = memscale.estimate(mlp(), torch.randn(5, 8), None)
        assert predicted_state(estimate) == 0
        assert set(estimate.phases) == {"forward", "backward"}
        assert estimate.optimizer == "none"

    def test_names_in_any_case(self) -> None:
        assert memscale.estimate(mlp(), torch.randn(5, 8), "AdamW").optimizer == "AdamW"


def _mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


# ---- what cannot be estimated ----


class TestBadInput:
    def test_not_a_module(self) -> None:
        with pytest.raises(TypeError, match=r"torch\.nn\.Module, got function"):
            memscale.estimate(lambda x: x, torch.randn(2))

    def test_no_parameters(self) -> None:
        estimate = memscale.estimate(nn.ReLU(), torch.randn(16, 4))
        assert estimate.loss.startswith("none")
        assert estimate.phases == {"forward": 2 * 16 * 4 * 4}
        assert estimate.breakdown["parameters"] == 0

    def test_no_ops(self) -> None:
        estimate = memscale.estimate(nn.Identity(), torch.randn(16, 4))
        assert estimate.peak_bytes == 16 * 4 * 4
        assert estimate.phases == {}
        assert estimate.peak_op is None
        assert estimate.layers == []
        assert str(estimate)

    def test_all_frozen(self) -> None:
        model = mlp().requires_grad_(False)
        estimate = memscale.estimate(model, torch.randn(5, 8))
        assert estimate.loss.startswith("none")
        assert set(estimate.phases) == {"forward"}
        parameters = sum(p.nbytes for p in model.parameters())
        assert estimate.breakdown["parameters"] == parameters

    def test_frozen_with_a_loss(self) -> None:
        model = mlp().requires_grad_(False)
        estimate = memscale.estimate(model, torch.randn(5, 8), loss_fn=loss_of)
        assert estimate.loss.startswith("loss_fn, but it needs no gradient")
        assert set(estimate.phases) == {"forward"}

    def test_on_two_devices(self, sim: torch.device) -> None:
        model = mlp()
        model[2].to(sim)
        x = torch.randn(5, 8)
        with pytest.raises(memscale.TraceError, match=r"one device, got cpu and sim"):
            memscale.estimate(model, x)
        # Asked for one device, it is estimated there.
        assert (
            memscale.estimate(model, x, device="cpu").trace
            == memscale.estimate(mlp(), x, device="cpu").trace
        )

    def test_scripted(self) -> None:
        scripted = torch.jit.trace(mlp(), torch.randn(5, 8))
        with pytest.raises(memscale.TraceError, match="scripted"):
            memscale.estimate(scripted, torch.randn(5, 8))

    def test_lazy(self) -> None:
        model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
        with pytest.raises(memscale.TraceError, match=r"0\.weight has no shape yet"):
            memscale.estimate(model, torch.randn(5, 8))
        model(torch.randn(5, 8))
        assert memscale.estimate(model, torch.randn(5, 8)).peak_bytes > 0

    def test_a_wrong_shape_is_the_models_error_and_says_the_call(self) -> None:
        with pytest.raises(RuntimeError, match="same reduction dim") as caught:
            memscale.estimate(mlp(), torch.randn(5, 7))
        assert not isinstance(caught.value, memscale.Error)
        assert caught.value.__notes__ == [
            "memscale called the model with float32[5, 7] on cpu"
        ]

    def test_wrong_arguments_are_the_models_error_and_say_the_call(self) -> None:
        with pytest.raises(TypeError) as caught:
            memscale.estimate(mlp(), {"input": torch.randn(5, 8), "extra": 3})
        (note,) = caught.value.__notes__
        assert note.endswith("with input=float32[5, 8] on cpu, extra=3")

    def test_an_unknown_optimizer(self) -> None:
        with pytest.raises(memscale.InputError, match=r"adamw.*got 'adamx'"):
            memscale.estimate(mlp(), torch.randn(5, 8), "adamx")
        with pytest.raises(memscale.InputError, match=r"torch\.optim\.Optimizer, got"):
            memscale.estimate(mlp(), torch.randn(5, 8), lambda parameters: 3)

    def test_an_optimizer_of_another_model(self) -> None:
        optimizer = torch.optim.SGD(mlp().parameters(), lr=0.1)
        with pytest.raises(memscale.InputError, match=r"got 6 others.*\[16, 8\]"):
            memscale.estimate(mlp(), torch.randn(5, 8), optimizer)

    def test_an_unknown_device(self) -> None:
        with pytest.raises(memscale.HardwareError, match="RTX 3091"):
            memscale.estimate(mlp(), torch.randn(5, 8), device="RTX 3091")
        with pytest.raises(memscale.InputError, match="meta"):
            memscale.estimate(mlp(), torch.randn(5, 8), device="meta")

    @pytest.mark.parametrize("value", [0, -1, True, 1.5, "2"])
    @pytest.mark.parametrize("name", ["batch", "length"])
    def test_a_bad_size(self, name: str, value: Any) -> None:
        with pytest.raises(memscale.InputError, match=f"{name} must be a positive"):
            memscale.estimate(mlp(), **{name: value})

    def test_a_loss_that_is_none(self) -> None:
        with pytest.raises(memscale.InputError, match=r"single number, got float32"):
            memscale.estimate(mlp(), torch.randn(5, 8), loss_fn=lambda out: out)
        with pytest.raises(memscale.InputError, match="single number, got None"):
            memscale.estimate(mlp(), torch.randn(5, 8), loss_fn=lambda out: None)

    def test_what_cannot_be_copied(self) -> None:
        class Locked(nn.Linear):
            def __init__(self) -> None:
                super().__init__(8, 4)
                self.lines = iter(open(__file__))  # noqa: SIM115

        with pytest.raises(memscale.TraceError, match="Locked cannot be copied"):
            memscale.estimate(Locked(), torch.randn(5, 8))

    def test_a_sparse_parameter(self) -> None:
        model = nn.Linear(4, 4)
        model.register_buffer("adjacency", torch.eye(4).to_sparse())
        with pytest.raises(memscale.TraceError, match="sparse"):
            memscale.estimate(model, torch.randn(2, 4))

    def test_what_torch_compile_made(self) -> None:
        model, x = mlp(), torch.randn(5, 8)
        compiled = torch.compile(model, backend="eager")
        assert memscale.estimate(compiled, x).trace == memscale.estimate(model, x).trace
