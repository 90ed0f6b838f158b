"""Equality to the bit, by bytes: NaN equals NaN, and 0.0 is not -0.0."""

from __future__ import annotations

import torch
from torch import Tensor


def same_bytes(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether both are of the same kind and hold the same bytes."""
    if a is None or b is None:
        return a is b
    if (a.dtype, a.layout, a.shape) != (b.dtype, b.layout, b.shape):
        return False
    if a.layout == torch.sparse_coo:
        return same_bytes(a._indices(), b._indices()) and same_bytes(
            a._values(), b._values()
        )
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def how_far(a: Tensor | None, b: Tensor | None) -> str:
    """For messages: by how much two tensors differ."""
    if a is None or b is None or a.shape != b.shape or a.is_sparse or b.is_sparse:
        return "of another kind"
    if a.is_complex() or b.is_complex():
        a, b = (
            torch.view_as_real(a.resolve_conj()),
            torch.view_as_real(b.resolve_conj()),
        )
    return f"off by {(a.double() - b.double()).abs().max():.2g}"
