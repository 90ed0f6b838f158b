"""The state and the temporaries of optimizers, as estimated."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import memscale
from memscale.benchmarks.measure import measure_peak
from memscale.trace.optimizer_step import optimizer_names
from models import loss_of, mlp

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")

KIB = 1 << 10
MIB = 1 << 20


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
