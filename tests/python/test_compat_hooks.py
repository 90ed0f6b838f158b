"""Hooks of the user, on modules and on what autograd saves, beside ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import memscale
from compat_twins import (
    Block,
    Net,
    batch,
    check_twins,
    each_mode,
    executor_of,
    make,
    steps,
    untouched_process,  # noqa: F401
)
from memscale import OptimizationMode as Mode

# ---- saved-tensor hooks of the user ----


@each_mode
def test_save_on_cpu_around_the_model(mode: Mode) -> None:
    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with save_on_cpu():
            return model(x).square().mean()

    executor = check_twins(steps(loss_of), mode, drops=False)
    assert executor.stats().ops_recorded == 0


@each_mode
def test_saved_tensors_hooks_around_the_model(mode: Mode) -> None:
    """The user's hooks see every save, as without wrap."""
    seen: list[list[torch.Size]] = []

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        shapes: list[torch.Size] = []
        seen.append(shapes)
        with saved_tensors_hooks(lambda t: shapes.append(t.shape) or t, lambda t: t):
            return model(x).square().mean()

    check_twins(steps(loss_of), mode, drops=False)
    plain, ours = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert plain == ours


@each_mode
@pytest.mark.parametrize("kind", ["save_on_cpu", "hooks"])
def test_saved_tensors_hooks_inside_the_model(mode: Mode, kind: str) -> None:
    class Inside(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hooks = saved_tensors_hooks(lambda t: t.double(), lambda t: t.float())
            with save_on_cpu() if kind == "save_on_cpu" else hooks:
                x = torch.sigmoid(x)
            return super().forward(x)

    check_twins(steps(), mode, lambda: Net(block=Inside))


# ---- hooks of the user ----


@each_mode
def test_hooks_of_the_user(mode: Mode) -> None:
    """Forward, backward and tensor hooks run as often, and see the same."""
    log: list[Any] = []

    class Hooked(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_forward_pre_hook(lambda m, a: (a[0] * 2,))
            self.blocks[0].register_forward_hook(lambda m, a, out: out + 1)
            self.blocks[1].register_forward_hook(
                lambda m, a, out: log.append(out.detach().clone())
            )
            self.blocks[1].register_full_backward_hook(
                lambda m, into, out: log.append(out[0].clone())
            )
            self.blocks[0].register_full_backward_pre_hook(
                lambda m, out: (out[0] * 0.5,)
            )
            self.head.weight.register_hook(lambda g: g * 3)

    check_twins(steps(), mode, Hooked)
    half = len(log) // 2
    assert half > 0
    assert all(map(torch.equal, log[:half], log[half:]))


def test_hooks_of_the_user_are_not_called_by_planning() -> None:
    """Neither with fakes nor more often: what they collect is the user's."""
    model, collected = make(), []
    model.first.register_forward_hook(lambda m, a, out: collected.append(out))
    model.register_forward_pre_hook(lambda m, a: collected.append(a[0]))
    memscale.wrap(model, sample_input=batch())
    assert collected == []
    model(batch()).sum().backward()
    assert [type(t) for t in collected] == [torch.Tensor] * 2
    assert executor_of(model).plan is not None


def test_hooks_that_make_weights_are_part_of_the_plan() -> None:
    """torch.nn.utils.weight_norm computes the weight in a hook."""

    def build() -> nn.Module:
        model = Net()
        for block in model.blocks:
            nn.utils.weight_norm(block.up)
            nn.utils.parametrizations.spectral_norm(block.down)
        return model

    executor = check_twins(steps(), Mode.BALANCED, build)
    assert executor.plan is not None
