"""Versions: what changed between forward and backward (design.md §4, hazard 3).

Saved-tensor hooks switch off torch's own check. So where eager raises, we raise the
same; where eager has its old value safe, ours is the old value, too, or, for a
parameter that only the replay needs, an error, never a gradient of something else.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from replay_cases import (
    EVERYWHERE,
    WIDTH,
    Block,
    Net,
    Where,
    around,
    assert_same,
    assert_same_error,
    change_between,
    of_blocks,
    step,
)

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")

DOUBLE_WAVE = around(lambda h: (h * 2).sin())


class Showing(nn.Module):
    """A net that lets the caller see (and change) a tensor from inside of it."""

    def __init__(self, make: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.net = around(self.hazard)()
        self.make = make
        self.shown: list[Tensor] = []

    def hazard(self, h: Tensor) -> Tensor:
        out, shown = self.make(h)
        self.shown.append(shown)
        return out

    def forward(self, x: Tensor) -> Tensor:
        self.shown = []
        loss: Tensor = self.net(x)
        return loss


def spoil_shown(model: nn.Module, x: Tensor) -> None:
    assert isinstance(model, Showing)
    for tensor in model.shown:
        tensor.mul_(2)


def break_inside(hazard: Callable[[Tensor], Tensor], where: Where) -> None:
    """Eager's error comes from the forward code itself."""
    broken = [False]

    def sometimes(h: Tensor) -> Tensor:
        return hazard(h) if broken[0] else h.sin()

    def broken_step(model: nn.Module, x: Tensor) -> Tensor:
        broken[0] = True
        try:
            return step(model, x)
        finally:
            broken[0] = False

    assert_same_error(around(sometimes), where, broken_step)


class TestEagerRaises:
    @EVERYWHERE
    def test_an_input_was_saved_and_then_changed(self, where: Where) -> None:
        def hazard(h: Tensor) -> Tensor:
            doubled = h * 2
            wave = doubled.sin()
            doubled.add_(1)
            return wave

        break_inside(hazard, where)

    @EVERYWHERE
    def test_a_result_was_saved_and_then_changed(self, where: Where) -> None:
        break_inside(lambda h: h.exp().add_(1), where)

    @EVERYWHERE
    def test_a_view_of_a_saved_tensor_was_changed(self, where: Where) -> None:
        def hazard(h: Tensor) -> Tensor:
            grown = h.sigmoid()
            grown[:, 2].zero_()
            return grown

        break_inside(hazard, where)

    @EVERYWHERE
    def test_a_detached_alias_was_changed(self, where: Where) -> None:
        """``detach`` shares bytes and version."""

        def hazard(h: Tensor) -> Tensor:
            wave = (h * 2).tanh()
            wave.detach().mul_(2)
            return wave

        break_inside(hazard, where)

    @EVERYWHERE
    def test_the_same_value_was_written_again(self, where: Where) -> None:
        """Eager counts writes; it does not look at what was written."""

        def hazard(h: Tensor) -> Tensor:
            wave = (h * 2).tanh()
            return wave.copy_(wave.clone())

        break_inside(hazard, where)

    @EVERYWHERE
    def test_every_parameter_was_changed(self, where: Where) -> None:
        def change(model: nn.Module, x: Tensor) -> None:
            for parameter in model.parameters():
                parameter.add_(0.5)

        assert_same_error(DOUBLE_WAVE, where, change_between(change))

    @EVERYWHERE
    def test_the_optimizer_stepped_too_early(self, where: Where) -> None:
        """Two losses, and a step after the first backward."""

        def two_losses(model: nn.Module, x: Tensor) -> Tensor:
            first, second = model(x), model(x * 2)
            first.backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            try:
                second.backward()
            except RuntimeError as error:
                # Which parameter is met first is not the same: replay reads more.
                raise RuntimeError(str(error).split(":")[0]) from None
            loss: Tensor = first + second
            return loss

        assert_same_error(DOUBLE_WAVE, where, two_losses)

    @EVERYWHERE
    def test_the_batch_was_overwritten(self, where: Where) -> None:
        """The stem's matmul saved it."""
        overwrite = change_between(lambda model, x: x.zero_())
        assert_same_error(DOUBLE_WAVE, where, overwrite)

    @EVERYWHERE
    def test_a_tensor_shown_to_the_caller_was_changed(self, where: Where) -> None:
        def make(h: Tensor) -> tuple[Tensor, Tensor]:
            doubled = h * 2
            return doubled.sin(), doubled

        steps = change_between(spoil_shown)
        assert_same_error(lambda: Showing(make), where, steps)

    @EVERYWHERE
    def test_a_buffer_that_was_saved_changed(self, where: Where) -> None:
        class Scaled(nn.Module):
            scale: Tensor

            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("scale", torch.rand(WIDTH))

            def forward(self, h: Tensor) -> Tensor:
                return h * self.scale

        def change(model: nn.Module, x: Tensor) -> None:
            for buffer in model.buffers():
                buffer.add_(1)

        build = of_blocks(lambda: Block(Scaled()))
        assert_same_error(build, where, change_between(change))


