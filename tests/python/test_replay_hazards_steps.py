"""Steps: in how many ways a graph is built, walked, left and walked again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memscale import replay
from replay_cases import (
    EVERYWHERE,
    ON_CPU,
    ROWS,
    WIDTH,
    Block,
    Net,
    Where,
    around,
    assert_same,
    assert_same_error,
    rows_with_grad,
    step,
)

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")


def noisy(h: Tensor) -> Tensor:
    return F.dropout((h * 2).sin().mul_(2), 0.3).exp()


NOISY = around(noisy)


def run_backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss


def twice_through_one_graph(model: nn.Module, x: Tensor) -> Tensor:
    """What the first walk let go, the second computes again."""
    loss: Tensor = model(x)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def penalty_outside(model: nn.Module, x: Tensor) -> Tensor:
    """The gradient's own gradient: saved tensors are differentiated through."""
    x.requires_grad_()
    loss: Tensor = model(x)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return run_backward(loss + slope.square().sum())


def penalty_of_parameters(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x)
    slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return run_backward(loss + sum(s.square().sum() for s in slopes))


def third_derivative(model: nn.Module, x: Tensor) -> Tensor:
    x.requires_grad_()
    loss: Tensor = model(x)
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    return run_backward(loss + second.square().sum())


def two_forwards_one_backward(model: nn.Module, x: Tensor) -> Tensor:
    return run_backward(model(x) + model(x * 2) * model(x - 1))


def backwards_in_order(model: nn.Module, x: Tensor) -> Tensor:
    first, second = model(x), model(x * 2)
    first.backward()
    second.backward()
    result: Tensor = first + second
    return result


def backwards_in_reverse(model: nn.Module, x: Tensor) -> Tensor:
    first, second = model(x), model(x * 2)
    second.backward()
    first.backward()
    result: Tensor = first + second
    return result


def one_forward_left_behind(model: nn.Module, x: Tensor) -> Tensor:
    model(x * 2)
    kept = model(x * 3)
    loss = step(model, x)
    del kept
    return loss


def accumulated(model: nn.Module, x: Tensor) -> Tensor:
    losses = [run_backward(model(part) / 3) for part in x.split(2)]
    return torch.stack(losses).sum()


def only_some_parameters(model: nn.Module, x: Tensor) -> Tensor:
    """Saves of the layers below are never asked for."""
    assert isinstance(model, Net)
    loss: Tensor = model(x)
    loss.backward(inputs=list(model.head.parameters()))
    return loss


def with_an_interrupted_walk(model: nn.Module, x: Tensor) -> Tensor:
    """First the head alone, then everything."""
    assert isinstance(model, Net)
    loss: Tensor = model(x)
    torch.autograd.grad(loss, list(model.head.parameters()), retain_graph=True)
    return run_backward(loss)


def from_a_seed(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x)
    loss.backward(torch.tensor(0.37).to(x.device))
    return loss


def scaled_and_clipped(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x)
    (loss * 1024).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return loss


@EVERYWHERE
@pytest.mark.parametrize(
    "walk",
    [
        twice_through_one_graph,
        two_forwards_one_backward,
        backwards_in_order,
        backwards_in_reverse,
        one_forward_left_behind,
        accumulated,
        only_some_parameters,
        with_an_interrupted_walk,
        from_a_seed,
        scaled_and_clipped,
    ],
)
def test_walk(walk: Callable[[nn.Module, Tensor], Tensor], where: Where) -> None:
    drops = walk is not only_some_parameters
    assert_same(NOISY, where, steps=[walk] * 3, drops=drops)


@ON_CPU
@pytest.mark.parametrize(
    "walk", [penalty_outside, penalty_of_parameters, third_derivative]
)
def test_derivative_of_higher_order(
    walk: Callable[[nn.Module, Tensor], Tensor], where: Where
) -> None:
    """Not on sim: there eager itself sums in an order that depends on the past.

    Its backward runs on a thread whose nodes have sequence numbers of their own.
    """
    assert_same(NOISY, where, steps=[walk] * 3)


@EVERYWHERE
def test_batch_with_a_gradient(where: Where) -> None:
    assert_same(NOISY, where, batch=rows_with_grad)


@ON_CPU
def test_penalty_inside_the_model(where: Where) -> None:
    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = NOISY()

        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            loss = self.net(x)
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            result: Tensor = loss + slope.square().sum()
            return result

    assert_same(Penalised, where)


