"""Writes: in place, through views, behind the dispatcher's back (design.md §4).

Each test is a small model for which an engine that only replays ops by name gives
wrong gradients without a word. Other hazards: ``test_replay_hazards_*.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memscale import replay
from replay_cases import (
    EVERYWHERE,
    ON_SIM,
    WIDTH,
    Block,
    Hazard,
    Where,
    around,
    assert_same,
    of_blocks,
)

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")


class TestSomethingIsDropped:
    """An engine that keeps everything is right, too, and good for nothing."""

    @EVERYWHERE
    def test_saves_are_dropped_and_ops_replayed(self, where: Where) -> None:
        stats = assert_same(around(torch.exp), where)
        assert stats.ops_recorded > stats.ops_replayed > 0
        assert stats.saves_dropped > 0
        assert stats.bytes_dropped > 0

    @pytest.mark.parametrize("device", ["cpu", "sim"])
    def test_keep_drops_nothing(self, device: str) -> None:
        stats = assert_same(around(torch.exp), Where("keep", device), drops=False)
        assert (stats.saves_dropped, stats.bytes_dropped) == (0, 0)
        assert stats.ops_replayed == 0

    @pytest.mark.parametrize("device", ["cpu", "sim"])
    def test_block_replays_more_than_cheap(self, device: str) -> None:
        """With matmuls that are worth keeping; those of the other tests are not."""

        class Wide(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.up, self.down = nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH)
                self.inner = nn.Linear(256, 256)

            def forward(self, x: Tensor) -> Tensor:
                out: Tensor = self.down(self.inner(self.up(x).sin()).tanh()) + x
                return out

        def wide_rows() -> Tensor:
            return torch.randn(64, WIDTH)

        cheap, block = (
            assert_same(of_blocks(Wide), Where(policy, device), batch=wide_rows)
            for policy in ("cheap", "block")
        )
        assert block.ops_replayed > cheap.ops_replayed

    @ON_SIM
    def test_the_device_holds_fewer_bytes_after_forward(self, where: Where) -> None:
        def held(policy: str | dict[str, str]) -> int:
            model = around(lambda h: h.exp().sqrt().sigmoid())().to("sim")
            x = torch.randn(4096, WIDTH).to("sim")
            before = torch.accelerator.memory_allocated()
            handle = replay.attach(model, policy, min_bytes=0)
            loss = model(x)
            after = torch.accelerator.memory_allocated()
            loss.backward()
            handle.detach()
            return after - before

        assert held(where.policy) < held("keep") // 2


def residual(h: Tensor) -> Tensor:
    out = h * 2
    out += h
    return out.relu_()


def on_a_kept_value(h: Tensor) -> Tensor:
    """What a matmul gave is worth keeping; its value is then another one."""
    out = torch.mm(h, h.t() @ h)
    out.mul_(0.5).add_(1)
    return out.sigmoid()


def on_a_replayed_value(h: Tensor) -> Tensor:
    out = h + 1
    out.mul_(3)
    out.sub_(h)
    return out.tanh_()


def after_a_drop(h: Tensor) -> Tensor:
    """``sin`` saves ``doubled``; where that came from is gone when it is wanted."""
    doubled = h * 2
    wave = doubled.sin()
    h.add_(1)
    return wave + h.cos()


def twice_after_drops(h: Tensor) -> Tensor:
    first = (h * 2).sin()
    h.add_(1)
    second = (h * 2).sin()
    h.mul_(-1)
    return first + second + (h * 2).sin()


def through_a_view(h: Tensor) -> Tensor:
    h[:, :4].mul_(3)
    h.view(-1)[::2].add_(1)
    h.t()[1].sub_(2)
    return h.sin()


def under_a_view(h: Tensor) -> Tensor:
    """The view was taken before its base changed."""
    part = h[1:, 2:5]
    h.mul_(3)
    return torch.cat([part.sin().flatten(), h.sin().flatten()])[: h.numel()].view_as(h)


def between_two_views(h: Tensor) -> Tensor:
    left, right = h[:, :4], h[:, 4:]
    early = (right * 2).sin()
    left.mul_(3)
    right.add_(left.detach())
    return torch.cat([early, right.cos()], dim=1)


def chained_results(h: Tensor) -> Tensor:
    """Each op saves what it has just written."""
    return h.sigmoid_().mul(2).exp_().add(1).sqrt_()


def copied_into_parts(h: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    out[:, :4] = h[:, 4:].sin()
    out[:, 4:] = out[:, :4] * 2
    return out * out.detach()


def filled(h: Tensor) -> Tensor:
    scale = torch.empty_like(h)
    scale.fill_(2)
    wave = (h + scale).sin()
    scale.zero_()
    return wave + scale


def one_part_of_an_empty(h: Tensor) -> Tensor:
    """A write to one half does not make the other half known."""
    with torch.no_grad():
        scale = torch.empty_like(h)
        scale[:, 4:].copy_(h[:, :4])
        scale[:, :4].normal_()
    return h * scale


def clamped_and_copied(h: Tensor) -> Tensor:
    out = torch.empty_like(h).copy_(h)
    return out.clamp_(min=-0.5).mul_(out.detach().clone())


def transposed_in_place(h: Tensor) -> Tensor:
    """The same bytes under another shape: no op of arithmetic at all."""
    out = h * 2
    out.t_()
    out.unsqueeze_(0).squeeze_(0)
    return out.sin().t()


class TestInPlace:
    @EVERYWHERE
    @pytest.mark.parametrize(
        "hazard",
        [
            residual,
            on_a_kept_value,
            on_a_replayed_value,
            after_a_drop,
            twice_after_drops,
            through_a_view,
            under_a_view,
            between_two_views,
            chained_results,
            copied_into_parts,
            filled,
            one_part_of_an_empty,
            clamped_and_copied,
            transposed_in_place,
        ],
    )
    def test_write(self, hazard: Hazard, where: Where) -> None:
        assert_same(around(hazard), where)

    @EVERYWHERE
    def test_on_the_input_of_the_layer(self, where: Where) -> None:
        """The one thing that a block keeps is not what it was."""

        class Layer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(WIDTH, WIDTH)

            def forward(self, x: Tensor) -> Tensor:
                wave = (x * 2).sin()
                x.mul_(0.5)
                out: Tensor = self.inner(F.silu(wave * 3)) + x
                return out

        # Nothing is left of it to start from: the block between has drops.
        build = of_blocks(Layer, lambda: Block(torch.exp), Layer)
        assert_same(build, where)

    @EVERYWHERE
    def test_on_a_view_of_the_input_of_the_layer(self, where: Where) -> None:
        class Layer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(WIDTH, WIDTH)

            def forward(self, x: Tensor) -> Tensor:
                wave = (x + 1).exp()
                x[:, ::2] = wave[:, ::2].detach()
                out: Tensor = self.inner(F.silu(wave.sigmoid() * 3)) + x
                return out

        build = of_blocks(Layer, lambda: Block(torch.exp), Layer)
        assert_same(build, where)

    @EVERYWHERE
    def test_on_the_batch(self, where: Where) -> None:
        class Normalising(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = around(torch.tanh)()

            def forward(self, x: Tensor) -> Tensor:
                scale = (x * 3).cos()
                x.sub_(x.mean()).div_(x.std())
                loss: Tensor = self.net(x * scale)
                return loss

        assert_same(Normalising, where)

    @EVERYWHERE
    def test_by_the_next_layer(self, where: Where) -> None:
        """``ReLU(inplace=True)`` is a layer of its own here."""

        def build() -> nn.Module:
            return nn.Sequential(
                nn.Linear(WIDTH, WIDTH),
                nn.ReLU(inplace=True),
                nn.Linear(WIDTH, WIDTH),
                nn.Dropout(0.3, inplace=True),
                nn.Hardtanh(inplace=True),
                nn.LayerNorm(WIDTH),
                nn.SiLU(),
                nn.Linear(WIDTH, 1),
            )

        def with_loss(model: nn.Module, x: Tensor) -> Tensor:
            loss: Tensor = model(x).square().sum()
            loss.backward()
            return loss

        assert_same(build, where, steps=[with_loss] * 3)


INDEX = [0, 2, 2, 5]

# What is written over, what is written, and where.
Write = Callable[[Tensor, Tensor, Tensor], Tensor]
WRITES: dict[str, Write] = {
    "index_put": lambda h, v, i: h.index_put_((i,), v[i]),
    "index_put_accumulate": lambda h, v, i: h.index_put_((i,), v[i], accumulate=True),
    "masked_fill": lambda h, v, i: h.masked_fill_(v > 0, 0.25),
    "masked_scatter": lambda h, v, i: h.masked_scatter_(v.detach() > 0, v),
    "scatter": lambda h, v, i: h.scatter_(0, i[:, None].expand(4, WIDTH), 0.5),
    "scatter_add": lambda h, v, i: h.scatter_add_(0, i[:, None].expand(4, 8), v[:4]),
    "scatter_reduce": lambda h, v, i: h.scatter_reduce_(
        0, i[:, None].expand(4, WIDTH), v[:4], "sum"
    ),
    "index_add": lambda h, v, i: h.index_add_(0, i, v[i], alpha=2),
    "index_copy": lambda h, v, i: h.index_copy_(0, i[:2], v[i[:2]]),
    "index_fill": lambda h, v, i: h.index_fill_(0, i, 0.25),
    "put": lambda h, v, i: h.put_(i, v.flatten()[i], accumulate=True),
    "fill_diagonal": lambda h, v, i: h.fill_diagonal_(0.5),
    "triangle": lambda h, v, i: h.tril_(),
    "lerp": lambda h, v, i: h.lerp_(v, 0.3),
    "addcmul": lambda h, v, i: h.addcmul_(v, v.detach(), value=0.5),
    "addmm": lambda h, v, i: h.addmm_(v, h.new_ones(WIDTH, WIDTH)),
}


@EVERYWHERE
@pytest.mark.parametrize("name", WRITES)
def test_indexed_write(name: str, where: Where) -> None:
    """The written-over value, the index and the new value are each a lineage."""
    index = torch.tensor(INDEX).to(where.device)

    def hazard(h: Tensor) -> Tensor:
        wave = (h * 2).sin()
        return wave * WRITES[name](h, wave, index).cos()

    assert_same(around(hazard), where)


@EVERYWHERE
def test_out_arguments(where: Where) -> None:
    """``out=`` resizes, writes, and returns what it was given."""

    def hazard(h: Tensor) -> Tensor:
        with torch.no_grad():
            scale = torch.empty(0, device=h.device)
            torch.mul(h, 2, out=scale)
            wave = scale.sin()
            torch.add(scale, 1, out=scale)
            largest, where_ = torch.empty_like(h[0]), h.new_empty(WIDTH).long()
            torch.max(h, 0, out=(largest, where_))
        return h * scale * wave * largest + where_

    assert_same(around(hazard), where)


@EVERYWHERE
def test_foreach_ops(where: Where) -> None:
    """One op, many results; the in-place ones return nothing at all."""

    def hazard(h: Tensor) -> Tensor:
        a, b = torch._foreach_mul([h, h + 1], 2.0)
        torch._foreach_add_([a, b], [h.detach(), h.sin()])
        torch._foreach_tanh_([a])
        return torch._foreach_sigmoid([a, b])[1] * a

    assert_same(around(hazard), where)


@EVERYWHERE
def test_set_and_resize(where: Where) -> None:
    """A tensor that gets another storage, and one that gets another size."""

    def hazard(h: Tensor) -> Tensor:
        with torch.no_grad():
            other = torch.empty(0, device=h.device)
            other.set_((h * 2).untyped_storage(), 0, h.shape, h.stride())
            grown = torch.ones(2, device=h.device).resize_(h.shape).copy_(h)
            other.mul_(grown)
        out = h * (other + 1) * (grown + 1)
        with torch.no_grad():
            other.set_(torch.zeros(3, device=h.device).untyped_storage())
        return out

    assert_same(around(hazard), where)


@EVERYWHERE
def test_writes_through_data(where: Where) -> None:
    """``.data`` has a version of its own: eager uses the new value, and so do we."""

    def hazard(h: Tensor) -> Tensor:
        doubled = h * 2
        wave = doubled.sin()
        doubled.data.mul_(0.5)
        return wave + doubled

    assert_same(around(hazard), where)


@EVERYWHERE
def test_data_of_a_lineage(where: Where) -> None:
    """Here the value written over is not saved, but what was made from it is."""

    def hazard(h: Tensor) -> Tensor:
        wave = (h * 2).sin()
        h.data.zero_()
        return wave + h

    assert_same(around(hazard), where)
