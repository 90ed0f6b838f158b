"""What is different on real cards, as far as the simulated one can show it.

It has streams, events with times and a generator that exchanges its state, as CUDA
has; and it can be taken for a CUDA card, so that what is kept there is kept here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memscale
from memscale import _C, _simdev, replay
from memscale._C import OpTimes, TapeRules, replayed_step
from memscale.model.layers import find_layers
from replay_cases import (
    ON_SIM,
    ROWS,
    WIDTH,
    Where,
    around,
    around_module,
    assert_same,
    step,
    train,
)

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")

BLOCK = Where("block", "sim")


# ---- generators ----


@ON_SIM
def test_the_default_generator_is_not_seeded(where: Where) -> None:
    before = _simdev.num_set_states()
    stats = assert_same(around(lambda h: torch.native_dropout(h, 0.3, True)[0]), where)
    assert stats.ops_replayed > 0
    assert _simdev.num_set_states() == before


def test_a_generator_that_shares_its_state_still_does() -> None:
    generator = _simdev.default_generator()
    shared = generator.graphsafe_get_state()
    train(around(lambda h: F.dropout(h, 0.3)), BLOCK, attached=True)
    torch.rand(5, device="sim")
    assert torch.equal(generator.get_state(), shared.get_state())


# ---- streams ----


def _counted(model: nn.Module, attached: bool, x: Tensor) -> tuple[int, int]:
    """Waits between streams and storages recorded on one, in a step."""
    handle = replay.attach(model, "block", min_bytes=0) if attached else None
    try:
        before = _simdev.stream_counts()
        model(x).sum().backward()
        after = _simdev.stream_counts()
        assert handle is None or handle.stats().ops_replayed > 0
    finally:
        if handle is not None:
            handle.detach()
    return after[0] - before[0], after[1] - before[1]


class _TwoStreams(nn.Module):
    """The second half on a stream of its own: its backward replays the first there."""

    def __init__(self, other: torch.Stream) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.other = other

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x).sin()
        here = torch.accelerator.current_stream()
        with self.other:
            self.other.wait_stream(here)
            y = h.cos()
        here.wait_stream(self.other)
        return y


def test_bytes_of_another_stream_are_waited_for_and_held() -> None:
    torch.manual_seed(0)
    model = _TwoStreams(torch.Stream(device="sim")).to("sim")
    x = torch.randn(ROWS, WIDTH, device="sim", requires_grad=True)
    plain = _counted(model, False, x)
    gradient, x.grad = x.grad, None
    ours = _counted(model, True, x)
    assert ours[0] > plain[0]
    assert ours[1] > plain[1]
    assert gradient is not None
    assert x.grad is not None
    assert torch.equal(gradient, x.grad)


def test_one_stream_waits_for_nobody() -> None:
    model = around(lambda h: h.exp().sin())().to("sim")
    x = torch.randn(ROWS, WIDTH, device="sim")
    assert _counted(model, True, x)[0] == 0


# ---- copies to the host ----


@pytest.mark.parametrize("non_blocking", [False, True])
def test_copies_that_nobody_waited_for_are_kept(non_blocking: bool) -> None:
    def hazard(h: Tensor) -> Tensor:
        there = (h * 2).to("cpu", non_blocking=non_blocking)
        return there.sin().to("sim") + h

    stats = assert_same(around(hazard), BLOCK)
    reason = "aten::_to_copy: a copy to the host that nobody has waited for"
    assert (reason in stats.kept_because) == non_blocking


def test_writes_into_host_memory_that_nobody_waited_for_are_kept() -> None:
    def hazard(h: Tensor) -> Tensor:
        there = torch.empty(h.shape).copy_((h * 2).detach(), non_blocking=True)
        return (h.cpu() * there).to("sim")

    stats = assert_same(around(hazard), BLOCK)
    assert any("nobody has waited for" in why for why in stats.kept_because)


# ---- as on CUDA ----


@pytest.fixture
def as_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "TapeRules", functools.partial(TapeRules, as_cuda=True))


@contextmanager
def _benchmarks() -> Iterator[None]:
    # Torch's own tests forbid to set the flag itself, for the process.
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        yield


def _image(h: Tensor) -> Tensor:
    return h.reshape(1, 1, ROWS, WIDTH)


class _Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(1, 2, 2, stride=2)

    def forward(self, h: Tensor) -> Tensor:
        return self.up(_image(h)).sin().sum() * h


class _Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 2, 3, padding=1)

    def forward(self, h: Tensor) -> Tensor:
        return self.convolution(_image(h)).sin().sum() * h


def _unpooled(h: Tensor) -> Tensor:
    pooled, indices = F.max_pool2d(_image(h), 2, return_indices=True)
    return F.max_unpool2d(pooled, indices, 2).sin().sum() * h


UNORDERED: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda h: h.cumsum(0).sin(),
    "cumprod": lambda h: h.cumprod(0).sin(),
    "logcumsumexp": lambda h: h.logcumsumexp(0).sin(),
    "kthvalue": lambda h: h.kthvalue(2, 0)[0].sin() + h,
    "median": lambda h: h.median(0)[0].sin() + h,
    "index_copy": lambda h: h.index_copy(
        0, torch.tensor([1, 0], device=h.device), h[:2] * 2
    ).sin(),
    "max_unpool2d": _unpooled,
}


@pytest.mark.usefixtures("as_cuda")
@pytest.mark.parametrize("name", UNORDERED)
def test_sums_without_order_are_kept(name: str) -> None:
    stats = assert_same(around(UNORDERED[name]), BLOCK)
    kept = [why for why in stats.kept_because if why.endswith("no fixed order")]
    assert any(name in why for why in kept), stats.kept_because


@pytest.mark.usefixtures("as_cuda")
def test_transposed_convolutions_are_kept() -> None:
    stats = assert_same(around_module(_Transposed), BLOCK)
    assert "aten::convolution: sums in no fixed order" in stats.kept_because
    stats = assert_same(around_module(_Convolution), BLOCK)
    assert not stats.kept_because


@pytest.mark.usefixtures("as_cuda")
def test_convolutions_are_kept_where_cudnn_benchmarks() -> None:
    with _benchmarks():
        stats = assert_same(around_module(_Convolution), BLOCK)
    reason = "cudnn.benchmark may choose another algorithm in backward"
    assert f"aten::convolution: {reason}" in stats.kept_because


class _Sums(nn.Module):
    """Large enough to be dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {"a": nn.Linear(64, 64), "up": nn.ConvTranspose1d(1, 2, 2, stride=2)}
            )
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer["a"](x).sin().cumsum(0).cos()
            up = layer["up"](h[:, None]).sin()
            x = up.mean(1)[:, ::2].exp().cos() + h
        return x.square().mean()


