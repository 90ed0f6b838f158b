"""Steps: in how many ways a graph is built, walked, left and walked again."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memscale import replay
from replay_cases import (
    EVERYWHERE,
    ON_CPU,
    ON_SIM,
    ROWS,
    WIDTH,
    Block,
    Net,
    Run,
    Where,
    around,
    assert_same,
    assert_same_error,
    first_difference,
    of_blocks,
    rows_with_grad,
    step,
    train,
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


class TestPolicies:
    """Layers of different policies, with lineages across their borders."""

    @pytest.mark.parametrize("device", ["cpu", "sim"])
    @pytest.mark.parametrize(
        ("policies", "drops"),
        [
            ({"": "block"}, False),
            ({"blocks.0": "block", "blocks.2": "cheap"}, False),
            ({"blocks.1": "cheap"}, True),
            ({"blocks.[01]": "cheap", "blocks.[23]": "block"}, True),
            ({"stem": "keep", "blocks.*": "block", "head": "cheap"}, True),
        ],
        ids=str,
    )
    def test_mixed(self, policies: dict[str, str], drops: bool, device: str) -> None:
        class Crossing(nn.Module):
            """Changes what the layer before it made, in place."""

            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(WIDTH, WIDTH)

            def forward(self, x: Tensor) -> Tensor:
                wave = (x * 2).sin()
                x.mul_(0.5)
                out: Tensor = self.inner(noisy(wave)) + x.cos()
                return out + 1

        def plain() -> nn.Module:
            return Block(noisy)

        build = of_blocks(Crossing, plain, Crossing, plain)
        assert_same(build, Where(policies, device), drops=drops)


class TestSharing:
    @EVERYWHERE
    def test_tied_weights(self, where: Where) -> None:
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embedding = nn.Embedding(16, WIDTH)
                self.blocks = nn.ModuleList(Block(noisy) for _ in range(2))
                self.head = nn.Linear(WIDTH, 16, bias=False)
                self.head.weight = self.embedding.weight

            def forward(self, x: Tensor) -> Tensor:
                tokens = (x.abs() * 5).long().clamp(max=15)
                h = self.embedding(tokens).mean(1)
                for block in self.blocks:
                    h = block(h)
                return F.cross_entropy(self.head(h), tokens[:, 0])

        assert_same(Tied, where)

    @EVERYWHERE
    def test_one_layer_called_twice(self, where: Where) -> None:
        class Shared(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                block = Block(noisy)
                self.blocks = nn.ModuleList([block, Block(noisy), block])

            def forward(self, x: Tensor) -> Tensor:
                h = self.blocks[0](x)
                for block in self.blocks:
                    h = block(h.tanh())
                result: Tensor = h.square().mean()
                return result

        assert_same(Shared, where)

    @EVERYWHERE
    def test_a_layer_that_calls_itself(self, where: Where) -> None:
        class Recursive(Block):
            def forward(self, x: Tensor, depth: int = 3) -> Tensor:
                out = super().forward(x).tanh()
                return self(out, depth - 1) if depth else out

        assert_same(of_blocks(lambda: Recursive(noisy)), where)

    @EVERYWHERE
    def test_adapters_on_a_frozen_base(self, where: Where) -> None:
        """No input of the first block has a gradient; frozen weights have none."""

        class Adapted(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
                self.down = nn.Linear(WIDTH, 2, bias=False)
                self.up = nn.Linear(2, WIDTH, bias=False)

            def forward(self, x: Tensor) -> Tensor:
                low = self.down(F.dropout(x.sin(), 0.2))
                out: Tensor = self.base(x).tanh() + self.up(low) * 0.5
                return out

        def build() -> nn.Module:
            net = Net(Adapted)
            for module in (net.stem, net.head):
                module.requires_grad_(False)
            return net

        assert_same(build, where)

    @EVERYWHERE
    def test_a_frozen_teacher(self, where: Where) -> None:
        """A model inside the model, without gradient, of the same layers."""

        class Distilled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.teacher = NOISY().requires_grad_(False)
                self.student = NOISY()

            def forward(self, x: Tensor) -> Tensor:
                target = self.teacher(x)
                result: Tensor = (self.student(x) - target).square() * target.exp()
                return result

        assert_same(Distilled, where)

    @ON_CPU
    def test_two_attached_models_in_one_step(self, where: Where) -> None:
        """Generator and critic: a graph through both."""

        def run(attached: bool) -> list[Tensor]:
            torch.manual_seed(0)
            first, second = Block(noisy), NOISY()
            handles = [
                replay.attach(m, where.policy, min_bytes=0)
                for m in (first, second)
                if attached
            ]
            x = torch.randn(ROWS, WIDTH)
            run_backward(second(first(x)) + second(x))
            for handle in handles:
                assert handle.stats().saves_dropped > 0
                handle.detach()
            both = [*first.parameters(), *second.parameters()]
            return [p.grad for p in both if p.grad is not None]

        plain, ours = run(False), run(True)
        assert len(plain) == len(ours) == 16
        assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))

    @ON_CPU
    def test_an_attached_model_inside_another(self, where: Where) -> None:
        """The inner one has a handle of its own."""

        class Outer(nn.Module):
            def __init__(self, attached: bool) -> None:
                super().__init__()
                self.net = NOISY()
                self.extra = nn.Linear(WIDTH, WIDTH)
                if attached:
                    self.handle = replay.attach(self.net, where.policy, min_bytes=0)

            def forward(self, x: Tensor) -> Tensor:
                result: Tensor = self.net(self.extra(x.sin()).tanh())
                return result

        plain = train(lambda: Outer(False), where, attached=False)
        ours = train(lambda: Outer(True), where, attached=True)
        assert plain.errors == [None] * 3
        assert first_difference(plain, ours) is None


@ON_CPU
@pytest.mark.parametrize("length", [20_000])
def test_deep_chain_of_ops(length: int, where: Where) -> None:
    """Lineage is a chain here; to follow it by recursion would end the process."""

    def hazard(h: Tensor) -> Tensor:
        for _ in range(length):
            h = h * 0.9999
        return h.sin()

    build = of_blocks(lambda: Block(hazard))
    assert_same(build, where, steps=[step])


@ON_CPU
def test_deep_chain_of_saves(where: Where) -> None:
    """Every op of it saves: none may cost all the ones before it."""

    def hazard(h: Tensor) -> Tensor:
        for _ in range(2_000):
            h = h.sin() + 0.1
        return h

    assert_same(around(hazard), where, steps=[step])


@ON_CPU
def test_deep_chain_in_place(where: Where) -> None:
    def hazard(h: Tensor) -> Tensor:
        for _ in range(2_000):
            h = h.mul_(0.999)
        return h.sin()

    assert_same(around(hazard), where, steps=[step])


class TestThreads:
    @EVERYWHERE
    def test_two_models_at_once(self, where: Where) -> None:
        """Their random states are one stream: so no dropout here."""

        def build() -> nn.Module:
            return Net(lambda: Block(lambda h: (h * 2).sin().mul_(2).exp()))

        torch.manual_seed(0)
        models = [build().to(where.device) for _ in range(2)]
        batches = [torch.randn(ROWS, WIDTH).to(where.device) for _ in models]
        plain = [gradients_after(m, x) for m, x in zip(models, batches, strict=True)]
        handles = [replay.attach(m, where.policy, min_bytes=0) for m in models]
        found: list[list[Tensor]] = [[], []]
        start = threading.Barrier(2)

        def work(i: int) -> None:
            start.wait()
            for _ in range(20):
                found[i] = gradients_after(models[i], batches[i])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for handle in handles:
            assert handle.stats().ops_replayed > 0
            handle.detach()
        for a, b in zip(plain, found, strict=True):
            assert len(a) == len(b)
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    @EVERYWHERE
    def test_backward_in_another_thread(self, where: Where) -> None:
        def elsewhere(model: nn.Module, x: Tensor) -> Tensor:
            loss: Tensor = model(x)
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
            return loss

        assert_same(NOISY, where, steps=[elsewhere] * 3)


def gradients_after(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    step(model, x)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


class TestNothingIsLeft:
    @ON_SIM
    def test_graph_thrown_away(self, where: Where) -> None:
        """Forwards without backward: all bytes come back."""
        model = NOISY().to("sim")
        x = torch.randn(ROWS, WIDTH).to("sim")
        before = torch.accelerator.memory_allocated()
        handle = replay.attach(model, where.policy, min_bytes=0)
        for _ in range(3):
            loss = model(x)
            del loss
            gc.collect()
            assert torch.accelerator.memory_allocated() == before
        handle.detach()

    @ON_SIM
    def test_after_detach(self, where: Where) -> None:
        """A graph made while attached is walked after the handle is gone."""
        runs = []
        for attached in (False, True):
            torch.manual_seed(0)
            model = NOISY().to("sim")
            x = torch.randn(ROWS, WIDTH).to("sim")
            handle = None
            if attached:
                handle = replay.attach(model, where.policy, min_bytes=0)
            loss = model(x)
            if handle is not None:
                handle.detach()
            loss.backward()
            gradients = {n: p.grad for n, p in model.named_parameters()}
            runs.append(Run([gradients], [None]))
        difference = first_difference(*runs)
        assert difference is None, difference
