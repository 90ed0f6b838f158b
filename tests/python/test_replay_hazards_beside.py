"""Others beside us, who watch or change autograd at the same time.

Checkpoints, saved-tensor hooks of the user's own, ``torch.func``, dispatch modes,
anomaly detection, the profiler, hooks on tensors and modules.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from replay_cases import (
    EVERYWHERE,
    Block,
    Context,
    Net,
    Where,
    around,
    assert_same,
    forward_under,
    of_blocks,
    rows,
    step,
    step_under,
)

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")


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
                made, pull, *_ = torch.func.vjp(wave, early)
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
                self.register_full_backward_hook(self.doubled)
                self.before.register_forward_hook(lambda m, args, out: out * 2)
                self.after.register_forward_pre_hook(lambda m, args: args[0].sin())

            @staticmethod
            def doubled(module: nn.Module, into: Any, out_of: Any) -> Any:
                return (into[0] * 2,)

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
