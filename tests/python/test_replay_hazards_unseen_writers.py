"""Writers whose schema does not tell: runtime/observe/unseen_writes.h.

Foreign operators (collectives), custom Functions with kernels of their own,
and backwards that write into what they saved.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from memscale import memory, replay
from replay_cases import (
    EVERYWHERE,
    ON_CPU,
    ROWS,
    WIDTH,
    Hazard,
    Where,
    around,
    around_module,
    assert_same,
    assert_same_error,
    step,
)

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")

# mypy knows neither the context's attributes nor what apply returns.
Context = Any


# ---- foreign operators ----

library = torch.library.Library("memscale_foreign", "DEF")
library.define("halve(Tensor x) -> ()")
library.define("halve_all(Tensor[][] groups) -> ()")


def halve(x: Tensor) -> None:
    x.data.mul_(0.5)  # without a new version, as a collective


def halve_all(groups: list[list[Tensor]]) -> None:
    for group in groups:
        for x in group:
            halve(x)


library.impl("halve", halve, "CompositeExplicitAutograd")
library.impl("halve_all", halve_all, "CompositeExplicitAutograd")
foreign = torch.ops.memscale_foreign


def of_a_result(h: Tensor) -> Tensor:
    y = h * 3
    foreign.halve(y.detach())
    return y.sin()


def of_a_saved_result(h: Tensor) -> Tensor:
    """Eager does not notice either: the gradient is that of the new bytes."""
    y = h * 3
    z = y.sin()
    foreign.halve(y.detach())
    return z


def in_lists_of_lists(h: Tensor) -> Tensor:
    y, z = h * 3, h.cos()
    foreign.halve_all([[y.detach()], [z.detach()]])
    return y.sin() + z.exp()


def of_what_others_are_made_from(h: Tensor) -> Tensor:
    y = h.sum(1, keepdim=True)
    wide = (y + h.detach()).sin()
    foreign.halve(y.detach())
    return wide * y


class OfABuffer(nn.Module):
    """A state that closed tapes rest on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(ROWS, 1) + 1)

    def forward(self, h: Tensor) -> Tensor:
        out = (h * self.scale).sin()
        foreign.halve(self.scale)
        return out


class TestForeignOperators:
    @EVERYWHERE
    @pytest.mark.parametrize(
        "hazard",
        [
            of_a_result,
            of_a_saved_result,
            in_lists_of_lists,
            of_what_others_are_made_from,
        ],
    )
    def test_write(self, hazard: Hazard, where: Where) -> None:
        assert_same(around(hazard), where)

    @EVERYWHERE
    def test_write_what_a_later_layer_reads_again(self, where: Where) -> None:
        assert_same(around_module(OfABuffer), where)

    @EVERYWHERE
    def test_write_a_parameter_after_the_call(self, where: Where) -> None:
        def touched(model: nn.Module, x: Tensor) -> Tensor:
            loss: Tensor = model(x)
            for block in model.blocks:  # type: ignore[union-attr]
                foreign.halve(block.before.bias.detach())
            loss.backward()
            return loss

        assert_same(around(torch.tanh), where, steps=[touched] * 3)

    def test_collectives_are_foreign(self) -> None:
        """Their schemas tell of no write; if torch mends that, we need not care."""
        from torch import distributed

        assert distributed.is_available()
        schema = torch.ops.c10d.allreduce_.default._schema
        assert not schema.is_mutable
        assert torch.Tag.pt2_compliant_tag not in torch.ops.c10d.allreduce_.default.tags


# ---- custom Functions ----


class Overwrites(Function):
    """As fused losses do: a kernel that torch does not see, into the input."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        array = x.detach().numpy()
        out = torch.from_numpy(np.sin(array))
        array[...] = np.cos(array)
        ctx.save_for_backward(x.detach())
        return out

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (cosine,) = ctx.saved_tensors
        return gradient * cosine


class LooksAtItsWeight(Function):
    """As fused weight gradients do: backward wants the parameter itself."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        weight.main_grad.add_(gradient.t() @ x)
        return gradient @ weight, None


