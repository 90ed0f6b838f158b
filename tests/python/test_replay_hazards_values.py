"""Values: what tensors are besides numbers in a row (design.md §4, hazard 7).

Views that overlap, results that are their own inputs, several results at once,
constants, dtypes that reinterpret bytes, subclasses, layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
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

FACTORIES: dict[str, Callable[[Tensor], Tensor]] = {
    "ones_like": torch.ones_like,
    "zeros_like": lambda h: torch.zeros_like(h) + 0.5,
    "full_like": lambda h: torch.full_like(h, 0.3),
    "new_ones": lambda h: h.new_ones(ROWS, 1),
    "arange": lambda h: torch.arange(WIDTH, device=h.device) * 0.5,
    "linspace": lambda h: torch.linspace(0, 1, WIDTH, device=h.device),
    "eye": lambda h: torch.eye(ROWS, WIDTH, device=h.device),
    "triangle": lambda h: torch.ones(ROWS, WIDTH, device=h.device).tril().bool(),
    "one_hot": lambda h: F.one_hot(h.argmax(1), WIDTH),
    "scalar_tensor": lambda h: torch.scalar_tensor(0.7, device=h.device),
    "list": lambda h: torch.tensor([0.1] * WIDTH, device=h.device),
    "zero_by_fill": lambda h: torch.empty_like(h).zero_() + 0.1,
    "from_shape_of_a_view": lambda h: torch.ones_like(h.t()).t(),
    "from_a_value_then_gone": lambda h: torch.zeros_like(h * 2).cos(),
    "diagonal": lambda h: torch.diag_embed(h[:, 0].detach()).sum(1, keepdim=True),
}


@EVERYWHERE
@pytest.mark.parametrize("name", FACTORIES)
def test_factory(name: str, where: Where) -> None:
    """From metadata only: no tensor has to be held for it."""
    assert_same(around(lambda h: (h * FACTORIES[name](h)).sin()), where)


SAME_TENSOR: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda h: h.contiguous(),
    "to": lambda h: h.to(torch.float32),
    "reshape": lambda h: h.reshape(ROWS, WIDTH),
    "expand": lambda h: h.expand(ROWS, WIDTH),
    "detach": lambda h: h.detach(),
    "view_of_all": lambda h: h[:],
    "dropout_in_eval": lambda h: F.dropout(h, 0.5, training=False),
    "pad_of_nothing": lambda h: F.pad(h, (0, 0)),
    "real": lambda h: h.real,
    "resolved": lambda h: h.resolve_conj().resolve_neg(),
    "alias": torch.ops.aten.alias.default,
    "empty_slice_added": lambda h: torch.cat([h, h[:0]]),
    "broadcast": lambda h: torch.broadcast_tensors(h, h[0])[0],
    "identity": nn.Identity(),
    "requires_grad": lambda h: h.requires_grad_(),
}


@EVERYWHERE
@pytest.mark.parametrize("name", SAME_TENSOR)
def test_result_that_is_an_input(name: str, where: Where) -> None:
    """It is the same value; a write to one is a write to the other."""

    def hazard(h: Tensor) -> Tensor:
        doubled = h * 2
        same = SAME_TENSOR[name](doubled)
        wave = (same + 1).sin()
        doubled.mul_(3)
        return wave + same.cos()

    assert_same(around(hazard), where)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda h: (h[:, :1] * 2).expand(ROWS, WIDTH).sin(),
    "expanded_and_made_real": lambda h: h[:1].expand(ROWS, WIDTH).contiguous().sin(),
    "unfolded": lambda h: h.unfold(1, 3, 1).sin().sum(2).repeat(1, 2)[:, :WIDTH],
    "overlapping": lambda h: h.as_strided((ROWS, WIDTH), (4, 1), 2).sin(),
    "overlapping_and_computed": lambda h: (
        (h * 2).as_strided((ROWS, WIDTH), (1, 2), 3).exp().cos()
    ),
    "strided": lambda h: (h * 2).as_strided((ROWS, 4), (8, 2)).sin().repeat(1, 2),
    "of_a_view_of_a_view": lambda h: (
        (h * 2).t()[2:].t()[:, ::2].sin().repeat(1, 3)[:, :WIDTH]
    ),
    "flipped": lambda h: (h * 2).flip(0).sin().roll(2, 1),
    "diagonal": lambda h: h * (h * 2).diagonal().sin().sum(),
    "moved": lambda h: (h * 2).view(2, 3, 2, 4).permute(2, 0, 3, 1).sin().reshape(6, 8),
    "channels_last": lambda h: (
        (h.view(1, 2, 6, 4) * 2)
        .contiguous(memory_format=torch.channels_last)
        .sin()
        .reshape(ROWS, WIDTH)
    ),
    "zero_dimensional": lambda h: h * (h * 2)[0, 0].sin(),
    "empty": lambda h: h + (h * 2)[:0].sin().sum(),
}


@EVERYWHERE
@pytest.mark.parametrize("name", VIEWS)
def test_view(name: str, where: Where) -> None:
    assert_same(around(VIEWS[name]), where)


@EVERYWHERE
def test_write_under_an_overlapping_view(where: Where) -> None:
    def hazard(h: Tensor) -> Tensor:
        base = h * 2
        windows = base.as_strided((ROWS, WIDTH), (4, 1), 2)
        early = (windows + 1).sin()
        base.add_(1)
        return early * windows.cos()

    assert_same(around(hazard), where)


@ON_CPU
def test_channels_last_convolution(where: Where) -> None:
    """Strides decide which kernel runs, and how it rounds."""

    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 4, 3, padding=1)
            weight = self.conv.weight.data
            self.conv.weight.data = weight.contiguous(memory_format=torch.channels_last)
            self.pool = nn.MaxPool2d(2, return_indices=True)

        def forward(self, h: Tensor) -> Tensor:
            images = h.view(1, 2, 6, 4).contiguous(memory_format=torch.channels_last)
            out, indices = self.pool((self.conv(images) * 2).sin())
            restored = F.max_unpool2d(out.cos(), indices, [2, 2])
            return restored.reshape(2, ROWS, WIDTH).sum(0)

    assert_same(around_module(Images), where)


COMPLEX: dict[str, Callable[[Tensor], Tensor]] = {
    "as_pairs": lambda h: torch.view_as_real(
        torch.view_as_complex(h.view(6, 4, 2)) * 1j
    ),
    "conjugate": lambda h: (torch.complex(h, h * 2).conj() * torch.complex(h, h)).imag,
    "conjugate_made_real": lambda h: (
        torch.complex(h, h * 2).conj().resolve_conj().abs()
    ),
    "negative_view": lambda h: torch.complex(h, h * 2).conj().imag.sin(),
    "polar": lambda h: torch.polar(h.exp(), h * 2).real,
    "write_to_the_real_part": lambda h: _real_part_written(torch.complex(h * 2, h)),
    "fourier": lambda h: torch.fft.irfft(
        torch.fft.rfft(h, dim=1).exp(), n=WIDTH, dim=1
    ),
}


def _real_part_written(z: Tensor) -> Tensor:
    early = (z * 2).exp()
    z.real.mul_(0.5)
    return (early * z.conj()).imag


@ON_CPU
@pytest.mark.parametrize("name", COMPLEX)
def test_complex(name: str, where: Where) -> None:
    assert_same(around(lambda h: COMPLEX[name](h).reshape(ROWS, WIDTH) * 0.1), where)


def bytes_reinterpreted(h: Tensor) -> Tensor:
    """A view of another dtype: the sign bit, taken off."""
    bits = (h.detach() * 2).view(torch.int32)
    return h * (bits & 0x7FFFFFFF).view(torch.float32)


def bytes_written(h: Tensor) -> Tensor:
    scale = h.detach() * 2
    wave = (scale + 1).sin()
    scale.view(torch.int32).bitwise_and_(0x7FFFFFFF)
    return h * wave * scale.sqrt()


DTYPES: dict[str, Callable[[Tensor], Tensor]] = {
    "bytes_reinterpreted": bytes_reinterpreted,
    "bytes_written": bytes_written,
    "double": lambda h: (h.double() * 2).sin().exp().float(),
    "half_times_number": lambda h: (h.bfloat16() * 2.5).sin().float(),
    "half_times_scalar_tensor": lambda h: (h.half() * torch.tensor(0.3)).sin().float(),
    "number_minus_integers": lambda h: h * (1.5 - (h > 0).int()).sin(),
    "bool_sum": lambda h: h * ((h > 0) & (h < 0.5)).sum(0).sqrt(),
    "integers_divided": lambda h: h * ((h * 100).int() // 7 % 5),
    "where": lambda h: torch.where(h > 0, h.sin(), 0.5),
    "power_of_numbers": lambda h: torch.pow(2.0, h) * torch.pow(h, 3),
    "python_number": lambda h: (h * h.max().item()).sin(),
    "quantised_to_bytes": lambda h: h * (h * 50).clamp(0, 200).to(torch.uint8).sin(),
}


@ON_CPU
@pytest.mark.parametrize("name", DTYPES)
def test_dtype(name: str, where: Where) -> None:
    """Python numbers promote otherwise than tensors of no dimension."""
    assert_same(around(DTYPES[name]), where)


def _square(h: Tensor) -> Tensor:
    return h.t() @ h + torch.eye(WIDTH, device=h.device)


SEVERAL: dict[str, Callable[[Tensor], Tensor]] = {
    "split": lambda h: torch.cat([part.sin() for part in (h * 2).split([3, 5], 1)], 1),
    "chunk_of_which_one_is_used": lambda h: (h * 2).chunk(2, 1)[1].sin().repeat(1, 2),
    "unbind": lambda h: torch.stack([row.sin() for row in (h * 2).unbind(0)]),
    "unsafe_split": lambda h: torch.cat(
        [part.exp_() for part in (h * 2).unsafe_split(4, 1)], 1
    ),
    "topk": lambda h: h * (h * 2).topk(3, 1).values.sin().sum(1, keepdim=True),
    "maximum_with_indices": lambda h: (
        h * (h * 2).max(0).values.sin() + h.max(0).indices
    ),
    "sorted": lambda h: (h * 2).sort(1).values.sin().gather(1, h.argsort(1)),
    "running_maximum": lambda h: (h * 2).cummax(1).values.sin(),
    "median": lambda h: h * (h * 2).median(1, keepdim=True).values.sin(),
    "variance_and_mean": lambda h: (
        h * torch.stack(torch.var_mean(h * 2, 1)).sin().sum()
    ),
    "kth_value": lambda h: h * (h * 2).kthvalue(2, 1, keepdim=True).values.sin(),
    "meshgrid": lambda h: (
        torch.stack(torch.meshgrid(h[:, 0] * 2, h[0] * 2, indexing="ij")).sum(0).sin()
    ),
    "adaptive_pool": lambda h: h * F.adaptive_max_pool1d(h * 2, 1).sin(),
    "einsum": lambda h: torch.einsum("ij,kj,kl->il", h, h * 2, h).tanh(),
    "optional_indices": lambda h: (h * 2)[:, [1, 0, 3, 2, 5, 4, 7, 6]].sin(),
    "masked": lambda h: h * (h * 2)[h > 0].sin().sum(),
    "nonzero": lambda h: h * (h * 2)[torch.nonzero(h > 0, as_tuple=True)].sin().sum(),
    "unique": lambda h: h * (h.detach() * 3).round().unique().sin().sum(),
    "list_of_tensors": lambda h: torch.cat([h * 2, h.sin(), h * 2], 1)[:, ::3].exp(),
    "column_stack": lambda h: torch.column_stack([h[:, :4] * 2, h[:, 4:].sin()]).exp(),
}


@EVERYWHERE
@pytest.mark.parametrize("name", SEVERAL)
def test_several_tensors(name: str, where: Where) -> None:
    """Ops with several results, lists of tensors, holes in lists."""
    assert_same(around(SEVERAL[name]), where)


DECOMPOSED: dict[str, Callable[[Tensor], Tensor]] = {
    "svd": lambda h: h @ torch.linalg.svd(_square(h))[1].diag().sin(),
    "qr": lambda h: h @ torch.linalg.qr(_square(h))[0].sin(),
    "eigh": lambda h: h * torch.linalg.eigh(_square(h))[0].sin(),
    "cholesky": lambda h: h @ torch.linalg.cholesky(_square(h)).sin(),
    "solve": lambda h: torch.linalg.solve(_square(h), h.t()).t().sin(),
    "log_determinant": lambda h: h * torch.linalg.slogdet(_square(h))[1].sin(),
    "inverse": lambda h: h @ torch.linalg.inv(_square(h)).sin(),
}


@ON_CPU
@pytest.mark.parametrize("name", DECOMPOSED)
def test_decomposition(name: str, where: Where) -> None:
    assert_same(around(DECOMPOSED[name]), where)


CONSTANTS: dict[str, Callable[[], Tensor]] = {
    "of_a_list": lambda: torch.tensor([0.5] * WIDTH),
    "of_numpy": lambda: torch.from_numpy(np.linspace(0, 1, WIDTH, dtype=np.float32)),
    "of_a_buffer": lambda: torch.frombuffer(bytearray(4 * WIDTH), dtype=torch.float32),
    "of_numpy_scalar": lambda: torch.as_tensor(np.float32(0.3)),
    "by_dlpack": lambda: torch.utils.dlpack.from_dlpack(
        np.ones(WIDTH, dtype=np.float32)
    ),
}


@ON_CPU
@pytest.mark.parametrize("name", CONSTANTS)
def test_constant_made_in_forward(name: str, where: Where) -> None:
    """Bytes that no op made."""

    def hazard(h: Tensor) -> Tensor:
        return h * (CONSTANTS[name]() * 2).cos() + CONSTANTS[name]()

    assert_same(around(hazard), where)


class Tagged(torch.Tensor):
    """A subclass in name only."""


class Scaled(torch.Tensor):
    """Holds a tensor and a factor; no storage of its own."""

    held: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor) -> None:
        self.held = inner

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain = [a.held * 2 if isinstance(a, Scaled) else a for a in args]
        out = func(*plain, **(kwargs or {}))
        return Scaled(out * 0.5) if func is torch.ops.aten.detach.default else out


@EVERYWHERE
def test_subclass_in_name_only(where: Where) -> None:
    def hazard(h: Tensor) -> Tensor:
        tagged = (h * 2).as_subclass(Tagged)
        return (tagged.sin() * tagged).as_subclass(torch.Tensor).cos()

    assert_same(around(hazard), where)


@ON_CPU
def test_subclass_that_wraps(where: Where) -> None:
    """A constant factor that is two tensors in truth."""

    def hazard(h: Tensor) -> Tensor:
        wrapped = Scaled((h.detach() * 2).sin())
        return (h * wrapped).cos()

    assert_same(around(hazard), where)


@ON_CPU
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_matrix(layout: torch.layout, where: Where) -> None:
    """No storage to know it by."""

    def hazard(h: Tensor) -> Tensor:
        adjacency = (torch.eye(ROWS) * 2).to_sparse(layout=layout)
        return torch.sparse.mm(adjacency, (h * 2).sin()).exp()

    assert_same(around(hazard), where)


@ON_CPU
def test_nested_tensor(where: Where) -> None:
    def hazard(h: Tensor) -> Tensor:
        nested = torch.nested.as_nested_tensor(
            [h[:2] * 2, h[2:].sin()], layout=torch.jagged
        )
        return (nested * 2).sin().values() * h

    assert_same(around(hazard), where)
