"""Long lineages, threads, and what is left behind."""

from __future__ import annotations

import gc
import threading

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
    first_difference,
    of_blocks,
    step,
)

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")


def noisy(h: Tensor) -> Tensor:
    return F.dropout((h * 2).sin().mul_(2), 0.3).exp()


NOISY = around(noisy)


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
