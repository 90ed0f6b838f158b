"""Parameters, gradients and comparisons for the tests of optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

SIZES = ((40, 130), (300,), (64, 64))  # 5200 and 4096 elements are 8-bit, 300 are not


def make_params(
    dtype: torch.dtype = torch.float32,
    sizes: Iterable[tuple[int, ...]] = SIZES,
    device: torch.device | str = "cpu",
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [
        nn.Parameter((torch.randn(s, generator=generator) * 0.1).to(device, dtype))
        for s in sizes
    ]


def set_gradients(params: Iterable[Tensor], seed: int, scale: float = 0.01) -> None:
    """The same for the same seed, whatever the device and layout."""
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        gradient = torch.randn(p.shape, generator=generator) * scale
        p.grad = torch.empty_like(p).copy_(gradient)


def train(
    optimizer: Any,
    first: int = 0,
    steps: int = 4,
    after: Callable[[], object] = lambda: None,
) -> None:
    for step in range(first, first + steps):
        set_gradients(all_params(optimizer), step)
        optimizer.step()
        after()


def all_params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def assert_same(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> None:
    """Parameters and state, to the bit; on any devices."""
    for p, q in zip(all_params(a), all_params(b), strict=True):
        assert same_bits(p, q)
        assert a.state[p].keys() == b.state[q].keys()
        for key, value in a.state[p].items():
            assert same_bits(value, b.state[q][key]), key


def same_bits(a: Tensor, b: Tensor) -> bool:
    a, b = a.detach().cpu(), b.detach().cpu()
    nans = a.is_floating_point() and torch.equal(a.isnan(), b.isnan())
    return a.dtype == b.dtype and (
        torch.equal(a.nan_to_num(0.5), b.nan_to_num(0.5)) if nans else torch.equal(a, b)
    )
