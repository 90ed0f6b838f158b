"""Are two tensors the same, to the bit: see memscale.verify."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["difference", "named_tensors", "on_host", "within"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that nothing else writes to, and that takes no room on the device."""
    return tensor.detach().to("cpu", copy=True)


def difference(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """None if they are the same, else the largest distance of two numbers.

    The same: every bit, but a NaN is like any other NaN (which of them a kernel
    writes may depend on where its memory begins). 0.0 is a difference in the sign
    of a zero, inf one in shape, type or NaN.
    """
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return math.inf
    if is_traceable_wrapper_subclass(a) and is_traceable_wrapper_subclass(b):
        return _difference_inside(a, b)
    a, b = _plain(a), _plain(b)
    if a.shape != b.shape:
        return math.inf
    bits_a, bits_b = _bits(a), _bits(b)
    if torch.equal(bits_a, bits_b):
        return None
    differs = bits_a != bits_b
    left = bits_a[differs].view(a.dtype).double()
    right = bits_b[differs].view(b.dtype).double()
    # Equal infinities have equal bits, so what is left of NaN is one against none.
    both_nan = left.isnan() & right.isnan()
    left, right = left[~both_nan], right[~both_nan]
    if left.numel() == 0:
        return None
    largest = float((left - right).abs().max())
    return math.inf if math.isnan(largest) else largest


def _difference_inside(a: Any, b: Any) -> float | None:
    """Of the tensors that a quantised weight, say, is made of."""
    names, _ = a.__tensor_flatten__()
    others, _ = b.__tensor_flatten__()
    if names != others:
        return math.inf
    found = [difference(getattr(a, name), getattr(b, name)) for name in names]
    return max((value for value in found if value is not None), default=None)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Its numbers as a dense real tensor on the host."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    tensor = tensor.cpu().resolve_conj().resolve_neg()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_BITS[tensor.itemsize])


def within(max_abs: float | None, plain: torch.Tensor, tolerance: float) -> bool:
    """Whether a difference is at most ``tolerance`` of the tensor's largest number."""
    if max_abs is None:
        return True
    if not tolerance or not plain.numel():
        return False
    return max_abs <= tolerance * float(_plain(plain).double().abs().max())


def named_tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in what a model takes or returns: "output.logits", "output[0]"."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from named_tensors(part, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from named_tensors(part, f"{name}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for entry in dataclasses.fields(value):
            part = getattr(value, entry.name, None)
            yield from named_tensors(part, f"{name}.{entry.name}")
