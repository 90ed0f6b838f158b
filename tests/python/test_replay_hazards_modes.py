"""Modes: what else decides what an op does (design.md §4, hazard 6).

Autocast, gradient and inference mode, defaults and flags of the moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
    Context,
    Where,
    around,
    around_module,
    assert_same,
    forward_under,
    of_blocks,
    step,
    step_under,
)

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")


class TestAutocast:
    """The leaf op is the one that autocast calls, with its arguments cast."""

    @EVERYWHERE
    @pytest.mark.parametrize("cache", [True, False])
    def test_around_the_model(self, cache: bool, where: Where) -> None:
        """With the cache, a weight's cast is one tensor for all its uses."""

        class Twice(Block):
            def forward(self, x: Tensor) -> Tensor:
                out: Tensor = super().forward(super().forward(x))
                return F.layer_norm(out, (WIDTH,))

        under = forward_under(
            lambda: torch.autocast(where.device, torch.bfloat16, cache_enabled=cache)
        )
        build = of_blocks(lambda: Twice(lambda h: F.dropout(h, 0.2).softmax(1)))
        assert_same(build, where, steps=[under] * 3)

    @EVERYWHERE
    def test_around_the_whole_step(self, where: Where) -> None:
        """Replaying must not be cast again by the mode that is still on."""
        under = step_under(lambda: torch.autocast(where.device, torch.bfloat16))
        build = around(lambda h: (h @ h.t()).exp() @ h.float())
        assert_same(build, where, steps=[under] * 3)

    @EVERYWHERE
    def test_inside_of_a_layer(self, where: Where) -> None:
        def hazard(h: Tensor) -> Tensor:
            with torch.autocast(where.device, torch.bfloat16):
                scores = (h @ h.t()).sin()
                with torch.autocast(where.device, enabled=False):
                    scores = scores.float() @ scores.float().cos()
                mixed = scores @ h
            return mixed.to(h.dtype) * 0.1

        assert_same(around(hazard), where)

    @EVERYWHERE
    def test_losses_of_the_float32_list(self, where: Where) -> None:
        def hazard(h: Tensor) -> Tensor:
            with torch.autocast(where.device, torch.bfloat16):
                low = h @ h.t()
                loss = F.cross_entropy(low, low.argmax(1)) + F.mse_loss(low, low.sin())
                return h * loss.pow(2) + low.log_softmax(1).sum()

        assert_same(around(hazard), where)