@pytest.mark.usefixtures("as_cuda")
def test_predicted_is_what_is_kept() -> None:
    model = _Sums()
    x = torch.randn(512, 64)
    plain = memscale.estimate(model, x, "sgd", device="sim").trace
    rules = [TapeRules("block", None, replay.DEFAULT_MIN_BYTES) for _ in plain.layers]
    predicted = replayed_step(plain, rules, on_cpu=False, on_cuda=True)
    elsewhere = replayed_step(plain, rules, on_cpu=False)
    model.to("sim")
    handle = replay.attach(model, "block")
    step(model, x.to("sim"))
    stats = handle.stats()
    handle.detach()
    assert stats.ops_replayed == predicted.num_replayed
    assert predicted.num_replayed < elsewhere.num_replayed


def test_a_plan_for_a_card_knows_what_is_kept_there() -> None:
    """cumsum is recomputed on the simulated device, and kept on a named card."""
    model, x = _Sums(), torch.randn(512, 64)
    config = memscale.Config(force_optimize=True)
    on_card, elsewhere = (
        memscale.pareto(model, x, "sgd", config, device=device)[0]
        for device in ("RTX 3090", "sim")
    )
    assert on_card.peak_bytes > elsewhere.peak_bytes


# ---- times ----


def _times_of(device: torch.device) -> bool:
    """Whether a plan hears of times that were measured while calling ``device``."""
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), torch.randn(2, WIDTH)
    trace = memscale.estimate(model, x, "sgd").trace
    times = OpTimes()
    engine = _C.Replay(device, [TapeRules("keep", None, 0)] * 4)
    engine.time_ops(times)
    assert engine.enter()
    for index, name in enumerate(find_layers(model).modules):
        if name:
            engine.enter_layer(index)
            x = model.get_submodule(name)(x)
            engine.leave_layer()
    engine.leave([])
    engine.time_ops(None)
    names = list(find_layers(model).modules)
    return times.applied_to(trace, _C.CostModel.of_cpu(), names) != trace


def test_times_are_the_devices_own() -> None:
    assert _C.can_time(torch.device("cpu"))
    assert _C.can_time(torch.device("sim"))
    assert _times_of(torch.device("cpu"))


def test_how_long_a_launch_takes_is_no_time() -> None:
    """Where a device tells no times, as meta does not, none are given to a plan."""
    assert not _C.can_time(torch.device("meta"))
    assert not _times_of(torch.device("meta"))


def test_replay_is_timed_by_the_devices_events() -> None:
    model = around(lambda h: h.exp().sin())().to("sim")
    x = torch.randn(ROWS, WIDTH, device="sim")
    handle = replay.attach(model, "block", min_bytes=0)
    step(model, x)
    before = handle.stats()
    handle.time_ops(OpTimes())
    step(model, x)
    handle.time_ops(None)
    after = handle.stats()
    handle.detach()
    assert before.nanoseconds_replayed == 0  # nobody asked for it
    assert after.nanoseconds_replayed > 0


# ---- precision ----


def test_plans_know_whether_matmuls_may_use_tf32() -> None:
    before = torch.get_float32_matmul_precision()
    model, x = nn.Sequential(nn.Linear(256, 256), nn.GELU()), torch.randn(4096, 256)
    times = {}
    try:
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            for card in ("A100 40GB", "RTX 3090"):
                made = memscale.plan(model, x, "sgd", device=card)
                times[precision, card] = made.plain_nanoseconds
    finally:
        torch.set_float32_matmul_precision(before)
    assert times["high", "A100 40GB"] < times["highest", "A100 40GB"]
    assert times["high", "A100 40GB"] < times["high", "RTX 3090"]
    assert _C.allowed_tf32() == (before != "highest", True)
