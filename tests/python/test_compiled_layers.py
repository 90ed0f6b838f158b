"""Layers that are compiled get no tape: they hold what they hold without MemScale."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import memscale
from compat_twins import config_of
from memscale import replay
from memscale.calls.way_in import is_compiled, way_in_of
from memscale.memory import track

_WIDTH, _INNER, _BATCH, _BLOCKS, _STEPS = 64, 512, 128, 3, 3
Compile = Callable[[nn.Module, int, str], None]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(_WIDTH, _INNER)
        self.down = nn.Linear(_INNER, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        hidden = torch.sin(hidden * torch.sigmoid(hidden)) * 2  # with temporaries
        result: torch.Tensor = x + self.down(hidden)
        return result


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(_BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _in_place(model: nn.Module, index: int, backend: str) -> None:
    model.blocks[index].compile(backend=backend)  # type: ignore[union-attr, index, operator]


def _by_function(model: nn.Module, index: int, backend: str) -> None:
    blocks: nn.ModuleList = model.blocks  # type: ignore[assignment]
    blocks[index] = torch.compile(blocks[index], backend=backend)  # type: ignore[assignment]


def _a_part(model: nn.Module, index: int, backend: str) -> None:
    """Not the layer, but all that it is made of."""
    for part in model.blocks[index].children():  # type: ignore[union-attr, index]
        part.compile(backend=backend)


ways = pytest.mark.parametrize("compile_layer", [_in_place, _by_function, _a_part])
orders = pytest.mark.parametrize("order", ["before", "after"])


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _make() -> nn.Module:
    torch.manual_seed(0)
    return _Model()


def _measure(model: nn.Module) -> tuple[int, int, list[torch.Tensor]]:
    """Bytes that a step holds after forward, its peak, and its gradients."""
    x = torch.linspace(-1, 1, _BATCH * _WIDTH).view(_BATCH, _WIDTH)
    for _ in range(_STEPS - 1):
        model.zero_grad()
        model(x).backward()
    model.zero_grad()
    gc.collect()
    with track("cpu") as tracker:
        loss = model(x)
        held = tracker.current - tracker.before
        loss.backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return held, tracker.peak - tracker.before, grads


def _compile_all(model: nn.Module, compile_layer: Compile, backend: str) -> None:
    for index in range(_BLOCKS):
        compile_layer(model, index, backend)


def _compare(order: str, compile_layer: Compile, backend: str) -> None:
    plain = _make()
    _compile_all(plain, compile_layer, backend)
    held, peak, grads = _measure(plain)
    del plain
    torch._dynamo.reset()
    ours = _make()
    if order == "before":
        _compile_all(ours, compile_layer, backend)
    handle = replay.attach(ours, "cheap", min_bytes=0)
    if order == "after":
        _compile_all(ours, compile_layer, backend)
    our_held, our_peak, our_grads = _measure(ours)
    assert (our_held, our_peak) == (held, peak)
    assert all(map(torch.equal, grads, our_grads))
    # square() and mean(), which are outside of the layers; nothing inside of them.
    assert handle.stats().ops_recorded == _STEPS * 2
    assert handle.stats().saves_dropped == 0
    handle.detach()


@orders
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("compile_layer", [_in_place, _by_function])
def test_bytes_are_those_without_memscale(
    backend: str, compile_layer: Compile, order: str
) -> None:
    _compare(order, compile_layer, backend)


def test_the_comparison_sees_a_tape() -> None:
    """Layers that are not compiled hold less when attached."""
    held, _, _ = _measure(_make())
    model = _make()
    replay.attach(model, "cheap", min_bytes=0)
    assert _measure(model)[0] < held


@orders
def test_a_layer_beside_compiled_ones_is_recorded(order: str) -> None:
    plain, ours = _make(), _make()
    _in_place(plain, 0, "aot_eager")
    _, _, expected = _measure(plain)
    torch._dynamo.reset()
    if order == "before":
        _in_place(ours, 0, "aot_eager")
    handle = replay.attach(ours, "cheap", min_bytes=0)
    if order == "after":
        _in_place(ours, 0, "aot_eager")
    _, _, grads = _measure(ours)
    assert all(map(torch.equal, expected, grads))
    assert handle.stats().saves_dropped > 0


@ways
def test_what_was_compiled_stays_compiled_after_detach(compile_layer: Compile) -> None:
    model = _make()
    _compile_all(model, compile_layer, "eager")
    before = [module._compiled_call_impl for module in model.modules()]
    handle = replay.attach(model, "cheap", min_bytes=0)
    _measure(model)
    compiled = [m for m in model.modules() if is_compiled(m)]
    assert compiled
    assert all(way_in_of(module) is not None for module in compiled)
    handle.detach()
    assert [module._compiled_call_impl for module in model.modules()] == before
    assert [m for m in model.modules() if is_compiled(m)] == compiled
    assert not any(way_in_of(module) for module in model.modules())


def test_compiled_again_while_attached() -> None:
    model = _make()
    handle = replay.attach(model, "cheap", min_bytes=0)
    _measure(model)
    dropped = handle.stats().saves_dropped
    assert dropped > 0
    for _ in range(2):  # the second replaces our way in before the first
        _compile_all(model, _in_place, "eager")
        _measure(model)
        assert handle.stats().saves_dropped == dropped


def test_under_wrap() -> None:
    """There is no plan for compiled parts; what is done without one spares them."""
    plain = _make()
    _compile_all(plain, _in_place, "aot_eager")
    held, peak, grads = _measure(plain)
    torch._dynamo.reset()
    ours = memscale.wrap(_make(), config_of())
    _compile_all(ours, _in_place, "aot_eager")
    our_held, our_peak, our_grads = _measure(ours)
    assert (our_held, our_peak) == (held, peak)
    assert all(map(torch.equal, grads, our_grads))
    assert ours._memscale_executor.stats().saves_dropped == 0  # type: ignore[union-attr]
