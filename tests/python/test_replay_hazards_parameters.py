"""Parameters that only the replay needs, changed between forward and backward.

Eager saved what was computed from them, and does not mind. We must not compute it
again from what they are now: the same gradient as eager's, or an error.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from memscale import replay
from replay_cases import (
    EVERYWHERE,
    WIDTH,
    Block,
    Where,
    assert_same,
    assert_same_or_refused,
    change_between,
    of_blocks,
    step,
)

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")


class OnlyReplayNeeds(nn.Module):
    """Eager saves ``weight * 2``; to compute that again takes the weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        return h * (self.weight * 2)


class TestParameterOnlyTheReplayNeeds:
    @EVERYWHERE
    def test_changed_in_place(self, where: Where) -> None:
        def change(model: nn.Module, x: Tensor) -> None:
            for module in model.modules():
                if isinstance(module, OnlyReplayNeeds):
                    module.weight.add_(1)

        build = of_blocks(lambda: Block(OnlyReplayNeeds()))
        assert_same_or_refused(build, where, change_between(change))

    @EVERYWHERE
    def test_buffer_changed_in_place(self, where: Where) -> None:
        """The same with a buffer."""

        class Scaled(nn.Module):
            scale: Tensor

            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("scale", torch.rand(WIDTH))

            def forward(self, h: Tensor) -> Tensor:
                return h * (self.scale * 2)

        def change(model: nn.Module, x: Tensor) -> None:
            for buffer in model.buffers():
                buffer.add_(1)

        build = of_blocks(lambda: Block(Scaled()))
        assert_same_or_refused(build, where, change_between(change))

    @EVERYWHERE
    def test_changed_by_the_optimizer_in_backward(self, where: Where) -> None:
        """A branch without gradient is read after its weight was stepped."""

        class Detached(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.gate = nn.Linear(WIDTH, WIDTH)

            def forward(self, h: Tensor) -> Tensor:
                gate = self.gate(h)
                return h * (gate.detach() * 2).sin() + gate

        def fused(model: nn.Module, x: Tensor) -> Tensor:
            def descend(parameter: Tensor) -> None:
                assert parameter.grad is not None
                with torch.no_grad():
                    parameter.sub_(parameter.grad, alpha=0.1)

            hooks = [
                p.register_post_accumulate_grad_hook(descend)
                for p in model.parameters()
            ]
            try:
                return step(model, x)
            finally:
                for hook in hooks:
                    hook.remove()

        build = of_blocks(lambda: Block(Detached()))
        assert_same_or_refused(build, where, fused)

    @EVERYWHERE
    def test_given_other_bytes(self, where: Where) -> None:
        """``parameter.data = tensor``: same object, same version, another storage."""

        def change(model: nn.Module, x: Tensor) -> None:
            for module in model.modules():
                if isinstance(module, OnlyReplayNeeds):
                    module.weight.data = module.weight.data + 1

        build = of_blocks(lambda: Block(OnlyReplayNeeds()))
        assert_same(build, where, steps=[step, change_between(change), step])


class TestParameterSeenThroughAView:
    def test_is_there_anyway(self) -> None:
        """``linear`` reads its weight's transpose: what it makes is worth dropping,
        since the weight, which is larger, is held by the model in any case."""

        class Layer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.randn(256, 256))

            def forward(self, x: Tensor) -> Tensor:
                return nn.functional.linear(x, self.weight).sin().cos()

        model = nn.Sequential(Layer(), Layer())
        handle = replay.attach(model, "block", min_bytes=0)
        model(torch.randn(8, 256)).sum().backward()
        assert handle.stats().saves_dropped == 4  # what sin and cos save
        handle.detach()
