"""Sharing: weights, layers and models that are used more than once, and borders."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memscale
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
    of_blocks,
)

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")


def noisy(h: Tensor) -> Tensor:
    return F.dropout((h * 2).sin().mul_(2), 0.3).exp()


NOISY = around(noisy)


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
            (second(first(x)) + second(x)).backward()
            for handle in handles:
                assert handle.stats().saves_dropped > 0
                handle.detach()
            both = [*first.parameters(), *second.parameters()]
            return [p.grad for p in both if p.grad is not None]

        plain, ours = run(False), run(True)
        assert len(plain) == len(ours) == 16
        assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))

    @ON_CPU
    def test_a_part_is_not_attached_twice(self, where: Where) -> None:
        """Two tapes of one op would both want its saves: refused, by either order."""
        model = NOISY()
        part = model.get_submodule("blocks.0")
        for first, second in ((model, part), (part, model)):
            handle = replay.attach(first, where.policy, min_bytes=0)
            with pytest.raises(memscale.PlanError, match="attached already"):
                replay.attach(second, where.policy, min_bytes=0)
            handle.detach()
        replay.attach(part, where.policy, min_bytes=0).detach()
