"""Random numbers: each op again from the state it had (design.md §4, hazard 5).

Replaying must draw the same numbers, and leave every generator as eager leaves it.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from replay_cases import (
    EVERYWHERE,
    ON_CPU,
    ON_SIM,
    ROWS,
    WIDTH,
    Block,
    Net,
    Where,
    around,
    around_module,
    assert_same,
    of_blocks,
)

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")

DROPOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda h: F.dropout(h, 0.3),
    "dropout_in_place": lambda h: F.dropout(h + 1, 0.3, inplace=True),
    "dropout_of_all": lambda h: h + F.dropout(h, 1.0),
    "dropout_of_none": lambda h: F.dropout(h, 0.0),
    "alpha_dropout": lambda h: F.alpha_dropout(h, 0.3, training=True),
    "dropout_of_channels": lambda h: F.dropout2d(h[None, :, :, None], 0.4)[0, :, :, 0],
    "alpha_dropout_of_channels": lambda h: F.feature_alpha_dropout(
        h[None, :, :, None], 0.4, training=True
    )[0, :, :, 0],
    "native_dropout": lambda h: torch.native_dropout(h, 0.3, True)[0],
    "two_in_a_row": lambda h: F.dropout(F.dropout(h, 0.2).sin(), 0.2).cos(),
    "rrelu": lambda h: F.rrelu(h, 0.1, 0.4, training=True),
    "rrelu_in_place": lambda h: F.rrelu(h + 0, 0.1, 0.4, training=True, inplace=True),
}


@EVERYWHERE
@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout(name: str, where: Where) -> None:
    assert_same(around(DROPOUTS[name]), where)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "bernoulli": lambda h: torch.bernoulli(h.detach().sigmoid()),
    "bernoulli_in_place": lambda h: torch.empty_like(h).bernoulli_(0.4),
    "bernoulli_of_a_tensor": lambda h: torch.empty_like(h).bernoulli_(h.sigmoid()),
    "normal": lambda h: torch.normal(h.detach(), 0.5),
    "normal_in_place": lambda h: h.detach().clone().normal_(1, 2),
    "rand_like": torch.rand_like,
    "randn": lambda h: torch.randn(h.shape, device=h.device),
    "randint": lambda h: torch.randint_like(h, 5),
    "permutation": lambda h: h.detach()[torch.randperm(ROWS, device=h.device)],
    "multinomial": lambda h: torch.multinomial(
        h.detach().softmax(1), WIDTH, replacement=True
    ).to(h.dtype),
    "uniform_of_one_half": lambda h: _half_uniform(h.detach().clone()),
    "exponential": lambda h: torch.empty_like(h).exponential_(0.5).clamp(max=2),
    "geometric": lambda h: torch.empty_like(h).geometric_(0.5),
    "cauchy": lambda h: torch.empty_like(h).cauchy_().clamp(-1, 1),
    "log_normal": lambda h: torch.empty_like(h).log_normal_().clamp(max=2),
    "random_in_place": lambda h: torch.empty_like(h).random_(0, 4),
    "poisson": lambda h: torch.poisson(h.detach().abs() * 3),
    "binomial": lambda h: torch.binomial(torch.full_like(h, 5), h.detach().sigmoid()),
}


def _half_uniform(values: Tensor) -> Tensor:
    values[:, ::2].uniform_()
    return values


@EVERYWHERE
@pytest.mark.parametrize("name", DRAWS)
def test_noise_is_drawn_again(name: str, where: Where) -> None:
    """Noise as a factor: the product saves it, and it has no gradient."""

    def hazard(h: Tensor) -> Tensor:
        noise = DRAWS[name](h)
        return (h * noise).sin() + noise

    assert_same(around(hazard), where)


@ON_CPU
@pytest.mark.parametrize("kind", ["gumbel", "gamma", "dirichlet", "normal", "beta"])
def test_sample_with_gradient(kind: str, where: Where) -> None:
    """Samples through which a gradient flows."""

    def hazard(h: Tensor) -> Tensor:
        positive = F.softplus(h) + 0.1
        if kind == "gumbel":
            return F.gumbel_softmax(h, tau=0.7, hard=True)
        if kind == "gamma":
            return torch.distributions.Gamma(positive, positive + 1).rsample()
        if kind == "dirichlet":
            return torch.distributions.Dirichlet(positive).rsample()
        if kind == "beta":
            return torch.distributions.Beta(positive, positive + 1).rsample()
        return torch.distributions.Normal(h, positive).rsample()

    assert_same(around(hazard), where)


class OwnGenerator(nn.Module):
    """Draws from a generator of its own; the default one must not be touched."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.generator = torch.Generator(device)
        self.generator.manual_seed(3)

    def forward(self, h: Tensor) -> Tensor:
        noise = torch.rand(h.shape, generator=self.generator, device=h.device)
        noise += torch.empty_like(h).normal_(generator=self.generator)
        return h * noise


@EVERYWHERE
def test_generator_as_an_argument(where: Where) -> None:
    assert_same(around_module(lambda: OwnGenerator(where.device)), where)


