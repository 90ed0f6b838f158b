"""Where a recorder is blind: nothing tells it that bytes change, or how.

Writes behind the dispatcher's back, ops of other threads, of compiled code and of
backwards inside of forward, and tensors that have no bytes at all.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from replay_cases import (
    EVERYWHERE,
    ON_CPU,
    ON_SIM,
    ROWS,
    WIDTH,
    Block,
    Hazard,
    Net,
    Where,
    around,
    around_module,
    assert_same,
    of_blocks,
    step,
)

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")


def numpy_into_empty(h: Tensor) -> Tensor:
    scale = torch.empty_like(h)
    scale.numpy()[:] = np.arange(h.numel(), dtype=np.float32).reshape(h.shape)
    return h * scale


def numpy_into_zeros(h: Tensor) -> Tensor:
    """Nothing is uninitialised here, and still nobody saw the write."""
    mask = torch.zeros_like(h)
    mask.numpy()[::2] = 1
    return h * mask


def numpy_into_part_of_empty(h: Tensor) -> Tensor:
    """An op wrote the other part: the whole is not known for that."""
    scale = torch.empty_like(h)
    scale[:, :4] = 2
    scale.numpy()[:, 4:] = 3
    return h * scale.sqrt()


def pointer_into_empty(h: Tensor) -> Tensor:
    scale = torch.empty_like(h)
    ctypes.memset(scale.data_ptr(), 0x3F, scale.nbytes)
    return h * scale


def storage_into_empty(h: Tensor) -> Tensor:
    scale = torch.empty_like(h)
    scale.untyped_storage().copy_((h.detach() * 2).untyped_storage())
    return h * scale.sin()


def array_of_the_caller(h: Tensor) -> Tensor:
    """The caller uses its staging array again, and no version tells."""
    staging = np.arange(h.numel(), dtype=np.float32).reshape(h.shape)
    scale = torch.from_numpy(staging) * 2
    out = h * scale
    staging[:] = 0
    return out


def op_of_a_closure(h: Tensor) -> Tensor:
    """A custom op writes into a tensor that is not among its arguments."""
    doubled = h.detach() * 2
    hidden.append(doubled)
    try:
        write_hidden(h.detach())
    finally:
        hidden.clear()
    return h * (doubled + 1).sin()


hidden: list[Tensor] = []


@torch.library.custom_op("memscale_unseen::write_hidden", mutates_args=())
def write_hidden(x: Tensor) -> Tensor:
    hidden[0].mul_(3)
    return x.clone()


class TestWrites:
    @ON_CPU
    @pytest.mark.parametrize(
        "hazard",
        [
            numpy_into_empty,
            numpy_into_zeros,
            numpy_into_part_of_empty,
            pointer_into_empty,
            storage_into_empty,
            array_of_the_caller,
            op_of_a_closure,
        ],
    )
    def test_nobody_tells(self, hazard: Hazard, where: Where) -> None:
        assert_same(around(hazard), where)

    @EVERYWHERE
    def test_by_another_thread(self, where: Where) -> None:
        """Its ops are not ours to see; the version is."""

        def hazard(h: Tensor) -> Tensor:
            doubled = h.detach() * 2
            early = (doubled + 1).sin()
            thread = threading.Thread(target=lambda: doubled.mul_(3))
            thread.start()
            thread.join()
            return h * early * (doubled + 1).cos()

        assert_same(around(hazard), where)

    @EVERYWHERE
    def test_of_a_value_made_by_another_thread(self, where: Where) -> None:
        def hazard(h: Tensor) -> Tensor:
            made: list[Tensor] = []
            thread = threading.Thread(target=lambda: made.append((h * 2).sin()))
            thread.start()
            thread.join()
            made[0].mul_(2)
            return (made[0] * h).cos()

        assert_same(around(hazard), where)

    @EVERYWHERE
    def test_by_a_backward_inside(self, where: Where) -> None:
        """Gradients add up in place, on the device's own thread."""
        if where.device == "sim":
            pytest.xfail("other threads' writes in forward are noticed, not undone")

        def hazard(h: Tensor) -> Tensor:
            leaf = h.detach().clone().requires_grad_()
            with torch.enable_grad():
                for scale in (1, 2, 3):
                    (leaf * scale).sin().sum().backward()
                    assert leaf.grad is not None
            gradient = leaf.grad
            assert gradient is not None
            early = (gradient * 2).sin()
            (leaf * 2).exp().sum().backward()
            return h * early * (gradient * 2).cos()

        assert_same(around(hazard), where)

    @EVERYWHERE
    def test_by_an_optimizer_inside(self, where: Where) -> None:
        """A few steps of descent make the result of the layer."""

        def hazard(h: Tensor) -> Tensor:
            leaf = h.detach().clone().requires_grad_()
            optimizer = torch.optim.Adam([leaf], lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                (leaf.exp() - h.detach()).square().sum().backward()
                optimizer.step()
            return h * (leaf.detach() * 2).sin()

        assert_same(around(hazard), where)

    @EVERYWHERE
    def test_by_the_next_forward(self, where: Where) -> None:
        """State of the first forward is changed in place by the second."""

        class Stateful(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.state: Tensor | None = None

            def forward(self, h: Tensor) -> Tensor:
                if self.state is None:
                    self.state = h.detach() * 2
                wave = (self.state + 1).sin()
                self.state.mul_(0.5).add_(h.detach())
                return h * wave

        def pairs(model: nn.Module, x: Tensor) -> Tensor:
            first, second = model(x), model(x * 2)
            first.backward()
            second.backward()
            result: Tensor = first + second
            return result

        assert_same(around_module(Stateful), where, steps=[pairs] * 3)

    @EVERYWHERE
    def test_of_a_view_that_a_layer_returned(self, where: Where) -> None:
        class Viewing(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(WIDTH, 2 * WIDTH)

            def forward(self, x: Tensor) -> Tensor:
                early = (x * 2).sin()
                x.mul_(0.5)
                wide = self.inner(F.silu(early * 3)) + 1
                return wide[:, ::2]

        build = of_blocks(Viewing, lambda: Block(torch.exp), Viewing)
        assert_same(build, where)


class TestCompiledCode:
    @ON_CPU
    @pytest.mark.parametrize("how", ["script", "trace"])
    @pytest.mark.filterwarnings("ignore")
    def test_torchscript(self, how: str, where: Where) -> None:
        def wave(h: Tensor) -> Tensor:
            return (h * 2).sin().mul_(3).exp().cos()

        compiled: Callable[[Tensor], Tensor]
        if how == "script":
            compiled = torch.jit.script(wave)
        else:
            compiled = torch.jit.trace(wave, torch.randn(ROWS, WIDTH))
        # It profiles for two calls, and runs another graph from then on.
        assert_same(around(lambda h: compiled(h * 2).sin()), where, steps=[step] * 5)

    @ON_CPU
    @pytest.mark.filterwarnings("ignore")
    def test_torch_compile_of_a_part(self, where: Where) -> None:
        torch._dynamo.reset()
        wave = torch.compile(lambda h: (h * 2).sin().exp(), backend="aot_eager")
        assert_same(around(lambda h: wave(h * 2).sin()), where)


class TestReadingTheGraph:
    @EVERYWHERE
    def test_in_forward(self, where: Where) -> None:
        """``grad_fn._saved_self`` unpacks while ops are still being recorded."""

        def hazard(h: Tensor) -> Tensor:
            wave = (h * 2).sin()
            assert wave.grad_fn is not None
            saved = wave.grad_fn._saved_self  # type: ignore[attr-defined]
            return (wave * saved.detach()).exp()

        assert_same(around(hazard), where)

    @EVERYWHERE
    def test_before_backward(self, where: Where) -> None:
        """As drawings of the graph do; every save is asked for once more."""

        def reading(model: nn.Module, x: Tensor) -> Tensor:
            loss: Tensor = model(x)
            todo, total = [loss.grad_fn], 0.0
            while todo:
                node = todo.pop()
                for name in dir(node):
                    saved = getattr(node, name) if name.startswith("_saved") else None
                    if isinstance(saved, Tensor):
                        total += saved.double().sum().item()
                todo += [n for n, _ in getattr(node, "next_functions", ()) if n]
            loss.backward()
            return loss * total

        build = around(lambda h: F.dropout((h * 2).sin().mul_(2), 0.3).exp())
        assert_same(build, where, steps=[reading] * 3)


class TestNoBytes:
    """Tensors whose storage cannot be asked for."""

    @ON_CPU
    def test_opaque(self, where: Where) -> None:
        def hazard(h: Tensor) -> Tensor:
            opaque = (h * 2).to_mkldnn()
            return (opaque.relu() * opaque).to_dense().sin()

        assert_same(around(hazard), where)

    @EVERYWHERE
    def test_meta(self, where: Where) -> None:
        """Shapes worked out without values, with a graph that nobody walks."""

        def hazard(h: Tensor) -> Tensor:
            shape = (
                (h * 2).to("meta").sin() @ torch.ones(WIDTH, 3, device="meta")
            ).shape
            return (h * shape[1]).sin()

        assert_same(around(hazard), where)

    @ON_CPU
    def test_vmap_with_randomness(self, where: Where) -> None:
        def hazard(h: Tensor) -> Tensor:
            noisy = torch.func.vmap(lambda r: F.dropout(r, 0.3), randomness="different")
            return (noisy(h * 2) * noisy(h.sin())).exp()

        assert_same(around(hazard), where)

    @ON_CPU
    def test_forward_mode(self, where: Where) -> None:
        """Tangents ride along; the result's gradient goes through both."""
        from torch.autograd import forward_ad

        def hazard(h: Tensor) -> Tensor:
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(h, torch.ones_like(h))
                value, tangent = forward_ad.unpack_dual((dual * 2).sin().exp())
                assert tangent is not None
                return value * tangent.tanh()

        assert_same(around(hazard), where)


@ON_SIM
def test_round_trip_through_the_host(where: Where) -> None:
    """A part of the layer runs on another device."""

    def hazard(h: Tensor) -> Tensor:
        host = F.dropout((h.cpu() * 2).sin().mul_(2), 0.3)
        return (host.exp().to(h.device, non_blocking=True) * h).sin()

    assert_same(around(hazard), where)


@EVERYWHERE
def test_values_known_to_both_models(where: Where) -> None:
    """A table computed by one model's forward, kept, and read by the other's."""
    table: list[Tensor] = []

    class Sharing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            table.clear()
            self.first = Net(lambda: Writer())
            self.second = Net(lambda: Reader())

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.first(x) + self.second(x)
            table.clear()
            return result

    class Writer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x).tanh()
            table.append(out)
            return out.sin()

    class Reader(Writer):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x * table.pop()).tanh()
            return out.sin()

    assert_same(Sharing, where)
