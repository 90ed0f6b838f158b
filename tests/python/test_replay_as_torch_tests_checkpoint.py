"""What torch's own tests ask of activation checkpointing, asked of replay.

torch tests checkpoints, nested ones too, in test_utils.py and test_autograd.py. The
questions are theirs; models and answers are written anew. Where checkpointing needs
a rule (rerun the same ops, keep the random state, mind reentrance), replay has to
do without.
"""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from replay_twins import WIDTH, Block, Wrapped, batch, blocks, same, twins

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")

POLICIES = ["cheap", "block"]
both_policies = pytest.mark.parametrize("policy", POLICIES)
both_devices = pytest.mark.parametrize("device", ["cpu", "sim"])


# Plain checkpointing.


@both_devices
@pytest.mark.parametrize(
    "policy", [{"0": "block"}, {"[01]": "block"}, {"2": "block"}, {"*": "block"}]
)
def test_any_segments_of_a_sequence(policy: dict[str, str], device: str) -> None:
    pair = twins(blocks(), policy, device)
    for _ in range(2):
        pair.assert_same_step(batch(device))
    assert pair.handle.stats().saves_dropped > 0


@both_policies
def test_no_module_runs_in_backward(policy: str) -> None:
    """Checkpointing calls each block twice; ops need no module to run again."""
    pair = twins(blocks(), policy)
    pair.assert_same_step(batch())
    assert [block.calls for block in pair.ours.children()] == [1, 1, 1]  # type: ignore[union-attr]


@both_policies
def test_input_without_gradient(policy: str) -> None:
    """Reentrant checkpointing trains nothing here, silently."""
    pair = twins(blocks(), policy)
    assert not batch().requires_grad
    pair.assert_same_step(batch())
    assert all(p.grad is not None for p in pair.ours.parameters())


@both_devices
@both_policies
def test_draws_between_forward_and_backward(policy: str, device: str) -> None:
    """The user's own random numbers neither disturb the masks nor are disturbed."""
    pair = twins(blocks(), policy, device)

    def step(model: nn.Module) -> list[torch.Tensor]:
        loss = model(batch(device)).sum()
        drawn = [torch.rand(3), torch.rand(3, device=device)]
        loss.backward()
        return [*drawn, torch.rand(3), torch.rand(3, device=device)]

    plain, ours = pair.both(step)
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    pair.assert_equal_gradients()


@both_policies
def test_inputs_and_outputs_of_any_kind(policy: str) -> None:
    Result = collections.namedtuple("Result", "out extra")

    def function(
        weight: torch.Tensor, x: dict[str, Any], flag: bool, *, scale: float, none: None
    ) -> Any:
        y = torch.sigmoid(x["deep"][0] @ weight) * scale
        return Result(y if flag else -y, [None, "text", 3, {"square": y * y}])

    pair = twins(Wrapped(function), policy)

    def step(model: nn.Module) -> Any:
        out = model({"deep": [batch()]}, True, scale=2.0, none=None)
        (out.out + out.extra[3]["square"]).sum().backward()
        return out

    plain, ours = pair.both(step)
    assert torch.equal(plain.out, ours.out)
    assert plain.extra[:3] == ours.extra[:3] == [None, "text", 3]
    pair.assert_equal_gradients()


