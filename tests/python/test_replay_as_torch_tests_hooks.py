"""What torch's tests ask of saved-tensor hooks, asked of replay, which uses them.

A user may have hooks too, and may read what a node saved; both must see what they
would see without replay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import (
    allow_mutation_on_saved_tensors,
    disable_saved_tensors_hooks,
    save_on_cpu,
    saved_tensors_hooks,
)

from replay_twins import Wrapped, batch, blocks, twins

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")

both_policies = pytest.mark.parametrize("policy", ["cheap", "block"])
both_devices = pytest.mark.parametrize("device", ["cpu", "sim"])


def default_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


# Hooks of the user's.


class Seen:
    """Hooks that count, and double what they give back when asked to."""

    def __init__(self, double: bool = False) -> None:
        self.packed: list[torch.Tensor] = []
        self.unpacked = 0
        self.double = double

    def hooks(self) -> contextlib.AbstractContextManager[Any]:
        def pack(x: torch.Tensor) -> torch.Tensor:
            self.packed.append(x.detach().cpu().clone())
            return x.detach().clone()

        def unpack(x: torch.Tensor) -> torch.Tensor:
            self.unpacked += 1
            return 2 * x if self.double else x

        return saved_tensors_hooks(pack, unpack)

    def assert_saw_the_same(self, other: Seen) -> None:
        assert len(self.packed) == len(other.packed) > 0
        assert all(map(torch.equal, self.packed, other.packed))
        assert self.unpacked == other.unpacked > 0


@both_devices
@both_policies
@pytest.mark.parametrize("double", [False, True])
def test_hooks_around_the_call(policy: str, device: str, double: bool) -> None:
    """Replay steps aside: the user's hooks get all they would get."""
    pair = twins(blocks(), policy, device)
    seen = {id(m): Seen(double) for m in (pair.plain, pair.ours)}

    def step(model: nn.Module) -> None:
        with seen[id(model)].hooks():
            loss = model(batch(device)).sum()
        loss.backward()

    pair.both(step)
    pair.assert_equal_gradients()
    seen[id(pair.plain)].assert_saw_the_same(seen[id(pair.ours)])
    assert pair.handle.stats().saves_dropped == 0
    pair.assert_same_step(batch(device))
    assert pair.handle.stats().saves_dropped > 0


