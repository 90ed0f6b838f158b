"""What torch's tests ask of checkpointing and hooks beside users' own derivatives.

Function transforms, which allow no saved-tensor hooks, inside layers and around the
model; autograd Functions that save what they like.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import Function

from replay_twins import Wrapped, batch, blocks, same, twins

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")

both_policies = pytest.mark.parametrize("policy", ["cheap", "block"])
both_devices = pytest.mark.parametrize("device", ["cpu", "sim"])


# Function transforms, which allow no hooks.


def func_grad(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    slope = torch.func.grad(lambda v: torch.exp(v @ weight).sum())(x)
    return torch.sin(slope @ weight).exp()


def func_vmap(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    rows = torch.func.vmap(lambda v: torch.exp(v @ weight).sin())(x)
    return rows.cos().exp()


def func_jacobian(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    jacobian = torch.func.jacrev(lambda v: torch.sigmoid(v @ weight))(x[0])
    return torch.tanh(jacobian @ weight).exp()


def forward_mode(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y, slope = torch.func.jvp(lambda v: torch.sin(v @ weight), (x,), (x.cos(),))
    return (y * slope).exp().sin()


@both_policies
@pytest.mark.parametrize(
    "function",
    [func_grad, func_vmap, func_jacobian, forward_mode],
    ids=lambda f: f.__name__,
)
def test_function_transforms(
    function: Callable[..., torch.Tensor], policy: str
) -> None:
    twins(Wrapped(function), policy).assert_same_step(batch() / 4)


def _all_gradients(model: nn.Module) -> list[torch.Tensor]:
    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        out = torch.func.functional_call(model, parameters, (batch(),))
        return torch.as_tensor(out.sum())

    return list(torch.func.grad(loss)(dict(model.named_parameters())).values())


def _per_sample(model: nn.Module) -> list[torch.Tensor]:
    x = batch().requires_grad_()
    torch.func.vmap(model)(x).sum().backward()
    assert x.grad is not None
    return [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def _along_a_tangent(model: nn.Module) -> list[torch.Tensor]:
    return list(torch.func.jvp(model, (batch(),), (batch().cos(),)))


@both_policies
@pytest.mark.parametrize(
    "act", [_all_gradients, _per_sample, _along_a_tangent], ids=lambda f: f.__name__
)
def test_function_transforms_of_the_model(
    act: Callable[[nn.Module], list[torch.Tensor]], policy: str
) -> None:
    pair = twins(blocks(p=0.0), policy)
    plain, ours = pair.both(act)
    assert len(plain) == len(ours) > 0
    assert all(map(torch.equal, plain, ours))
    pair.assert_same_step(batch())
    assert pair.handle.stats().saves_dropped > 0


# Nodes of the user's.


class Saves(Function):
    """Saves an input, an output, a value of its own and nothing; reads them twice."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, k: float) -> torch.Tensor:
        own, out = torch.cos(x), torch.exp(x)
        ctx.save_for_backward(x, out, own, None)
        ctx.k = k
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, out, own, nothing = ctx.saved_tensors
        assert nothing is None
        again = ctx.saved_tensors
        return grad * (out + own * ctx.k + again[0] * x), None


class Dirty(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.exp_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        out: torch.Tensor = grad * x
        return out


@both_devices
@both_policies
def test_functions_of_the_user(policy: str, device: str) -> None:
    def function(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = Saves.apply(torch.sin(x @ weight), 3.0)
        y = Dirty.apply(y.cos())
        return torch.as_tensor(Saves.apply(y, -1.0).sin())

    pair = twins(Wrapped(function), policy, device)
    pair.assert_same_step(batch(device))

    def penalty(model: nn.Module) -> torch.Tensor:
        x = batch(device).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        return slope.detach()

    plain, ours = pair.both(penalty)
    assert same(plain, ours)
    pair.assert_equal_gradients()
