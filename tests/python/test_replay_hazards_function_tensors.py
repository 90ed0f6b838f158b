"""Tensors of custom Functions that their ranges do not name.

A Function is given tensors inside of lists, and its backward writes into what it
saved, both by kernels that torch does not see: runtime/observe/unseen_writes.h.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from replay_cases import (
    ON_CPU,
    ROWS,
    WIDTH,
    Hazard,
    Where,
    around,
    around_module,
    assert_same,
)

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")

# mypy knows neither the context's attributes nor what apply returns.
Context = Any


def overwrite(x: Tensor) -> None:
    """By a kernel that torch does not see: no op, no new version."""
    array = x.detach().numpy()
    array[...] = np.cos(array) + 0.5


# ---- given inside of something ----


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value
    if not isinstance(value, (dict, list, tuple)):
        return []
    return [tensor for each in values for tensor in tensors_in(each)]


class OverwritesAll(Function):
    """As a fused kernel over many tensors: they come in a list."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, others: Any) -> Tensor:
        for tensor in tensors_in(others):
            overwrite(tensor)
        return x * 2

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient * 2, None


class WithSetup(Function):
    """The other way to write one; torch binds its arguments to names first."""

    @staticmethod
    def forward(x: Tensor, others: Any = ()) -> Tensor:  # type: ignore[override]
        for tensor in tensors_in(others):
            overwrite(tensor)
        return x * 2

    @staticmethod
    def setup_context(ctx: Context, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient * 2, None


early = OverwritesAll.apply  # bound long before anything is attached


def in_a_list(h: Tensor, y: Tensor) -> Any:
    return OverwritesAll.apply(h, [y])


def in_a_tuple(h: Tensor, y: Tensor) -> Any:
    return early(h, (1, "two", None, y))


def in_a_dictionary(h: Tensor, y: Tensor) -> Any:
    return OverwritesAll.apply(h, {"some": [{"deep": (y,)}]})


def by_name(h: Tensor, y: Tensor) -> Any:
    return WithSetup.apply(h, others=[y])


GIVEN = [in_a_list, in_a_tuple, in_a_dictionary, by_name]


class TestGiven:
    @ON_CPU
    @pytest.mark.parametrize("call", GIVEN)
    def test_read_before(self, call: Any, where: Where) -> None:
        """What was computed from the old bytes, and is computed again."""

        class Layer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("scale", torch.rand(ROWS, 1) + 1)

            def forward(self, h: Tensor) -> Tensor:
                scale = self.scale.clone()
                wide = (h * scale).sin()
                out: Tensor = call(h, scale)
                return wide + out

        assert_same(around_module(Layer), where)

    @ON_CPU
    @pytest.mark.parametrize("call", GIVEN)
    def test_read_after(self, call: Any, where: Where) -> None:
        def hazard(h: Tensor) -> Tensor:
            y = h.detach() * 3
            out: Tensor = call(h, y)
            return out * y.exp()

        assert_same(around(hazard), where)

    @ON_CPU
    def test_saved_before(self, where: Where) -> None:
        """Eager's saves see the new bytes, right or wrong; so do ours."""

        def hazard(h: Tensor) -> Tensor:
            y = h * 3
            before = y.cos()
            out: Tensor = OverwritesAll.apply(h, [y])
            return before + out

        assert_same(around(hazard), where)


# ---- written in backward ----


class OverwritesInBackward(Function):
    """As fused kernels do that make the gradient where the saved bytes were."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        result = gradient * x.cos()
        overwrite(x)
        return result


class OverwritesItsResult(Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        out = x.exp()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (out,) = ctx.saved_tensors
        result = gradient * out
        overwrite(out)
        return result


class OverwritesAnAttribute(Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        ctx.mine = [x.detach()]
        return x.sin()

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.mine
        result = gradient * x.cos()
        overwrite(x)
        return result


def read_after_an_input(h: Tensor) -> Tensor:
    y = h * 3
    out: Tensor = OverwritesInBackward.apply(y)
    return out + (y.detach() * h).exp()


def read_after_a_result(h: Tensor) -> Tensor:
    out: Tensor = OverwritesItsResult.apply(h * 0.5)
    return out + (out.detach() * h).sigmoid()


def read_after_an_attribute(h: Tensor) -> Tensor:
    y = h * 3
    out: Tensor = OverwritesAnAttribute.apply(y)
    return out + (y.detach() * h).exp()


IN_BACKWARD = [read_after_an_input, read_after_a_result, read_after_an_attribute]


def twice(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def once(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x)
    loss.backward()
    return loss


class TestInBackward:
    @ON_CPU
    @pytest.mark.parametrize("step", [once, twice])
    @pytest.mark.parametrize("hazard", IN_BACKWARD)
    def test_what_they_saved(self, hazard: Hazard, step: Any, where: Where) -> None:
        """The second backward computes from bytes that the first overwrote."""
        assert_same(around(hazard), where, steps=[step] * 3)

    @ON_CPU
    def test_of_another_graph(self, where: Where) -> None:
        """Two graphs have a tensor in common, and one overwrites it."""

        def hazard(h: Tensor) -> Tensor:
            shared = h.detach() * 3 + torch.zeros((), requires_grad=True)
            inner: Tensor = OverwritesInBackward.apply(shared)
            early = (shared.detach() * h).exp()
            late = shared.detach() * h
            torch.autograd.grad(inner.sum(), shared)
            return early + late.sigmoid()

        assert_same(around(hazard), where)

    @ON_CPU
    def test_before_the_backward_of_the_model(self, where: Where) -> None:
        """The same after the call: what closed tapes need is copied, too."""

        class Shares(nn.Module):
            shared: Tensor

            def __init__(self) -> None:
                super().__init__()
                self.first = nn.Linear(WIDTH, WIDTH)
                self.second = nn.Linear(WIDTH, WIDTH)

            def forward(self, x: Tensor) -> Tensor:
                h = self.first(x).sin()
                self.shared = h.detach() * 3 + torch.zeros((), requires_grad=True)
                self.inner: Tensor = OverwritesInBackward.apply(self.shared)
                out: Tensor = self.second((self.shared.detach() * h).exp())
                return out

        def other_first(model: nn.Module, x: Tensor) -> Tensor:
            loss: Tensor = model(x).square().mean()
            inner = model.inner
            assert isinstance(inner, Tensor)
            torch.autograd.grad(inner.sum(), model.shared)  # type: ignore[arg-type]
            loss.backward()
            return loss

        assert_same(Shares, where, steps=[other_first] * 3, drops=False)