@both_policies
@pytest.mark.parametrize("double", [False, True])
def test_hooks_within_a_layer(policy: str, double: bool) -> None:
    """Innermost hooks win, and only while they are on."""
    seen = [Seen(double), Seen(double)]
    turn = iter([*seen, *seen])

    def function(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = torch.exp(x @ weight)
        with next(turn).hooks():
            y = torch.sin(y).exp()
        return torch.tanh(y)

    twins(Wrapped(function), policy).assert_same_step(batch())
    seen[0].assert_saw_the_same(seen[1])


@both_policies
@pytest.mark.parametrize("inside", [False, True])
def test_save_on_cpu(policy: str, inside: bool) -> None:
    def function(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with save_on_cpu() if inside else contextlib.nullcontext():
            y = torch.sigmoid(x @ weight)
            y = y * y.sin()
        return y.exp()

    pair = twins(Wrapped(function), policy)

    def step(model: nn.Module) -> None:
        with contextlib.nullcontext() if inside else save_on_cpu():
            loss = model(batch()).sum()
        loss.backward()

    pair.both(step)
    pair.assert_equal_gradients()


def test_mutation_of_saved_tensors_when_allowed() -> None:
    def function(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = torch.exp(x @ weight)
        z = y.sin()
        return y.mul_(2) + z

    pair = twins(Wrapped(function), "block")

    def step(model: nn.Module) -> None:
        with allow_mutation_on_saved_tensors():
            model(batch()).sum().backward()

    pair.both(step)
    pair.assert_equal_gradients()


@both_policies
def test_hooks_around_backward(policy: str) -> None:
    """Hooks that are on in backward concern the graph that backward makes."""
    pair = twins(blocks(p=0.0), policy)
    seen = {id(m): Seen() for m in (pair.plain, pair.ours)}

    def step(model: nn.Module) -> None:
        x = batch().requires_grad_()
        out = model(x).sum()
        with seen[id(model)].hooks():
            (slope,) = torch.autograd.grad(out, x, create_graph=True)
        slope.square().sum().backward()

    pair.both(step)
    pair.assert_equal_gradients()
    seen[id(pair.plain)].assert_saw_the_same(seen[id(pair.ours)])


@both_policies
def test_hooks_that_are_forbidden(policy: str) -> None:
    """Where torch lets no hooks be set, the model still runs."""
    pair = twins(blocks(), policy)

    def step(model: nn.Module) -> None:
        with disable_saved_tensors_hooks("not here"):
            loss = model(batch()).sum()
        loss.backward()

    pair.both(step)
    pair.assert_equal_gradients()


def test_a_pack_hook_that_fails() -> None:
    pair = twins(blocks(), "block")

    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError("pack")

    with (
        pytest.raises(ArithmeticError),
        saved_tensors_hooks(fail, lambda x: x),
    ):
        pair.ours(batch())
    assert default_hooks() is None
    pair.assert_same_step(batch())


@both_policies
def test_no_hooks_stay_behind(policy: str) -> None:
    pair = twins(blocks(), policy)
    with pytest.raises(RuntimeError):
        pair.ours(batch()[:, :3])
    assert default_hooks() is None
    loss = pair.ours(batch()).sum()
    assert default_hooks() is None
    loss.backward()
    assert default_hooks() is None
    with save_on_cpu():
        mine = default_hooks()
        pair.ours(batch())
        assert default_hooks() == mine


# What nodes saved.


def saved(node: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every saved tensor of the graph, with its place."""
    todo, seen = [(node, "")], set()
    while todo:
        node, path = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        path = f"{path}/{node.name()}"
        for name in dir(node):
            if name.startswith("_saved_"):
                value = getattr(node, name)
                if isinstance(value, torch.Tensor):
                    yield f"{path}.{name}", value
        todo += [(parent, path) for parent, _ in node.next_functions]


@both_devices
@both_policies
def test_saved_tensors_can_be_read(policy: str, device: str) -> None:
    """As often as one likes before backward; then torch's own error."""
    pair = twins(blocks(2), policy, device)

    def step(model: nn.Module) -> tuple[list[tuple[str, torch.Tensor]], str]:
        out = model(batch(device))
        once = [(n, t.detach().cpu()) for n, t in saved(out.grad_fn)]
        again = list(saved(out.grad_fn))
        assert all(
            torch.equal(a, b.cpu()) for (_, a), (_, b) in zip(once, again, strict=True)
        )
        out.sum().backward()
        with pytest.raises(RuntimeError, match="already been freed") as raised:
            list(saved(out.grad_fn))
        return once, str(raised.value)

    (plain, plain_error), (ours, our_error) = pair.both(step)
    assert [name for name, _ in plain] == [name for name, _ in ours]
    assert len(plain) > 10
    for (name, a), (_, b) in zip(plain, ours, strict=True):
        assert torch.equal(a, b), name
    assert plain_error == our_error
    pair.assert_equal_gradients()


def test_the_graph_is_torchs_own() -> None:
    """The same nodes in the same places: what hooks and DDP rely on."""
    pair = twins(blocks(), "block")

    def names(model: nn.Module) -> list[str]:
        todo, found = [model(batch()).grad_fn], []
        while todo:
            node = todo.pop()
            if node is not None:
                found.append(node.name())
                todo += [parent for parent, _ in node.next_functions]
        return found

    plain, ours = pair.both(names)
    assert plain == ours


def test_hooks_of_nodes_and_retained_gradients() -> None:
    def step(model: nn.Module) -> list[torch.Tensor]:
        hidden: list[torch.Tensor] = []

        def retain(_: nn.Module, __: object, out: torch.Tensor) -> None:
            out.retain_grad()
            hidden.append(out)

        handle = model[1].register_forward_hook(retain)  # type: ignore[index]
        out = model(batch())
        assert out.grad_fn is not None
        caught: list[torch.Tensor] = []
        out.grad_fn.register_prehook(lambda g: caught.append(g[0]))
        out.grad_fn.register_hook(lambda g, _: caught.append(g[0]))
        out.sum().backward()
        handle.remove()
        assert hidden[0].grad is not None
        return [*caught, hidden[0].grad]

    plain, ours = twins(blocks(), "block").both(step)
    assert len(plain) == len(ours) == 3
    assert all(map(torch.equal, plain, ours))


def test_anomaly_mode() -> None:
    pair = twins(blocks(), "block")
    with torch.autograd.detect_anomaly(check_nan=True):
        pair.assert_same_step(batch())


def test_a_graph_outlives_detaching() -> None:
    pair = twins(blocks(), "block")

    def step(model: nn.Module) -> None:
        loss = model(batch()).sum()
        pair.handle.detach()
        loss.backward()

    pair.both(step)
    pair.assert_equal_gradients()


@both_policies
def test_a_step_of_the_optimizer_before_backward(policy: str) -> None:
    """Weights that changed since forward: torch's error, never a wrong gradient."""
    pair = twins(blocks(), policy)

    def step(model: nn.Module) -> str:
        loss = model(batch()).sum()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace") as raised:
            loss.backward()
        return str(raised.value).split("[")[0]

    plain, ours = pair.both(step)
    assert plain == ours