@EVERYWHERE
def test_generator_seeded_again_before_backward(where: Where) -> None:
    """The state that an op had is not the state that its generator has."""

    def seeded(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        torch.manual_seed(1234)
        for module in model.modules():
            if isinstance(module, OwnGenerator):
                module.generator.manual_seed(5)
        loss.backward()
        return loss

    build = around_module(lambda: OwnGenerator(where.device))
    assert_same(build, where, steps=[seeded] * 3)


@EVERYWHERE
def test_generator_that_lives_for_one_forward(where: Where) -> None:
    def hazard(h: Tensor) -> Tensor:
        generator = torch.Generator(where.device)
        generator.manual_seed(11)
        return h * torch.rand(h.shape, generator=generator, device=h.device)

    assert_same(around(hazard), where)


@EVERYWHERE
def test_draws_between_layers(where: Where) -> None:
    """Draws outside of any layer, of another size, in between, on the host."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(lambda: Block(lambda h: F.dropout(h, 0.3)))

        def forward(self, x: Tensor) -> Tensor:
            h = self.net.stem(x)
            for block in self.net.blocks:
                torch.rand(3)
                h = block(h) * torch.rand(1).to(h.device)
                torch.randn(17, device=h.device)
            return F.dropout(h, 0.5).square().mean()

    assert_same(Root, where)


@EVERYWHERE
def test_draws_between_forward_and_backward(where: Where) -> None:
    """And after it: the replay took nothing from the stream."""

    def drawing(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        scale = torch.rand(5).to(x.device).mean() + torch.rand(1, device=x.device)
        (loss * scale).sum().backward()
        return loss * torch.rand(1, device=x.device)

    build = around(lambda h: F.dropout(h, 0.3))
    assert_same(build, where, steps=[drawing] * 3)


@EVERYWHERE
def test_draws_during_backward(where: Where) -> None:
    """Gradient noise from a hook: the replay must not move its stream."""

    def hazard(h: Tensor) -> Tensor:
        out = F.dropout(h, 0.3).sin()
        out.register_hook(lambda gradient: gradient + torch.randn_like(gradient))
        return F.dropout(out, 0.3)

    assert_same(around(hazard), where)


@EVERYWHERE
def test_fork_rng_inside(where: Where) -> None:
    def hazard(h: Tensor) -> Tensor:
        with torch.random.fork_rng([0], device_type="sim"):
            torch.manual_seed(99)
            inner = F.dropout(h, 0.3)
        return F.dropout(inner.sin(), 0.3)

    assert_same(around(hazard), where)


@EVERYWHERE
def test_state_set_inside(where: Where) -> None:
    """The same numbers twice, on purpose."""

    def hazard(h: Tensor) -> Tensor:
        device = torch.get_device_module("sim") if where.device == "sim" else torch
        state = device.get_rng_state()
        first = F.dropout(h, 0.3).sin()
        device.set_rng_state(state)
        return first + F.dropout(h.cos(), 0.3).sin()

    assert_same(around(hazard), where)


@EVERYWHERE
def test_noise_used_by_several_ops(where: Where) -> None:
    """Drawn once; if it were drawn once per reader, they would disagree."""

    def hazard(h: Tensor) -> Tensor:
        noise = torch.rand_like(h)
        other = noise.sqrt()
        return (h * noise).sin() * other + noise * h + other

    assert_same(around(hazard), where)


@EVERYWHERE
def test_noise_changed_in_place(where: Where) -> None:
    """The draw overwrites what another op had drawn into the same bytes."""

    def hazard(h: Tensor) -> Tensor:
        noise = torch.empty_like(h).uniform_()
        first = (h + noise).sin()
        noise.normal_().mul_(0.5)
        return first * (h + noise).cos()

    assert_same(around(hazard), where)


@EVERYWHERE
def test_noise_read_in_python(where: Where) -> None:
    """Control flow from a draw, and a Python number as an argument."""

    def hazard(h: Tensor) -> Tensor:
        if random.Random(4).random() < torch.rand(()).item():
            return (h * 2).sin()
        return F.dropout(h, float(torch.rand(()).clamp(0.1, 0.8)))

    assert_same(around(hazard), where)


@EVERYWHERE
def test_attention_with_dropout(where: Where) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.2)
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            mixed, weights = self.attention(x, x, x, need_weights=True)
            fused = F.scaled_dot_product_attention(x[None], x[None], x[None], None, 0.2)
            out: Tensor = self.norm(x + mixed + fused[0] * weights.sum())
            return out

    assert_same(of_blocks(Attention), where)


@EVERYWHERE
def test_transformer_layer(where: Where) -> None:
    def build() -> nn.Module:
        return nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.3, batch_first=True)

    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(build() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            h = x[None]
            for layer in self.layers:
                h = layer(h)
            return h.square().mean()

    assert_same(Sequence, where)


@ON_SIM
def test_two_generators_in_one_layer(where: Where) -> None:
    """Noise of the host and of the device, in turn."""

    def hazard(h: Tensor) -> Tensor:
        host = torch.rand(h.shape).to(h.device)
        device = torch.rand(h.shape, device=h.device)
        return h * host * device * torch.rand(h.shape).to(h.device)

    assert_same(around(hazard), where)


@EVERYWHERE
def test_stochastic_depth(where: Where) -> None:
    """Which layers run differs from step to step."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(*[lambda: Block(lambda h: F.dropout(h, 0.3))] * 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.net.stem(x)
            for block in self.net.blocks:
                if torch.rand(()) < 0.6:
                    h = block(h)
            return h.square().mean()

    assert_same(Root, where)
