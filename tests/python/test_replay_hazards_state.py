"""State: what a forward changes besides its result (design.md §4, hazard 4).

Running statistics, power iterations, caches, counters: a replay computes again
without changing any of them again, and from what they were, not from what they are.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from replay_cases import (
    EVERYWHERE,
    ON_CPU,
    ROWS,
    WIDTH,
    Block,
    Net,
    Where,
    around_module,
    assert_same,
    of_blocks,
    step,
)

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")

NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch_norm": lambda: nn.BatchNorm1d(WIDTH),
    "batch_norm_cumulative": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
    "batch_norm_without_statistics": lambda: nn.BatchNorm1d(
        WIDTH, track_running_stats=False
    ),
    "batch_norm_plain": lambda: nn.BatchNorm1d(WIDTH, affine=False),
    "batch_norm_in_eval": lambda: nn.BatchNorm1d(WIDTH).eval(),
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "layer_norm_plain": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
    "group_norm": lambda: nn.GroupNorm(2, WIDTH, affine=False),
    "rms_norm": lambda: nn.RMSNorm(WIDTH),
}


@EVERYWHERE
@pytest.mark.parametrize("name", NORMS)
def test_norm(name: str, where: Where) -> None:
    """One step writes the statistics once, however often the op runs."""
    assert_same(around_module(NORMS[name]), where)


class Statistics(nn.Module):
    """Normalises over a signal of two channels."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = self.norm(h.view(ROWS, 2, 4)).reshape(ROWS, WIDTH)
        return out


@EVERYWHERE
@pytest.mark.parametrize("training", [True, False])
def test_instance_norm_with_statistics(training: bool, where: Where) -> None:
    """It writes them through a repeated copy, and back."""

    def norm() -> nn.Module:
        made = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
        return Statistics(made.train(training))

    assert_same(around_module(norm), where)


@EVERYWHERE
def test_batch_norm_over_several_forwards(where: Where) -> None:
    """Three forwards, then three backwards: statistics moved on in between."""

    def many(model: nn.Module, x: Tensor) -> Tensor:
        losses = [model(x * scale) for scale in (1, 2, 3)]
        for loss in losses:
            loss.backward()
        total: Tensor = torch.stack(losses).sum()
        return total

    assert_same(around_module(lambda: nn.BatchNorm1d(WIDTH)), where, steps=[many] * 3)


@EVERYWHERE
def test_batch_norm_used_twice_in_one_forward(where: Where) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, h: Tensor) -> Tensor:
            out: Tensor = self.norm(self.norm(h).relu() * 2)
            return out

    assert_same(around_module(Twice), where)


@EVERYWHERE
def test_statistics_written_after_they_were_read(where: Where) -> None:
    """Training writes them without a new version: eager does not notice, either."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, h: Tensor) -> Tensor:
            variance = self.norm.running_var
            assert variance is not None
            out = self.norm.eval()(h).sin() * (variance + 1).rsqrt()
            with torch.no_grad():
                self.norm.train()(h.clone())
            result: Tensor = out
            return result

    assert_same(around_module(Both), where)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


NORMED_WEIGHTS: dict[str, Callable[[], nn.Module]] = {
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(linear()),
    "spectral_norm_of_old": lambda: nn.utils.spectral_norm(linear()),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(linear()),
    "weight_norm_of_old": lambda: nn.utils.weight_norm(linear()),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(linear()),
}


@ON_CPU
@pytest.mark.parametrize("name", NORMED_WEIGHTS)
def test_weight_computed_in_forward(name: str, where: Where) -> None:
    """Power iteration writes its vectors in place in every forward."""
    assert_same(around_module(NORMED_WEIGHTS[name]), where)


class Embedding(nn.Module):
    """An embedding in each layer; the tokens come from the signs of the input."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH, **options)  # type: ignore[arg-type]
        self.mix = linear()

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x > 0).long().sum(1)
        found = self.embedding(tokens)
        out: Tensor = self.mix(F.silu((x * found).sin() * 3)) + x
        return out


@EVERYWHERE
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding_idx": 3},
        {"max_norm": 0.5},
        {"max_norm": 0.5, "scale_grad_by_freq": True},
    ],
    ids=str,
)
def test_embedding(options: dict[str, object], where: Where) -> None:
    """``max_norm`` rewrites rows of the weight in each forward."""

    def embedding() -> nn.Module:
        return Embedding(**options)

    # A block whose weight is written in place has nothing to start from.
    build = of_blocks(embedding, lambda: Block(torch.exp), embedding)
    assert_same(build, where)


@ON_CPU
def test_embedding_with_sparse_gradient(where: Where) -> None:
    assert_same(of_blocks(lambda: Embedding(sparse=True)), where)


