"""TorchDispatchModes: what they change in forward is kept, and replay is not theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from replay_cases import (
    EVERYWHERE,
    ROWS,
    Hazard,
    Step,
    Where,
    around,
    around_module,
    assert_same,
    forward_under,
)

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")


class Rounds(TorchDispatchMode):
    """Emulated low precision: results are not those of the plain op."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        rounded = (torch.ops.aten.gelu.default, torch.ops.aten.sin.default)
        return out.bfloat16().float() if func in rounded else out


class Writes(TorchDispatchMode):
    """It writes into an argument that the op only reads."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.cos.default:
            args[0].mul_(0.5)
        return out


def under_a_mode(mode: Callable[[], TorchDispatchMode]) -> Hazard:
    def hazard(h: Tensor) -> Tensor:
        y = h * 2
        wide = F.gelu(y).exp()
        with mode():
            z = F.gelu(wide).sin() * y.detach().cos()
        return z.sigmoid() * wide

    return hazard


class TestDispatchModes:
    @EVERYWHERE
    def test_around_forward(self, where: Where) -> None:
        assert_same(
            around(lambda h: F.gelu(h).exp()),
            where,
            steps=[forward_under(Rounds)] * 3,
            drops=False,
        )

    @EVERYWHERE
    @pytest.mark.parametrize("mode", [Rounds, Writes])
    def test_inside_of_a_layer(
        self, mode: Callable[[], TorchDispatchMode], where: Where
    ) -> None:
        assert_same(around(under_a_mode(mode)), where)


class Doubles(TorchDispatchMode):
    """It changes an op that eager's backward never calls, and replay does."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.ops.aten.exp.default else out


def backward_under(mode: Callable[[], TorchDispatchMode]) -> Step:
    def under(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        with mode():
            loss.backward()
        return loss

    return under


class ZeroesABuffer(nn.Module):
    """A mode's own bookkeeping: it writes what an op before has read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(ROWS, 1) + 1)

    def forward(self, h: Tensor) -> Tensor:
        scale = self.scale.clone()

        class Zeroes(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                if func is torch.ops.aten.cos.default:
                    scale.data.zero_()
                return func(*args, **(kwargs or {}))

        out = (h + scale).sin().exp()
        with Zeroes():
            again = h.detach().cos()
        return out * again


class TestModesAside:
    @EVERYWHERE
    def test_in_backward_change_no_replay(self, where: Where) -> None:
        steps = [backward_under(Doubles)] * 3
        assert_same(around(lambda h: (h * 2).exp().sin()), where, steps=steps)

    @EVERYWHERE
    def test_write_what_no_op_is_given(self, where: Where) -> None:
        assert_same(around_module(ZeroesABuffer), where)

    @EVERYWHERE
    def test_a_batched_backward_draws_again(self, where: Where) -> None:
        def batched(model: nn.Module, x: Tensor) -> Tensor:
            loss: Tensor = model(x)
            parameters = list(model.parameters())
            ones = torch.ones(2, device=x.device)
            found = torch.autograd.grad(
                loss, parameters, ones, is_grads_batched=True, allow_unused=True
            )
            for parameter, gradients in zip(parameters, found, strict=True):
                parameter.grad = None if gradients is None else gradients[0].clone()
            return loss

        noisy = around(lambda h: (h + torch.rand_like(h)).exp().sin())
        assert_same(noisy, where, steps=[batched] * 3)