@both_policies
def test_outputs_detached_unused_or_returned_untouched(policy: str) -> None:
    def function(weight: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.sin(x @ weight)
        return y, y.exp().detach(), x, y.cos(), y.view(-1)[::2]

    pair = twins(Wrapped(function), policy)

    def step(model: nn.Module) -> torch.Tensor:
        x = batch().requires_grad_()
        y, fixed, untouched, _, view = model(x)
        assert untouched is x
        assert not fixed.requires_grad
        ((y * fixed).sum() + untouched.square().sum() + view.exp().sum()).backward()
        assert x.grad is not None
        return x.grad

    plain, ours = pair.both(step)
    assert torch.equal(plain, ours)
    pair.assert_equal_gradients()


@both_policies
def test_parameter_used_inside_and_outside(policy: str) -> None:
    pair = twins(blocks(2), policy)
    fired: dict[int, list[str]] = {id(pair.plain): [], id(pair.ours): []}

    def step(model: nn.Module) -> torch.Tensor:
        weight = model[0].first.weight  # type: ignore[index]
        order = fired[id(model)]
        weight.register_hook(lambda g: order.append("tensor"))
        weight.register_post_accumulate_grad_hook(lambda p: order.append("sum"))
        loss = model(F.linear(batch(), weight)[:, :WIDTH]).sum() + weight.sin().sum()
        loss.backward()
        return torch.as_tensor(loss.detach())

    plain, ours = pair.both(step)
    assert torch.equal(plain, ours)
    pair.assert_equal_gradients()
    # Each hook once, as DDP needs.
    assert fired[id(pair.plain)] == fired[id(pair.ours)] == ["tensor", "sum"]


@both_devices
@both_policies
def test_two_graphs_share_their_beginning(policy: str, device: str) -> None:
    pair = twins(blocks(1), policy, device)

    def step(model: nn.Module) -> tuple[torch.Tensor, ...]:
        hidden = model(batch(device))
        first, second = hidden.exp().sum(), hidden.square().sum()
        weight = next(model.parameters())
        (early,) = torch.autograd.grad(first, weight, retain_graph=True)
        (late,) = torch.autograd.grad(second, weight)
        return early, late

    plain, ours = pair.both(step)
    assert same(plain[0], ours[0])
    assert same(plain[1], ours[1])


@both_policies
def test_backward_twice(policy: str) -> None:
    pair = twins(blocks(), policy)

    def step(model: nn.Module) -> str:
        loss = model(batch()).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time") as raised:
            loss.backward()
        return str(raised.value)

    plain, ours = pair.both(step)
    assert plain == ours
    pair.assert_equal_gradients()


@both_policies
def test_backward_to_chosen_inputs(policy: str) -> None:
    pair = twins(blocks(), policy)

    def step(model: nn.Module) -> None:
        loss = model(batch()).sum()
        loss.backward(inputs=list(model[1].parameters()))  # type: ignore[index]

    pair.both(step)
    pair.assert_equal_gradients()
    assert pair.ours[0].first.weight.grad is None  # type: ignore[index,union-attr]


@both_devices
@both_policies
def test_second_derivatives(policy: str, device: str) -> None:
    """A gradient penalty: backward builds a graph from what was replayed."""
    pair = twins(blocks(), policy, device)

    def step(model: nn.Module) -> torch.Tensor:
        x = batch(device).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (slope.norm() - 1).square().backward()
        return slope.detach()

    plain, ours = pair.both(step)
    assert torch.equal(plain, ours)
    pair.assert_equal_gradients()


# Nested checkpointing.


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, early_stop: bool) -> None:
        super().__init__()
        self.inner, self.outer = Block(), Block()
        self.reentrant, self.early_stop = reentrant, early_stop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def middle(value: torch.Tensor) -> Any:
            value = checkpoint(self.inner, value.sin(), use_reentrant=self.reentrant)
            return value.cos()

        with torch.utils.checkpoint.set_checkpoint_early_stop(self.early_stop):
            y = checkpoint(middle, self.outer(x), use_reentrant=self.reentrant)
        out: torch.Tensor = torch.tanh(y)
        return out


@both_policies
@pytest.mark.parametrize(
    ("reentrant", "early_stop"), [(False, True), (False, False), (True, True)]
)
def test_checkpoints_inside(policy: str, reentrant: bool, early_stop: bool) -> None:
    """torch's checkpoint within a layer, in a checkpoint."""
    pair = twins(Checkpointed(reentrant, early_stop), policy)
    for _ in range(2):
        pair.assert_same_step(batch())


@both_policies
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_outside(policy: str, reentrant: bool) -> None:
    """The whole attached model within a user's checkpoint."""
    pair = twins(blocks(), policy)

    def step(model: nn.Module) -> torch.Tensor:
        x = batch().requires_grad_()
        out = checkpoint(model, x, use_reentrant=reentrant)
        out = checkpoint_sequential(
            list(model.children()), 2, out, use_reentrant=reentrant
        )
        out.square().sum().backward()
        return torch.as_tensor(out.detach())

    plain, ours = pair.both(step)
    assert torch.equal(plain, ours)
    pair.assert_equal_gradients()


@both_policies
def test_gradient_taken_in_forward(policy: str) -> None:
    """A whole backward within forward, through ops of the layer itself."""

    def function(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        energy = torch.exp(x @ weight).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force * energy

    twins(Wrapped(function), policy).assert_same_step(batch() / 4)
