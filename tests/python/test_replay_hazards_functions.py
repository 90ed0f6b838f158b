"""Code of the user's own: ``autograd.Function`` (design.md §4, hazard 2).

Nobody can know what such code does with its tensors. What is born inside is kept;
what goes in and comes out is replayed around it only where that is safe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from replay_cases import (
    EVERYWHERE,
    ON_CPU,
    Where,
    around,
    assert_same,
)

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")

# mypy knows neither the context's attributes nor what apply returns.
Context = Any


class SavesInput(Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * x.cos()


class SavesOutput(Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        out = (x * 2).exp()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (out,) = ctx.saved_tensors
        return gradient * out * 2


class SavesInner(Function):
    """What it saves is neither given nor returned."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        inner = torch.empty_like(x)
        torch.mul(x, 3, out=inner)
        inner += torch.rand_like(x)
        ctx.save_for_backward(inner, None, x)
        return inner.sin()

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Tensor:  # type: ignore[override]
        inner, nothing, _ = ctx.saved_tensors
        assert nothing is None
        return gradient * inner.cos() * 3


class KeepsAttributes(Function):
    """Tensors on ``ctx`` itself: no hook sees them."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, factor: float) -> Tensor:
        ctx.inner = x * factor
        ctx.mask = x > 0
        ctx.factor = factor
        return ctx.inner.sin() * ctx.mask

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Context, gradient: Tensor
    ) -> tuple[Tensor, None]:
        return gradient * ctx.inner.cos() * ctx.mask * ctx.factor, None


class MarksDirty(Function):
    """Writes into its input and returns it."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        x.mul_(2).add_(1)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


class MarksDirtyAndSaves(Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        x.exp_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * ctx.saved_tensors[0]


class WritesByNumpy(Function):
    """A kernel that the dispatcher does not know."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        np.sin(x.detach().numpy(), out=out.numpy())
        slope = torch.zeros_like(x)
        np.cos(x.detach().numpy(), out=slope.numpy())
        ctx.save_for_backward(slope)
        return out

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * ctx.saved_tensors[0]


class SortsWithIndices(Function):
    """One result has no gradient, and is used all the same."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> tuple[Tensor, Tensor]:
        values, order = x.sort(1)
        ctx.mark_non_differentiable(order)
        ctx.save_for_backward(order)
        return values, order

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Context, gradient: Tensor, _: Tensor | None
    ) -> Tensor:
        (order,) = ctx.saved_tensors
        return torch.zeros_like(gradient).scatter_(1, order, gradient)


class ReturnsItsInput(Function):
    """The identity with another gradient (as a gradient reversal)."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -gradient


class ReturnsAView(Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 3


class TwoResults(Function):
    """Gradients that do not arrive are None."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x * 2, x.exp()

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Context, first: Tensor | None, second: Tensor | None
    ) -> Tensor:
        assert first is None
        assert second is not None
        return second * ctx.saved_tensors[0].exp()


class Modern(Function):
    """``setup_context`` apart from ``forward``."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        inner = x.sigmoid()
        return inner * y, inner

    @staticmethod
    def setup_context(ctx: Context, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Context, gradient: Tensor, _: Tensor
    ) -> tuple[Tensor, Tensor]:
        _, y, inner = ctx.saved_tensors
        return gradient * y * inner * (1 - inner), gradient * inner


class RecomputesItself(Function):
    """Runs autograd inside of its backward, as a checkpoint of its own."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * 2).sin().exp()

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Tensor:  # type: ignore[override]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = (x * 2).sin().exp()
        (result,) = torch.autograd.grad(out, x, gradient)
        return result


def apply(function: type[Function], *args: object) -> Any:
    return function.apply(*args)  # type: ignore[no-untyped-call]


USES: dict[str, Callable[[Tensor], Tensor]] = {
    "saves_input": lambda h: apply(SavesInput, h * 2),
    "saves_output": lambda h: apply(SavesOutput, h * 2).sin(),
    "saves_inner": lambda h: apply(SavesInner, h * 2).sin(),
    "keeps_attributes": lambda h: apply(KeepsAttributes, h * 2, 0.7).sin(),
    "marks_dirty": lambda h: apply(MarksDirty, h * 2).sin(),
    "marks_dirty_twice": lambda h: apply(MarksDirty, apply(MarksDirty, h * 2)).sin(),
    "marks_dirty_and_saves": lambda h: apply(MarksDirtyAndSaves, h * 2).sin(),
    "sorts_with_indices": lambda h: _ordered(*apply(SortsWithIndices, h * 2)),
    "returns_its_input": lambda h: apply(ReturnsItsInput, h * 2).sin(),
    "returns_its_input_changed": lambda h: (
        apply(ReturnsItsInput, h * 2).clone().mul_(2).sin()
    ),
    "returns_a_view": lambda h: apply(ReturnsAView, h * 2).sin(),
    "two_results": lambda h: apply(TwoResults, h * 2)[1].sin(),
    "modern": lambda h: apply(Modern, h * 2, h + 1)[0].sin(),
    "modern_second_result": lambda h: h * apply(Modern, h * 2, h + 1)[1],
    "recomputes_itself": lambda h: apply(RecomputesItself, h * 2).sin(),
    "one_after_the_other": lambda h: apply(
        SavesOutput, apply(SavesInput, apply(KeepsAttributes, h, 0.5)).sin()
    ).sin(),
}


def _ordered(values: Tensor, order: Tensor) -> Tensor:
    return values.sin() * order


@EVERYWHERE
@pytest.mark.parametrize("name", USES)
def test_function(name: str, where: Where) -> None:
    assert_same(around(USES[name]), where)


@ON_CPU
def test_function_that_writes_by_numpy(where: Where) -> None:
    assert_same(around(lambda h: apply(WritesByNumpy, h * 2).sin()), where)


@EVERYWHERE
def test_dirty_input_with_a_lineage(where: Where) -> None:
    """What was made before the write needs the old value."""

    def hazard(h: Tensor) -> Tensor:
        doubled = h * 2
        wave = (doubled + 1).sin()
        return wave + apply(MarksDirty, doubled)

    assert_same(around(hazard), where)
