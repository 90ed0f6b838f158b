"""Storages that change behind a tensor's back: ``.data``, ``resize_``, other threads.

And what is held of passes without gradients: nothing.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from memscale import memory, replay
from replay_cases import (
    EVERYWHERE,
    ROWS,
    WIDTH,
    Hazard,
    Step,
    Where,
    around,
    around_module,
    assert_same,
    of_blocks,
)

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")


def undecided(h: Tensor) -> Tensor:
    """The save of y is held at first: dropping it would gain nothing yet."""
    y = h * 2
    z = y.sin()
    y.data.add_(1)
    return z


def alias_is_saved(h: Tensor) -> Tensor:
    """The save is of another version counter than the write."""
    y = h.detach() * 2
    z = h * y.data.cos()
    w = h * y.data
    y.add_(1)
    return z + w


class Returned(nn.Module):
    """What it returns is there anyway: at the end of the call saves are dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.linear(x) * 1.5
        return h, undecided(h)


def sum_of_both(model: nn.Module, x: Tensor) -> Tensor:
    first, second = model(x)
    loss: Tensor = first.sum() + second.sum()
    loss.backward()
    return loss


class Frees(nn.Module):
    """As reversible layers: an activation that autograd did not save is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("wide", torch.randn(ROWS, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        y = h.mean(1, keepdim=True) * 2
        out = (y + self.wide).sin()
        y.untyped_storage().resize_(0)
        return out * h


def free_between(model: nn.Module, x: Tensor) -> Tensor:
    """The batch is freed after forward; the stem's gradient needs no more of it."""
    doubled = x * 2
    loss: Tensor = model(doubled.detach())
    doubled.untyped_storage().resize_(0)
    loss.backward()
    return loss


class TestStorages:
    @EVERYWHERE
    @pytest.mark.parametrize("hazard", [undecided, alias_is_saved])
    def test_written_through_data(self, hazard: Hazard, where: Where) -> None:
        assert_same(around(hazard), where)

    @EVERYWHERE
    def test_written_through_data_before_saves_are_dropped(self, where: Where) -> None:
        assert_same(Returned, where, steps=[sum_of_both] * 3, drops=False)

    @EVERYWHERE
    def test_freed_by_hand(self, where: Where) -> None:
        assert_same(around_module(Frees), where)

    @EVERYWHERE
    def test_freed_by_hand_after_the_call(self, where: Where) -> None:
        class Masked(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(WIDTH, WIDTH)

            def forward(self, scale: Tensor) -> Tensor:
                wide = self.linear.weight[:1] + scale.mean(1, keepdim=True)
                return wide.sin().sum()

        steps: list[Step] = [free_between] * 3
        assert_same(Masked, where, steps=steps, drops=False)

    def test_freed_behind_our_back_raise(self) -> None:
        """Not through torch.UntypedStorage: nobody could copy, and nothing is read."""
        model = of_blocks(FreesUnseen)()
        handle = replay.attach(model, "block", min_bytes=100)
        try:
            with pytest.raises(RuntimeError, match="freed, resized or moved by hand"):
                model(torch.randn(ROWS, WIDTH)).backward()
        finally:
            handle.detach()

    def test_resize_is_torchs_own_when_nothing_is_attached(self) -> None:
        before = torch.UntypedStorage.resize_
        handle = replay.attach(nn.Linear(2, 2), "block")
        assert torch.UntypedStorage.resize_ is not before
        handle.detach()
        assert torch.UntypedStorage.resize_ is before


class DifferentiatesInside(nn.Module):
    """A hook of a backward inside of forward writes what the layer has read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(ROWS, 1) + 1)

    def forward(self, h: Tensor) -> Tensor:
        scale = self.scale.clone()
        out = (h + scale).sin().exp()
        leaf = torch.ones(3, device=h.device, requires_grad=True)

        def zero(_: Tensor) -> None:
            scale.data.zero_()

        leaf.register_hook(zero)
        torch.autograd.grad(leaf.square().sum(), leaf)
        return out * scale.sum()


def waiting_saves(model: nn.Module, x: Tensor) -> Tensor:
    """Saves that were replayed once wait for a second backward, and see writes."""
    hidden = x * 2
    loss: Tensor = model(hidden)
    loss.backward(retain_graph=True)
    model(x)  # which looks through what is needed still
    hidden.data.zero_()
    loss.backward()
    return loss


class TestInTime:
    @EVERYWHERE
    def test_hooks_of_a_backward_inside_of_forward_write(self, where: Where) -> None:
        assert_same(around_module(DifferentiatesInside), where)

    @EVERYWHERE
    def test_saves_that_wait_see_what_is_written(self, where: Where) -> None:
        assert_same(around(lambda h: h.exp().sin()), where, steps=[waiting_saves] * 3)

    def test_a_detached_alias_costs_no_copy(self) -> None:
        model = of_blocks(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()))()
        handle = replay.attach(model, "block", min_bytes=0)
        x = torch.randn(ROWS, WIDTH)
        loss = model(x)
        aliases = [x.detach(), *(p.detach() for p in model.parameters())]
        loss.backward()
        handle.detach()
        assert aliases
        assert handle.stats().bytes_copied == 0


class FreesUnseen(Frees):
    def forward(self, h: Tensor) -> Tensor:
        y = h.mean(1, keepdim=True) * 2
        out = (y + self.wide).sin()
        torch._C.StorageBase.resize_(y.untyped_storage(), 0)  # type: ignore[attr-defined]
        return out * h


# ---- passes without gradients ----


def test_passes_without_gradients_hold_nothing() -> None:
    """Bytes alive after forward are the same for one such pass and for six."""

    class Recycled(nn.Module):
        def __init__(self, passes: int) -> None:
            super().__init__()
            self.passes = passes
            self.layer = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            for i in range(self.passes):
                with torch.set_grad_enabled(i == self.passes - 1):
                    x = x + self.layer(x)
            return x

    def held(passes: int, policy: str) -> int:
        torch.manual_seed(0)
        model = Recycled(passes)
        handle = replay.attach(model, policy, min_bytes=1)
        x = torch.randn(256, 64)
        with memory.track("cpu") as tracked:
            out = model(x)
            most = tracked.peak - tracked.before
        del out
        handle.detach()
        return most

    for policy in ("cheap", "block"):
        assert held(6, policy) <= held(2, policy)
