"""Ops of the user's own (``torch.library``): what their schemas do not tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from replay_cases import (
    EVERYWHERE,
    ON_CPU,
    ROWS,
    WIDTH,
    Where,
    around,
    around_module,
    assert_same,
)

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")

# mypy does not know the context's attributes.
Context = Any


@torch.library.custom_op("memscale_hazards::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


def _twice_backward(ctx: Context, gradient: Tensor) -> Tensor:
    return gradient * 2


twice.register_autograd(_twice_backward)


@torch.library.custom_op("memscale_hazards::wave", mutates_args=())
def wave_op(x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return (x * scale).sin(), (x * scale).cos()


def _wave_setup(ctx: Context, inputs: Any, output: Any) -> None:
    ctx.scale = inputs[1]
    ctx.save_for_backward(output[1])


def _wave_backward(
    ctx: Context, gradient: Tensor, _: Tensor | None
) -> tuple[Tensor, None]:
    return gradient * ctx.saved_tensors[0] * ctx.scale, None


wave_op.register_autograd(_wave_backward, setup_context=_wave_setup)


@torch.library.custom_op("memscale_hazards::untagged_noise", mutates_args=())
def untagged_noise(x: Tensor) -> Tensor:
    """Random, but without the tag that would say so."""
    return torch.rand_like(x)


@torch.library.custom_op("memscale_hazards::impure", mutates_args=())
def impure(x: Tensor) -> Tensor:
    """Depends on how often it was called."""
    impure_calls.append(1)
    return x * len(impure_calls)


impure_calls: list[int] = []


@torch.library.custom_op("memscale_hazards::halve_in_place", mutates_args={"x"})
def halve_in_place(x: Tensor) -> None:
    x.mul_(0.5)


@torch.library.custom_op("memscale_hazards::fill_by_numpy", mutates_args={"out"})
def fill_by_numpy(x: Tensor, out: Tensor) -> None:
    np.square(x.numpy(), out=out.numpy())


class Counting(nn.Module):
    """Starts the count of ``impure`` afresh with each model."""

    def __init__(self) -> None:
        super().__init__()
        impure_calls.clear()

    def forward(self, h: Tensor) -> Tensor:
        return h * impure(h.detach()).sin()


def changed_by_an_op(h: Tensor) -> Tensor:
    scale = h.detach() + 1
    wave = (scale * 2).sin()
    halve_in_place(scale)
    return h * wave * scale.cos()


class TestCustomOp:
    @EVERYWHERE
    @pytest.mark.parametrize(
        "hazard",
        [
            lambda h: (twice(h).sin() * twice(h)).cos(),
            lambda h: wave_op(h * 2, 0.7)[0].sin(),
            lambda h: h * wave_op(h.detach() * 2, 0.7)[1].sin(),
            lambda h: h * untagged_noise(h.detach()),
            lambda h: h * untagged_noise(h.detach()).sin(),
            changed_by_an_op,
        ],
        ids=[
            "functional",
            "saving_a_result",
            "two_results",
            "untagged_noise",
            "made_from_untagged_noise",
            "in_place",
        ],
    )
    def test_of_python(self, hazard: Callable[[Tensor], Tensor], where: Where) -> None:
        assert_same(around(hazard), where)

    @EVERYWHERE
    def test_that_counts_its_calls(self, where: Where) -> None:
        """An op with a side effect runs as often as eager runs it."""
        assert_same(around_module(Counting), where)
        # Three steps of two blocks; the list was cleared by the attached model.
        assert len(impure_calls) == 6

    @ON_CPU
    def test_that_fills_an_empty_tensor(self, where: Where) -> None:
        def hazard(h: Tensor) -> Tensor:
            filled = torch.empty(ROWS, WIDTH)
            fill_by_numpy(h.detach(), filled)
            return h * filled.sin()

        assert_same(around(hazard), where)