@EVERYWHERE
def test_walking_a_freed_graph(where: Where) -> None:
    """Eager says "a second time"; a replay must not make it possible."""

    def again(model: nn.Module, x: Tensor) -> Tensor:
        loss = step(model, x)
        loss.backward()
        return loss

    assert_same_error(NOISY, where, again, says="backward through the graph a second")


@EVERYWHERE
def test_part_of_the_outputs(where: Where) -> None:
    """A model with two heads, and now the one, now the other, now both."""

    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(lambda: Block(noisy))
            self.other = nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = self.net.blocks[0](self.net.stem(x))
            left = self.net.head(self.net.blocks[1](h)).tanh().mean()
            return {"left": left, "right": self.other(h).sigmoid().mean()}

    def taking(*names: str) -> Callable[[nn.Module, Tensor], Tensor]:
        def take(model: nn.Module, x: Tensor) -> Tensor:
            outputs = model(x)
            return run_backward(torch.stack([outputs[n] for n in names]).sum())

        return take

    steps = [taking("left"), taking("right"), taking("left", "right")]
    assert_same(TwoHeads, where, steps=steps)


class Stop(RuntimeError):
    """What a broken forward raises in these tests."""


@EVERYWHERE
def test_exception_in_forward(where: Where) -> None:
    """In the middle of a layer, after saves were dropped and hooks were pushed."""
    broken = [False]

    def sometimes(h: Tensor) -> Tensor:
        out = noisy(h)
        if broken[0]:
            raise Stop("in forward")
        return out

    def breaking(model: nn.Module, x: Tensor) -> Tensor:
        broken[0] = True
        try:
            return step(model, x)
        finally:
            broken[0] = False

    assert_same_error(around(sometimes), where, breaking, says="in forward")


class Interrupt(BaseException):
    """Not an error, as a key pressed by the user is none."""


@EVERYWHERE
def test_interrupt_in_forward(where: Where) -> None:
    def interrupt(h: Tensor) -> Tensor:
        raise Interrupt

    def interrupted(model: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(model, Net)
        block = model.blocks[1]
        assert isinstance(block, Block)
        block.hazard = interrupt
        with pytest.raises(Interrupt):
            model(x)
        block.hazard = noisy
        return step(model, x)

    assert_same(NOISY, where, steps=[interrupted, step, interrupted])


@EVERYWHERE
def test_another_model_after_an_interrupt(where: Where) -> None:
    """The interrupted one is never called again: a new one takes its place."""

    def interrupt(h: Tensor) -> Tensor:
        raise Interrupt

    model = around(interrupt)().to(where.device)
    handle = replay.attach(model, where.policy, min_bytes=0)
    with pytest.raises(Interrupt):
        model(torch.randn(ROWS, WIDTH).to(where.device))
    assert_same(NOISY, where)
    handle.detach()
    assert_same(NOISY, where)


@EVERYWHERE
def test_exception_handled_by_the_model(where: Where) -> None:
    """The layer failed half way; the root goes on without it."""

    class Failing(Block):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise Stop("handled")

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(lambda: Block(noisy))
            self.extra = nn.ModuleList([Failing(noisy)])

        def forward(self, x: Tensor) -> Tensor:
            h = self.net.stem(x)
            try:
                h = self.extra[0](h)
            except Stop:
                h = h.sin()
            result: Tensor = self.net.blocks[0](h).exp().mean()
            return result

    assert_same(Root, where)


@EVERYWHERE
def test_exception_in_backward(where: Where) -> None:
    def breaking(model: nn.Module, x: Tensor) -> Tensor:
        def stop(gradient: Tensor) -> Tensor:
            raise Stop("in backward")

        assert isinstance(model, Net)
        hook = model.stem.weight.register_hook(stop)
        try:
            return step(model, x)
        finally:
            hook.remove()

    assert_same_error(NOISY, where, breaking, says="in backward")


@EVERYWHERE
def test_optimizer_in_backward(where: Where) -> None:
    """Each parameter is stepped as soon as its gradient is there."""

    def fused(model: nn.Module, x: Tensor) -> Tensor:
        def descend(parameter: Tensor) -> None:
            assert parameter.grad is not None
            with torch.no_grad():
                parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None

        hooks = [
            p.register_post_accumulate_grad_hook(descend) for p in model.parameters()
        ]
        try:
            return step(model, x)
        finally:
            for hook in hooks:
                hook.remove()

    assert_same(NOISY, where, steps=[fused] * 3)