class TestGradMode:
    @EVERYWHERE
    def test_no_grad_inside(self, where: Where) -> None:
        def hazard(h: Tensor) -> Tensor:
            with torch.no_grad():
                scale = (h * 2).sin().exp()
                scale /= scale.sum(1, keepdim=True)
            return h * scale

        assert_same(around(hazard), where)

    @EVERYWHERE
    def test_enable_grad_inside_no_grad(self, where: Where) -> None:
        def hazard(h: Tensor) -> Tensor:
            with torch.no_grad():
                wave = (h * 2).sin()
                with torch.enable_grad():
                    return (h * wave).exp() * wave

        assert_same(around(hazard), where)

    @EVERYWHERE
    def test_gradient_taken_inside(self, where: Where) -> None:
        """A whole backward runs within the forward, then the layer goes on."""

        def hazard(h: Tensor) -> Tensor:
            with torch.enable_grad():
                leaf = h.detach().requires_grad_()
                energy = (leaf * 2).sin().exp().sum()
                (slope,) = torch.autograd.grad(energy, leaf)
            return h - 0.1 * (slope * h).tanh()

        assert_same(around(hazard), where)

    @ON_CPU
    def test_gradient_of_gradient_inside(self, where: Where) -> None:
        """An energy model: forward is a derivative, with a graph of its own.

        Not on sim: see ``test_derivative_of_higher_order``.
        """

        def hazard(h: Tensor) -> Tensor:
            energy = (h * 2).sin().exp().sum()
            (slope,) = torch.autograd.grad(energy, h, create_graph=True)
            return h - 0.1 * slope.tanh()

        assert_same(around(hazard), where)

    @EVERYWHERE
    def test_inference_tensors_as_inputs(self, where: Where) -> None:
        """They have no version to compare, and may not be saved by autograd."""

        class Root(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = around(torch.exp)()

            def forward(self, x: Tensor) -> Tensor:
                with torch.inference_mode():
                    features = (x * 2).sin()
                loss: Tensor = self.net(features.clone() + 1)
                return loss

        assert_same(Root, where)

    @EVERYWHERE
    def test_inference_tensor_as_the_batch(self, where: Where) -> None:
        class Root(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = around(torch.exp)()

            def forward(self, x: Tensor) -> Tensor:
                loss: Tensor = self.net((x + 1).sin())
                return loss

        def inferred(model: nn.Module, x: Tensor) -> Tensor:
            with torch.inference_mode():
                batch = x * 2
            return step(model, batch)

        assert_same(Root, where, steps=[inferred] * 3)

    @EVERYWHERE
    @pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
    def test_evaluation_between_steps(self, context: Context, where: Where) -> None:
        def evaluating(model: nn.Module, x: Tensor) -> Tensor:
            with context():
                before = model(x).item()
            return step(model, x) * before

        build = around(lambda h: F.dropout(h, 0.3))
        assert_same(build, where, steps=[evaluating] * 3)

    @ON_CPU
    @pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
    def test_recurrent_layer(self, kind: type[nn.RNNBase], where: Where) -> None:
        """Its workspace depends on whether a gradient is wanted."""

        class Recurrent(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.cells = kind(WIDTH, WIDTH, 2, dropout=0.2)  # type: ignore[arg-type]

            def forward(self, h: Tensor) -> Tensor:
                out: Tensor = self.cells(h[:, None])[0][:, 0]
                return out * 2

        assert_same(around_module(Recurrent), where)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class TestFlagsOfTheMoment:
    @EVERYWHERE
    @pytest.mark.parametrize(
        ("inside", "outside"),
        [(torch.float64, torch.float32), (torch.float16, torch.bfloat16)],
        ids=["of_another_size", "of_the_same_size"],
    )
    def test_default_dtype(
        self, inside: torch.dtype, outside: torch.dtype, where: Where
    ) -> None:
        """A factory that names no dtype gives another one in backward."""

        def hazard(h: Tensor) -> Tensor:
            with default_dtype(inside):
                ramp = torch.linspace(0, 1, WIDTH, device=h.device)
                exact = h * ramp * torch.full((WIDTH,), 1 / 3, device=h.device)
                exact = exact * torch.arange(0.5, 8, device=h.device)
            return exact.sin().to(h.dtype)

        under = step_under(lambda: default_dtype(outside))
        assert_same(around(hazard), where, steps=[under] * 3)

    @EVERYWHERE
    def test_default_device(self, where: Where) -> None:
        def hazard(h: Tensor) -> Tensor:
            with torch.device(where.device):
                return h * torch.linspace(0, 1, WIDTH) * torch.rand(ROWS, WIDTH)

        assert_same(around(hazard), where)

    @ON_CPU
    def test_backend_of_convolution(self, where: Where) -> None:
        """Another implementation sums in another order."""

        class Convolution(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv = nn.Conv1d(1, 4, 3, padding=1)

            def forward(self, h: Tensor) -> Tensor:
                with torch.backends.mkldnn.flags(enabled=False):
                    out: Tensor = self.conv(h[:, None])
                return (out * 2).sin().mean(1)

        assert_same(around_module(Convolution), where)

    @ON_CPU
    def test_backend_of_attention(self, where: Where) -> None:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def hazard(h: Tensor) -> Tensor:
            q = h.view(1, 1, ROWS, WIDTH)
            with sdpa_kernel(SDPBackend.MATH):
                by_math = F.scaled_dot_product_attention(q, q, q)
            return (by_math * 2).sin()[0, 0]

        assert_same(around(hazard), where)

    @EVERYWHERE
    def test_deterministic_algorithms(self, where: Where) -> None:
        """They fill what is uninitialised; on in forward, off in backward."""

        def hazard(h: Tensor) -> Tensor:
            torch.use_deterministic_algorithms(True)
            try:
                filled = torch.empty_like(h).nan_to_num(0.5)
            finally:
                torch.use_deterministic_algorithms(False)
            return (h * filled).sin()

        assert_same(around(hazard), where)