@ON_CPU
def test_embedding_bag(where: Where) -> None:
    """Four results, three of them for its backward only."""

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(16, WIDTH, mode="max")

        def forward(self, h: Tensor) -> Tensor:
            found: Tensor = self.bag((h.detach().abs() * 9).long().clamp(max=15))
            return h * found

    assert_same(around_module(Bag), where)


class Rope(nn.Module):
    """Tables made by the first forward and kept as plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, h: Tensor) -> Tensor:
        if self.table is None:
            angles = torch.arange(ROWS, device=h.device)[:, None] * 0.3
            self.table = angles.cos().expand(ROWS, WIDTH)
        return h * self.table


@EVERYWHERE
def test_table_made_in_the_first_forward(where: Where) -> None:
    """In later steps it is nobody's result."""
    assert_same(around_module(Rope), where)


@EVERYWHERE
def test_table_with_a_gradient_from_an_earlier_layer(where: Where) -> None:
    """A tensor handed over beside the layers' arguments."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(lambda: Block(self.scaled))
            self.scale = nn.Parameter(torch.rand(WIDTH))
            self.made: Tensor

        def scaled(self, h: Tensor) -> Tensor:
            return (h * self.made).sin()

        def forward(self, x: Tensor) -> Tensor:
            self.made = self.scale.exp() * 2
            loss: Tensor = self.net(x)
            return loss

    assert_same(Shared, where)


class KeyValueCache(nn.Module):
    """Appends to a cache in place; later forwards read what earlier ones wrote."""

    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, ROWS, WIDTH))
        self.used = 0

    def forward(self, h: Tensor) -> Tensor:
        read = self.cache[: self.used + 1]
        scale = (read.sum(0) * 2).sin()
        with torch.no_grad():
            self.cache[self.used % 4].copy_(h)
        self.used = (self.used + 1) % 4
        return h * scale + self.cache.mean(0)


@EVERYWHERE
def test_cache_written_in_place(where: Where) -> None:
    assert_same(around_module(KeyValueCache), where)


@EVERYWHERE
def test_cache_replaced_in_each_forward(where: Where) -> None:
    """The attribute of the last forward is detached and used in the next."""

    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last: Tensor | None = None

        def forward(self, h: Tensor) -> Tensor:
            before = self.last if self.last is not None else torch.zeros_like(h)
            self.last = (h * 2).tanh().detach()
            return h * before + (before * 2).sin()

    assert_same(around_module(Remembering), where)


@EVERYWHERE
def test_state_carried_from_step_to_step(where: Where) -> None:
    """Truncated backpropagation through time."""

    class Carrying(nn.Module):
        state: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.net = Net(lambda: Block(torch.tanh))
            self.register_buffer("state", torch.zeros(ROWS, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            h = self.net.stem(x + self.state.detach())
            for block in self.net.blocks:
                h = block(h).tanh()
            self.state = h
            return h.square().mean()

    def untied(model: nn.Module, x: Tensor) -> Tensor:
        loss = step(model, x)
        assert isinstance(model, Carrying)
        model.state = model.state.detach()
        return loss

    assert_same(Carrying, where, steps=[untied] * 4)


@ON_CPU
def test_observer_of_quantisation(where: Where) -> None:
    """Fake quantisation with moving averages: a fused op that writes five tensors."""

    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("low", "high"):
                self.register_buffer(name, torch.tensor([0.0]))
            self.register_buffer("scale", torch.tensor([1.0]))
            self.register_buffer("zero", torch.tensor([0], dtype=torch.int32))
            self.register_buffer("on", torch.tensor([1], dtype=torch.int64))

        def forward(self, h: Tensor) -> Tensor:
            b = dict(self.named_buffers())
            out: Tensor = torch.fused_moving_avg_obs_fake_quant(
                h, b["on"], b["on"], b["low"], b["high"], b["scale"], b["zero"],
                0.1, 0, 255, 0, False, False,
            )  # fmt: skip
            return (out * 2).sin()

    assert_same(around_module(Quantised), where)


@EVERYWHERE
def test_convolutions_with_statistics(where: Where) -> None:
    """The shape of a residual network: ``conv; norm; out += x; relu_``."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
            self.norm = nn.BatchNorm2d(4)
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            out = self.norm(self.conv(x))
            out += x
            result: Tensor = self.relu(out)
            return result

    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(Residual(), Residual(), Residual())

        def forward(self, x: Tensor) -> Tensor:
            out = self.blocks(x)
            return F.max_pool2d(out, 2).square().mean()

    assert_same(Images, where, batch=lambda: torch.randn(2, 4, 6, 6))
