"""What torch's tests ask of selective checkpointing, asked of replay.

Which ops run again, counted; what stays alive, in bytes; ops with several outputs,
with outputs that are no tensors, in place, on views, on tensor subclasses. The
questions are those of torch's test_autograd.py, the code is ours.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from memscale import memory
from replay_twins import WIDTH, Wrapped, batch, blocks, twins

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")

both_policies = pytest.mark.parametrize("policy", ["cheap", "block"])
both_devices = pytest.mark.parametrize("device", ["cpu", "sim"])


# Which ops run again.


def ops_run(model: nn.Module, x: torch.Tensor) -> collections.Counter[str]:
    """How often each op ran in a step, replayed ones included."""
    with torch.profiler.profile() as profile:
        model(x).sum().backward()
    return collections.Counter(event.name for event in profile.events() or ())


def test_cheap_runs_no_large_matmul_again() -> None:
    pair = twins(blocks(width=256), "cheap")
    x = batch(width=256)
    plain, ours = ops_run(pair.plain, x), ops_run(pair.ours, x)
    assert plain["aten::addmm"] == ours["aten::addmm"] == 6
    assert plain["aten::mm"] == ours["aten::mm"] > 0
    # Each is read by the matmul after it, and is cheap.
    assert (plain["aten::gelu"], ours["aten::gelu"]) == (3, 6)


def test_block_runs_each_op_again_at_most_once() -> None:
    pair = twins(blocks(), "block")
    plain, ours = ops_run(pair.plain, batch()), ops_run(pair.ours, batch())
    assert 6 + 3 <= ours["aten::addmm"] <= 2 * 6
    assert ours["aten::gelu"] == 2 * plain["aten::gelu"] == 6
    assert plain["aten::mm"] == ours["aten::mm"]


def test_block_drops_more_than_cheap() -> None:
    dropped = []
    for policy in ("keep", "cheap", "block"):
        pair = twins(blocks(width=256), policy)
        pair.assert_same_step(batch(width=256))
        dropped.append(pair.handle.stats().bytes_dropped)
    assert 0 == dropped[0] < dropped[1] < dropped[2]


def test_keep_runs_nothing_again() -> None:
    pair = twins(blocks(), "keep")
    plain, ours = ops_run(pair.plain, batch()), ops_run(pair.ours, batch())
    for name in ("aten::addmm", "aten::gelu", "aten::tanh", "aten::bernoulli_"):
        assert plain[name] == ours[name] == (6 if name == "aten::addmm" else 3)


def test_only_the_named_layer_runs_again() -> None:
    pair = twins(blocks(), {"1": "block"})
    assert ops_run(pair.ours, batch())["aten::gelu"] == 3 + 1
    assert pair.handle.stats().ops_replayed > 0


def test_smaller_tensors_are_kept() -> None:
    """The least size divides the saves: none, some, all of them are dropped."""
    dropped = []
    for min_bytes in (1 << 20, batch().nbytes + 1, 0):
        pair = twins(blocks(), "block", min_bytes=min_bytes)
        pair.assert_same_step(batch())
        dropped.append(pair.handle.stats().saves_dropped)
    assert 0 == dropped[0] < dropped[1] < dropped[2]


def test_statistics_start_again() -> None:
    pair = twins(blocks(), "block")
    pair.assert_same_step(batch())
    first = pair.handle.stats()
    pair.handle.reset_stats()
    assert pair.handle.stats().saves_dropped == 0
    pair.assert_same_step(batch())
    assert pair.handle.stats() == first


# What an op may look like.


def scale_and_count(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return x.exp(), x.numel()


@torch.library.custom_op("replay_tests::scale_and_count", mutates_args=())
def scale_and_count_op(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return scale_and_count(x)


def _save(ctx: object, inputs: tuple[torch.Tensor], output: object) -> None:
    ctx.save_for_backward(output[0])  # type: ignore[attr-defined,index]


def _back(ctx: object, grad: torch.Tensor, _: object) -> torch.Tensor:
    (y,) = ctx.saved_tensors  # type: ignore[attr-defined]
    return grad * y


scale_and_count_op.register_autograd(_back, setup_context=_save)


def non_tensor_output(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y, count = scale_and_count_op(torch.sin(x @ weight))
    return torch.sin(y) / count


def one_output_of_several(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = x @ weight
    values, indices = y.exp().sort(dim=1)
    largest, _ = y.sin().max(dim=1, keepdim=True)
    parts = y.cos().split([2, 6], dim=1)
    return values.gather(1, indices) * largest + parts[1].sum(1, keepdim=True).exp()


def written_in_place(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = torch.sigmoid(x @ weight)
    z = y * y.detach().clone()
    z.mul_(2.0).add_(x)
    z[:, ::2] = y[:, ::2].exp()
    return torch.where(z > 1, z.log(), z.square())


def views_of_views(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(x @ weight).t()
    grid = y.unflatten(0, (2, -1)).transpose(0, 2)
    wide = grid[..., None, 0].expand(-1, -1, 3).flip(0)
    diagonal = torch.as_strided(y.contiguous(), (4, 2), (3, 1))
    return wide.exp().sum() * diagonal.square().sum() * y.mT.movedim(0, 1).cos()


def random_and_made(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = x @ weight
    noise = torch.randn(y.shape, dtype=y.dtype, device=y.device).abs_()
    order = torch.arange(WIDTH, device=y.device, dtype=y.dtype)
    mask = torch.empty_like(y).bernoulli_(0.5)
    full = torch.full_like(y, 2.0)
    return torch.pow(y.abs() + noise, full) * mask + y.sin() * order


def custom_generator(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(11)
    noise = torch.randn(4, WIDTH, generator=generator)
    more = torch.empty(4, WIDTH).normal_(generator=generator)
    return torch.exp((x @ weight).sin() * noise) * more


def indexed(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = (x @ weight).exp()
    rows = torch.tensor([0, 2, 2, 1])
    y = y.index_put((rows,), y.cos(), accumulate=True)
    y = y.scatter_add(0, rows[:, None].expand(-1, WIDTH), y.sin())
    return y[y > 1].square().sum() + torch.take_along_dim(y, y.argsort(1), 1)


def mixed_types(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = torch.complex(x @ weight, x.sin()).conj()
    low = y.abs().to(torch.bfloat16).exp()
    return (y * y.conj()).real.double().sqrt() * low


FUNCTIONS: list[Callable[..., torch.Tensor]] = [
    non_tensor_output,
    one_output_of_several,
    written_in_place,
    views_of_views,
    random_and_made,
    custom_generator,
    indexed,
    mixed_types,
]


@both_policies
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_ops_of_each_kind(function: Callable[..., torch.Tensor], policy: str) -> None:
    pair = twins(Wrapped(function), policy)
    for _ in range(2):
        pair.assert_same_step(batch())
    # Under "cheap" a function may save nothing but the matmul's output.
    assert pair.handle.stats().saves_dropped > 0 or policy == "cheap"


@both_policies
def test_tensor_subclasses_are_kept(policy: str) -> None:
    def function(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x @ x.T).exp().cos()

    pair = twins(Wrapped(function), policy)

    def step(model: nn.Module) -> list[torch.Tensor]:
        x: Any = TwoTensor(batch(), batch().cos()).requires_grad_()
        model(x).sum().backward()
        return [x.grad.a, x.grad.b]

    plain, ours = pair.both(step)
    assert all(map(torch.equal, plain, ours))
    assert pair.handle.stats().saves_dropped == 0


@both_policies
@pytest.mark.parametrize("when", ["in the layer", "after the call", "the input"])
def test_writes_after_a_save_are_reported(policy: str, when: str) -> None:
    """torch's error, word for word but for the numbers of versions."""

    def function(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = torch.exp(x @ weight)
        z = y.sin()
        if when == "in the layer":
            y.add_(1)
        return z if when == "the input" else y + z if when == "in the layer" else y

    def step(model: nn.Module) -> str:
        x = batch()
        out = model(x)
        if when == "after the call":
            with torch.no_grad():
                out.mul_(2)
        if when == "the input":
            x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace") as raised:
            out.sum().backward()
        return str(raised.value)

    plain, ours = twins(Wrapped(function), policy).both(step)
    assert plain.split("[")[0] == ours.split("[")[0]


def test_a_long_chain_needs_no_deep_stack() -> None:
    """Each op of it runs again once, and none calls the next."""

    def function(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = x @ weight
        for _ in range(20_000):
            y = torch.sin(y)
        return y

    pair = twins(Wrapped(function), "block")
    pair.assert_same_step(batch())
    assert 19_000 < pair.handle.stats().ops_replayed <= 20_001


# What stays alive.


def held_by(model: nn.Module, device: str) -> tuple[int, int, int]:
    """Bytes held after forward and after backward, and the peak of the step."""
    x = batch(device, rows=256)
    model(x).sum().backward()
    with memory.track(device) as tracker:
        loss = model(x).sum()
        forward = tracker.current
        loss.backward()
        del loss
        before = tracker.before
        return forward - before, tracker.current - before, tracker.peak - before


@both_devices
def test_block_holds_little_and_peaks_lower(device: str) -> None:
    pair = twins(blocks(8), "block", device)
    plain, ours = held_by(pair.plain, device), held_by(pair.ours, device)
    assert plain[1] == ours[1] == 0
    # A block saves about ten times its input, which is all that it need keep.
    assert 4 * ours[0] < plain[0]
    assert 2 * ours[2] < plain[2]


@both_policies
@both_devices
def test_a_graph_that_is_thrown_away_frees_all(policy: str, device: str) -> None:
    pair = twins(blocks(), policy, device)
    x = batch(device, rows=64)
    with memory.track(device) as tracker:
        loss = pair.ours(x).sum()
        assert tracker.current > tracker.before
        del loss
        assert tracker.current == tracker.before


@both_policies
def test_retained_graphs_do_not_grow(policy: str) -> None:
    pair = twins(blocks(), policy)
    loss = pair.ours(batch(rows=64)).sum()
    held = []
    with memory.track("cpu") as tracker:
        for _ in range(4):
            loss.backward(retain_graph=True)
            held.append(tracker.current)
    assert len(set(held[1:])) == 1


def test_values_live_no_longer_than_their_readers() -> None:
    """Half of the outputs are used: the graph of the other half is not held."""

    def function(weight: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x @ weight
        return F.gelu(y).exp(), F.silu(y).exp()

    pair = twins(Wrapped(function), "cheap")
    x = batch(rows=64)
    with memory.track("cpu") as tracker:
        used, unused = pair.ours(x)
        both = tracker.current
        del unused
        assert tracker.current < both
        used.sum().backward()
        del used
        weight = next(pair.ours.parameters())
        assert weight.grad is not None
        assert tracker.current - tracker.before == weight.grad.nbytes