class TestEagerDoesNotMind:
    @EVERYWHERE
    @pytest.mark.parametrize("scale", [None, 2])
    def test_logits_changed_after_the_loss(
        self, scale: int | None, where: Where
    ) -> None:
        """As generation and metrics code does, with the model's own outputs.

        Once they are what a matmul gave, which "cheap" keeps, and once not.
        """

        class WithLogits(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = Net(lambda: Block(torch.exp))
                self.logits: Tensor

            def forward(self, x: Tensor) -> Tensor:
                hidden = self.net.blocks[0](self.net.stem(x))
                self.logits = self.net.head(hidden)
                if scale is not None:
                    self.logits = self.logits * scale
                return self.logits.log_softmax(1)[:, 0].mean().neg()

        def change(model: nn.Module, x: Tensor) -> None:
            assert isinstance(model, WithLogits)
            model.logits.fill_(-1e9)

        assert_same(WithLogits, where, steps=[change_between(change)] * 3)

    @EVERYWHERE
    def test_the_batch_is_used_again(self, where: Where) -> None:
        """Its first op saves nothing of it: a loader may refill it at once."""

        class Shifted(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = around(torch.exp)()

            def forward(self, x: Tensor) -> Tensor:
                loss: Tensor = self.net((x * 2 + 1).sin())
                return loss

        refill = change_between(lambda model, x: x.fill_(3))
        assert_same(Shifted, where, steps=[refill] * 3)

    @EVERYWHERE
    def test_a_shown_value_is_changed(self, where: Where) -> None:
        """What was saved is made from it, not it."""

        def make(h: Tensor) -> tuple[Tensor, Tensor]:
            return (h * 2).sin(), h

        steps = [change_between(spoil_shown)] * 3
        assert_same(lambda: Showing(make), where, steps=steps)

    @EVERYWHERE
    def test_a_shown_matmul_is_changed(self, where: Where) -> None:
        """The same with a value that "cheap" keeps."""

        def make(h: Tensor) -> tuple[Tensor, Tensor]:
            product = h @ h.t()
            return (product * 2).sin() @ h, product

        steps = [change_between(spoil_shown)] * 3
        assert_same(lambda: Showing(make), where, steps=steps)

    @EVERYWHERE
    def test_the_output_of_a_layer_is_changed_outside(self, where: Where) -> None:
        """By the root, between two layers, long after the first one is done."""

        class Root(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = Net(lambda: Block(torch.exp))

            def forward(self, x: Tensor) -> Tensor:
                first = self.net.blocks[0](self.net.stem(x))
                second = self.net.blocks[1](first + 1)
                first.mul_(0.5)
                loss: Tensor = (second * first.detach().clone()).square().mean()
                return loss

        assert_same(Root, where)

    @EVERYWHERE
    def test_a_buffer_is_updated_in_every_forward(self, where: Where) -> None:
        """Saved is what was computed from it: the replay would see the new one."""

        class Counting(nn.Module):
            scale: Tensor

            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("scale", torch.ones(WIDTH))

            def forward(self, h: Tensor) -> Tensor:
                out = h * (self.scale * 2).sqrt()
                with torch.no_grad():
                    self.scale.mul_(0.9).add_(h.abs().mean(0), alpha=0.1)
                return out + self.scale.clone()

        assert_same(of_blocks(lambda: Block(Counting())), where)

    @EVERYWHERE
    def test_a_parameter_is_rescaled_in_forward(self, where: Where) -> None:
        """A weight constraint, applied in each forward before and after its use."""

        class Constrained(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.rand(WIDTH))

            def forward(self, h: Tensor) -> Tensor:
                with torch.no_grad():
                    self.weight.clamp_(0.1, 0.9)
                wave = (self.weight * 2).sin()
                with torch.no_grad():
                    self.weight.mul_(1.01)
                return h * wave.detach() + self.weight

        assert_same(of_blocks(lambda: Block(Constrained())), where)

    @EVERYWHERE
    def test_gradients_are_written_into_shown_tensors(self, where: Where) -> None:
        """A hook of a later tensor changes an earlier value during backward."""

        def hazard(h: Tensor) -> Tensor:
            wave = (h * 2).sin()
            out = wave * 3
            out.register_hook(lambda gradient: _spoil(h, gradient))
            return out

        def _spoil(h: Tensor, gradient: Tensor) -> Tensor:
            with torch.no_grad():
                h.mul_(5)
            return gradient * 2

        assert_same(around(hazard), where)
