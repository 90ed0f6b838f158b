"""Modes: what else decides what an op does (design.md §4, hazard 6).

Autocast, gradient and inference mode, defaults and flags of the moment; and others
that watch or change autograd at the same time: checkpoints, saved-tensor hooks of
the user's own, ``torch.func``, anomaly detection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from replay_cases import (
    EVERYWHERE,
    ON_CPU,
    ROWS,
    WIDTH,
    Block,
    Net,
    Step,
    Where,
    around,
    around_module,
    assert_same,
    of_blocks,
    rows,
    step,
)

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")

Context = Callable[[], AbstractContextManager[object]]


def forward_under(context: Context) -> Step:
    """A step whose forward alone runs under ``context``."""

    def under(model: nn.Module, x: Tensor) -> Tensor:
        with context():
            loss: Tensor = model(x)
        loss.backward()
        return loss

    return under


def step_under(context: Context) -> Step:
    def under(model: nn.Module, x: Tensor) -> Tensor:
        with context():
            return step(model, x)

    return under


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
                self.cells = kind(WIDTH, WIDTH, 2, dropout=0.2)

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


class TestOthersBesideUs:
    @EVERYWHERE
    @pytest.mark.parametrize("reentrant", [True, False])
    def test_layers_under_checkpoint(self, reentrant: bool, where: Where) -> None:
        """Torch runs the layer's forward again, in backward, under our hooks."""

        class Root(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = Net(lambda: Block(lambda h: F.dropout(h, 0.3).exp()))

            def forward(self, x: Tensor) -> Tensor:
                h = self.net.stem(x).sin()
                h = checkpoint(self.net.blocks[0], h, use_reentrant=reentrant)
                loss: Tensor = self.net.head(self.net.blocks[1](h)).square().mean()
                return loss

        assert_same(Root, where)

    @EVERYWHERE
    @pytest.mark.parametrize("reentrant", [True, False])
    def test_checkpoint_inside_a_layer(self, reentrant: bool, where: Where) -> None:
        def wave(h: Tensor) -> Tensor:
            return F.dropout((h * 2).sin().exp(), 0.3)

        def hazard(h: Tensor) -> Tensor:
            inner = checkpoint(wave, h * 2, use_reentrant=reentrant)
            assert isinstance(inner, Tensor)
            return (inner * h).sin()

        assert_same(around(hazard), where)

    @EVERYWHERE
    @pytest.mark.parametrize("reentrant", [True, False])
    def test_checkpoint_around_the_model(self, reentrant: bool, where: Where) -> None:
        def checkpointed(model: nn.Module, x: Tensor) -> Tensor:
            x.requires_grad_()
            loss = checkpoint(model, x, use_reentrant=reentrant)
            assert isinstance(loss, Tensor)
            loss.backward()
            return loss

        build = around(lambda h: F.dropout(h, 0.3).exp())
        assert_same(build, where, steps=[checkpointed] * 3, drops=False)

    @EVERYWHERE
    def test_save_on_cpu_around_the_model(self, where: Where) -> None:
        """Hooks are a stack: ours must not be the ones that get popped."""
        under = forward_under(save_on_cpu)
        build = around(lambda h: F.dropout(h, 0.3).exp())
        assert_same(build, where, steps=[under, step, under, step])

    @EVERYWHERE
    def test_hooks_of_the_user_around_the_model(self, where: Where) -> None:
        """They change what is saved: that must come out of backward."""

        def rounding() -> AbstractContextManager[object]:
            return saved_tensors_hooks(_rounded, lambda packed: packed)

        build = around(torch.exp)
        assert_same(build, where, steps=[forward_under(rounding), step, step])

    @EVERYWHERE
    def test_hooks_of_the_user_inside_a_layer(self, where: Where) -> None:
        def hazard(h: Tensor) -> Tensor:
            early = (h * 2).sin()
            with saved_tensors_hooks(_rounded, lambda packed: packed):
                middle = (early * 2).exp()
            with save_on_cpu():
                late = (middle * 0.5).sin()
            return (late * early).tanh()

        assert_same(around(hazard), where)

    @EVERYWHERE
    def test_hooks_left_open_by_a_layer(self, where: Where) -> None:
        """Opened in one layer and closed in the next."""
        hooks: list[saved_tensors_hooks] = []

        def hazard(h: Tensor) -> Tensor:
            if hooks:
                hooks.pop().__exit__()
                return (h * 2).exp().sin()
            hooks.append(saved_tensors_hooks(_rounded, lambda packed: packed))
            hooks[0].__enter__()
            return (h * 2).sin()

        assert_same(around(hazard), where, drops=False)

    @EVERYWHERE
    def test_saving_forbidden_inside(self, where: Where) -> None:
        """``disable_saved_tensors_hooks`` raises only where hooks are in force."""

        def forbidding(model: nn.Module, x: Tensor) -> Tensor:
            loss = step(model, x)
            with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
                (x * 2).sin()
            return loss

        assert_same(around(torch.exp), where, steps=[forbidding] * 2)

    @EVERYWHERE
    @pytest.mark.parametrize("transform", ["grad", "vjp", "jvp", "vmap", "jacrev"])
    def test_functional_transform_inside(self, transform: str, where: Where) -> None:
        """Their wrappers have no storage; some raise while any hook is on."""

        def wave(h: Tensor) -> Tensor:
            return (h * 2).sin().exp()

        def hazard(h: Tensor) -> Tensor:
            early = (h * 2).tanh()
            if transform == "grad":
                made = torch.func.grad(lambda v: wave(v).sum())(early)
            elif transform == "vjp":
                made, pull = torch.func.vjp(wave, early)
                made = made * pull(torch.ones_like(early))[0]
            elif transform == "jvp":
                made = torch.func.jvp(wave, (early,), (h,))[1]
            elif transform == "jacrev":
                made = torch.func.vmap(torch.func.jacrev(wave))(early).sum(1)
            else:
                made = torch.func.vmap(wave)(early)
            return (made * 0.5).sin() * early

        assert_same(around(hazard), where)

    @EVERYWHERE
    def test_functional_call_of_the_layer(self, where: Where) -> None:
        """Weights given from outside, made from parameters of the root."""

        class Hyper(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = Net(lambda: Block(torch.exp))
                self.scale = nn.Parameter(torch.rand(()))

            def forward(self, x: Tensor) -> Tensor:
                weights = {n: p * self.scale for n, p in self.net.named_parameters()}
                loss: Tensor = torch.func.functional_call(self.net, weights, (x,))
                return loss

        assert_same(Hyper, where)

    @EVERYWHERE
    def test_a_dispatch_mode_of_the_user(self, where: Where) -> None:
        under = step_under(lambda: FlopCounterMode(display=False))
        build = around(lambda h: F.dropout(h, 0.3).exp())
        assert_same(build, where, steps=[under, step, under])

    @EVERYWHERE
    @pytest.mark.filterwarnings("ignore:Anomaly Detection")
    def test_anomaly_detection(self, where: Where) -> None:
        under = step_under(torch.autograd.detect_anomaly)
        build = around(lambda h: F.dropout(h, 0.3).exp())
        assert_same(build, where, steps=[under, step, under])

    @EVERYWHERE
    def test_profiler(self, where: Where) -> None:
        """It observes the same events as we do."""
        under = step_under(lambda: torch.profiler.profile(record_shapes=True))
        build = around(lambda h: F.dropout(h, 0.3).exp())
        assert_same(build, where, steps=[under, step])

    @EVERYWHERE
    def test_autograd_in_the_calling_thread(self, where: Where) -> None:
        under = step_under(lambda: torch.autograd.set_multithreading_enabled(False))
        build = around(lambda h: F.dropout(h, 0.3).exp())
        assert_same(build, where, steps=[under, step, under])

    @EVERYWHERE
    def test_hooks_on_tensors_and_modules(self, where: Where) -> None:
        class Hooked(Block):
            def __init__(self) -> None:
                super().__init__(lambda h: F.dropout(h, 0.3).exp())
                self.register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,))
                self.before.register_forward_hook(lambda m, args, out: out * 2)
                self.after.register_forward_pre_hook(lambda m, args: args[0].sin())

        assert_same(of_blocks(Hooked), where)


def _rounded(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point() or isinstance(tensor, nn.Parameter):
        return tensor
    return (tensor.detach() * 4).round() / 4


@EVERYWHERE
@pytest.mark.parametrize("context", [nullcontext, torch.no_grad])
def test_forward_of_a_layer_alone(context: Context, where: Where) -> None:
    """A layer used by itself, not through the root."""

    def alone(model: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(model, Net)
        with context():
            scale = model.blocks[0](x).mean()
        loss = model(x) * scale
        loss.backward()
        result: Tensor = loss
        return result

    build = around(lambda h: F.dropout(h, 0.3).exp())
    assert_same(build, where, steps=[alone] * 3, batch=rows)