class ReusesWhatItSaved(Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return x.cos_().mul_(gradient)


def overwritten(h: Tensor) -> Tensor:
    out: Tensor = Overwrites.apply(h * 3)
    return out


def overwritten_and_read_again(h: Tensor) -> Tensor:
    y = h * 3
    out: Tensor = Overwrites.apply(y)
    return out + y.detach().exp()


def overwritten_after_others_were_made(h: Tensor) -> Tensor:
    y = h.sum(1, keepdim=True) * 2
    wide = (y + h.detach()).sin()
    out: Tensor = Overwrites.apply(y)
    return wide + out


def overwritten_after_it_was_saved(h: Tensor) -> Tensor:
    y = h * 3
    before = y.cos()
    out: Tensor = Overwrites.apply(y)
    return before + out


def reused(h: Tensor) -> Tensor:
    out: Tensor = ReusesWhatItSaved.apply(h * 3)
    return out


class FusedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.register_buffer("main", torch.zeros(WIDTH, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        self.weight.main_grad = self.main  # type: ignore[attr-defined]
        out: Tensor = LooksAtItsWeight.apply(h.tanh(), self.weight)
        return out


class TestFunctions:
    @ON_CPU
    @pytest.mark.parametrize(
        "hazard",
        [
            overwritten,
            overwritten_and_read_again,
            overwritten_after_others_were_made,
            overwritten_after_it_was_saved,
        ],
    )
    def test_overwrite_what_they_are_given(self, hazard: Hazard, where: Where) -> None:
        assert_same(around(hazard), where)

    @ON_CPU
    def test_overwrite_what_the_model_returned(self, where: Where) -> None:
        """A fused loss in the user's own loop."""

        class Logits(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = nn.Linear(WIDTH, WIDTH)
                self.second = nn.Linear(WIDTH, WIDTH)

            def forward(self, x: Tensor) -> Tensor:
                return torch.sigmoid(self.second(self.first(x).sin())) * 3

        def fused(model: nn.Module, x: Tensor) -> Tensor:
            loss: Tensor = Overwrites.apply(model(x)).sum()
            loss.backward()
            return loss

        assert_same(Logits, where, steps=[fused] * 3, drops=False)

    @EVERYWHERE
    def test_are_given_the_parameter_itself(self, where: Where) -> None:
        assert_same(around_module(FusedLinear), where)

    @EVERYWHERE
    def test_may_write_into_what_they_saved(self, where: Where) -> None:
        assert_same(around(reused), where)

    @EVERYWHERE
    def test_must_not_write_into_what_others_saved(self, where: Where) -> None:
        def broken(h: Tensor) -> Tensor:
            y = h.tanh()
            if not Switch.on:
                return y.sin() + y.exp()
            out: Tensor = ReusesWhatItSaved.apply(y)
            return out + y.exp()

        def switched(model: nn.Module, x: Tensor) -> Tensor:
            Switch.on = True
            try:
                return step(model, x)
            finally:
                Switch.on = False

        class Switch:
            on = False

        assert_same_error(around(broken), where, switched)

    def test_leave_no_temporaries_behind(self) -> None:
        """Forward's peak is that of the plain model, not the sum of all layers'."""

        class Doubles(Function):
            @staticmethod
            def forward(ctx: Context, x: Tensor) -> Tensor:
                for _ in range(8):
                    x = x + 1
                return x.clone()

            @staticmethod
            def backward(ctx: Context, gradient: Tensor) -> Tensor:  # type: ignore[override]
                return gradient

        class Layer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(64, 64)

            def forward(self, x: Tensor) -> Tensor:
                out: Tensor = Doubles.apply(self.linear(x))
                return out

        def peak(attached: bool) -> int:
            torch.manual_seed(0)
            model = nn.Sequential(*[Layer() for _ in range(4)])
            handle = replay.attach(model, "block") if attached else None
            x = torch.randn(512, 64)
            model(x).sum().backward()
            model.zero_grad()
            with memory.track("cpu") as tracked:
                model(x).sum().backward()
            if handle is not None:
                handle.detach()
            return tracked.peak - tracked.before

        assert peak(attached=True) <= peak(attached=False)


class Outer(Function):
    """Calls a Function that overwrites what it is given, a buffer."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, buffer: Tensor) -> Tensor:
        Overwrites.apply(buffer)
        return x * 2

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient * 2, None


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(ROWS, 1) + 1)

    def forward(self, h: Tensor) -> Tensor:
        scale = self.scale.clone()
        out = (h * scale).sin()
        again: Tensor = Outer.apply(h, scale)
        return out + again


class Halves(Function):
    """It differentiates inside, under saved-tensor hooks of its own."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        hooks = torch.autograd.graph.saved_tensors_hooks
        with torch.enable_grad(), hooks(Tensor.bfloat16, Tensor.float):
            inner = x.detach().requires_grad_()
            out = inner.sin()
            (slope,) = torch.autograd.grad(out.sum(), inner)
        ctx.save_for_backward(slope)
        return out.detach()

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * ctx.saved_tensors[0]


class TestFunctionsInside:
    @ON_CPU
    def test_of_a_function_overwrite_too(self, where: Where) -> None:
        assert_same(around_module(Nested), where)

    @EVERYWHERE
    def test_have_their_own_saved_tensor_hooks(self, where: Where) -> None:
        assert_same(around(lambda h: Halves.apply(h * 2)), where)
