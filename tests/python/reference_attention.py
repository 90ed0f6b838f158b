"""Fused attention with dropout as the simulated device computes it, in plain torch.

The same tiles, random draws and order of operations, written against CPU tensors;
forward and backward by formula, not by autograd.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

TILE = 128


def _tiles(q: torch.Tensor) -> Iterator[tuple[int, int, slice, int]]:
    batch, heads, length, _ = q.shape
    index = 0
    for b in range(batch):
        for h in range(heads):
            for first in range(0, length, TILE):
                yield b, h, slice(first, min(first + TILE, length)), index
                index += 1


def _scores(
    q: torch.Tensor,
    k: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool,
    scale: float,
    rows: slice,
) -> torch.Tensor:
    scores = torch.mm(q, k.t()).mul_(scale)
    if bias is not None:
        scores.add_(bias[rows, : k.size(0)])
    if causal:
        row = torch.arange(rows.start, rows.stop).unsqueeze(1)
        scores.masked_fill_(torch.arange(k.size(0)) > row, -math.inf)
    return scores


def _factors(like: torch.Tensor, seed: int, p: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.empty_like(like).bernoulli_(1 - p, generator=generator).div_(1 - p)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
        p: float,
        causal: bool,
        scale: float,
    ) -> torch.Tensor:
        group = q.size(1) // k.size(1)
        seed = int(torch.empty((), dtype=torch.int64).random_())
        out = torch.empty(q.size(0), q.size(2), q.size(1), v.size(3)).transpose(1, 2)
        lse = torch.empty(q.shape[:3])
        for b, h, rows, i in _tiles(q):
            key_bias = None if bias is None else bias[b, h]
            seen = slice(0, rows.stop if causal else k.size(2))
            key, value = k[b, h // group, seen], v[b, h // group, seen]
            s = _scores(q[b, h, rows], key, key_bias, causal, scale, rows)
            lse[b, h, rows] = torch.logsumexp(s, 1)
            probabilities = (s - lse[b, h, rows].unsqueeze(1)).exp()
            dropped = probabilities * _factors(probabilities, seed + i, p)
            out[b, h, rows] = torch.mm(dropped, value)
        ctx.save_for_backward(q, k, v, bias, out, lse)
        ctx.settings = (seed, p, causal, scale)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:  # type: ignore[override]
        q, k, v, bias, out, lse = ctx.saved_tensors
        seed, p, causal, scale = ctx.settings
        group = q.size(1) // k.size(1)
        dq = torch.empty_like(q)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for b, h, rows, i in _tiles(q):
            key_bias = None if bias is None else bias[b, h]
            seen = slice(0, rows.stop if causal else k.size(2))
            key, value = k[b, h // group, seen], v[b, h // group, seen]
            query, g = q[b, h, rows], grad[b, h, rows]
            s = _scores(query, key, key_bias, causal, scale, rows)
            probabilities = (s - lse[b, h, rows].unsqueeze(1)).exp()
            factors = _factors(probabilities, seed + i, p)
            dv[b, h // group, seen] += torch.mm((probabilities * factors).t(), g)
            dp = torch.mm(g, value.t()) * factors
            row_sum = (g * out[b, h, rows]).sum(1, keepdim=True)
            ds = (dp - row_sum) * probabilities * scale
            dq[b, h, rows] = torch.mm(ds, key)
            dk[b, h // group, seen] += torch.mm(ds.t(), query)
        return dq, dk, dv, None, None, None, None


def attend_as_sim(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Stands in for ``F.scaled_dot_product_attention`` with dropout, on the CPU."""
    assert dropout_p > 0
    bias = attn_mask
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.zeros(bias.shape).masked_fill(~bias, -math.inf)
    if bias is not None:
        bias = bias.expand(*query.shape[:3], key.size(2))
    assert enable_gqa or query.size(1) == key.size(1)
    chosen = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    return _Attention.apply(query, key, value, bias, dropout_p, is_causal, chosen)
