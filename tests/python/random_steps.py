"""The steps that random programs are drawn from, by kind and name.

A step takes two tensors of the pool and a number. PURE makes a tensor, VIEWS a view,
WRITES changes the first tensor in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from random_tricks import (
    CappedExponential,
    Doubles,
    OverwritesInBackward,
    OverwritesInList,
    OverwritesUnseen,
    ReturnsItsInput,
    ReusesItsSave,
    Square,
    UnseenSlope,
)

ROWS = 6
WIDTH = 8

Make = Callable[[Tensor, Tensor, float], Tensor]


def _with_indices(values: list[int], like: Tensor) -> Tensor:
    return torch.tensor(values, device=like.device)


def _strided(a: Tensor, b: Tensor, c: float) -> Tensor:
    if not a.is_contiguous() or a.storage_offset():
        return a * c
    return a.as_strided((ROWS, WIDTH), (WIDTH, 1), 0) * c


def _attention(a: Tensor, b: Tensor, c: float) -> Tensor:
    q, k = a[None, None], b[None, None]
    return F.scaled_dot_product_attention(q, k, q)[0, 0]


def _checkpointed(a: Tensor, b: Tensor, c: float) -> Tensor:
    out: Tensor = checkpoint(
        lambda u, v: (u * v.cos()).tanh(), a, b, use_reentrant=False
    )
    return out


PURE: dict[str, Make] = {
    "sin": lambda a, b, c: a.sin(),
    "cos": lambda a, b, c: a.cos(),
    "tanh": lambda a, b, c: a.tanh(),
    "sigmoid": lambda a, b, c: a.sigmoid(),
    "relu": lambda a, b, c: a.relu() + b.relu(),
    "gelu": lambda a, b, c: F.gelu(a),
    "silu": lambda a, b, c: F.silu(a),
    "hardtanh": lambda a, b, c: F.hardtanh(a) * b,
    "softmax": lambda a, b, c: a.softmax(-1),
    "logsumexp": lambda a, b, c: a.logsumexp(1, keepdim=True) + b * 0.1,
    "layer_norm": lambda a, b, c: F.layer_norm(a, a.shape[-1:]),
    "batch_norm": lambda a, b, c: F.batch_norm(a, None, None, training=True),
    "norm": lambda a, b, c: a.norm(dim=1, keepdim=True) * b,
    "std": lambda a, b, c: a.std(0) + b,
    "rsqrt": lambda a, b, c: a.abs().add(0.1).rsqrt(),
    "scale": lambda a, b, c: a * c,
    "shift": lambda a, b, c: a + c,
    "add": lambda a, b, c: a + b,
    "subtract": lambda a, b, c: a.sub(b, alpha=2),
    "multiply": lambda a, b, c: a * b.tanh(),
    "addcmul": lambda a, b, c: torch.addcmul(a, b, b.sin(), value=0.1),
    "lerp": lambda a, b, c: torch.lerp(a, b, 0.3),
    "maximum": lambda a, b, c: torch.maximum(a, b),
    "where": lambda a, b, c: torch.where(a > 0, a, b),
    "masked": lambda a, b, c: a.masked_fill(b > 0.5, c),
    "clone": lambda a, b, c: a.clone(),
    "contiguous": lambda a, b, c: a.contiguous(),
    "turned": lambda a, b, c: a.t().contiguous().t(),
    "detached": lambda a, b, c: a.detach(),
    "detached_copy": lambda a, b, c: a.detach() * c,
    "dropout": lambda a, b, c: F.dropout(a, 0.3),
    "rrelu": lambda a, b, c: F.rrelu(a, training=True),
    "noise": lambda a, b, c: a + torch.rand_like(a),
    "bernoulli": lambda a, b, c: a * torch.empty_like(a).bernoulli_(0.5),
    "sampled": lambda a, b, c: torch.bernoulli(a.detach().sigmoid()) * b,
    "gumbel": lambda a, b, c: F.gumbel_softmax(a, 1.0),
    "ones": lambda a, b, c: torch.ones_like(a) * c,
    "zeros": lambda a, b, c: torch.zeros_like(a),
    "new_zeros": lambda a, b, c: a.new_zeros(ROWS, WIDTH) + b,
    "copied": lambda a, b, c: torch.zeros_like(a).copy_(b),
    "normalised": lambda a, b, c: a / (a.detach().abs().mean() + 1),
    "sorted": lambda a, b, c: a.sort(1).values,
    "summed_up": lambda a, b, c: a.cumsum(1) * 0.1,
    "stacked": lambda a, b, c: torch.stack([a, b]).amax(0),
    "joined": lambda a, b, c: torch.cat([a[:3], b[3:]]),
    "mixed": lambda a, b, c: (a @ b.t()).tanh() @ b * 0.1,
    "einsum": lambda a, b, c: torch.einsum("ij,kj->ik", a, b) @ a * 0.05,
    "attention": _attention,
    "rolled": lambda a, b, c: a.roll(1, 0),
    "selected": lambda a, b, c: a[_with_indices([0, 2, 1, 1, 4, 5], a)],
    "padded": lambda a, b, c: F.pad(a, (1, 1))[:, :WIDTH] * 1,
    "unfolded": lambda a, b, c: a.unfold(1, 3, 1).mean(-1).repeat(1, 2)[:, :WIDTH],
    "expanded": lambda a, b, c: a.expand(2, ROWS, WIDTH).mean(0),
    "strided": _strided,
    "double": lambda a, b, c: a.double().exp().clamp(max=3).float(),
    "bfloat16": lambda a, b, c: a.bfloat16().float() * c,
    "foreach": lambda a, b, c: torch._foreach_mul([a, b], [c, c])[0],
    "checkpoint": _checkpointed,
    "complex": lambda a, b, c: torch.complex(a, b).conj().abs(),
}

# A view of the same shape, or a part, which has to be made whole to be used.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "same": lambda a: a.view(-1).view(ROWS, WIDTH) if a.is_contiguous() else a[:],
    "turned": lambda a: a.t().t(),
    "detached": lambda a: a.detach(),
    "first_rows": lambda a: a[:2],
    "some_columns": lambda a: a[:, 1:6:2],
    "one_row": lambda a: a[3],
    "right": lambda a: a.chunk(2, 1)[1],
    "narrowed": lambda a: a.narrow(0, 1, 3).t(),
    "diagonal": lambda a: a.diagonal(),
    "squeezed": lambda a: a.unsqueeze(0).squeeze(0),
    "expanded": lambda a: a.expand(2, ROWS, WIDTH)[1],
    "unbound": lambda a: a.unbind(0)[2],
}

WRITES: dict[str, Callable[[Tensor, Tensor, float], object]] = {
    "scale": lambda a, b, c: a.mul_(c),
    "shift": lambda a, b, c: a.add_(c),
    "tanh": lambda a, b, c: a.tanh_(),
    "sigmoid": lambda a, b, c: a.sigmoid_().mul_(b.mean()),
    "relu": lambda a, b, c: a.relu_(),
    "leaky_relu": lambda a, b, c: F.leaky_relu_(a, 0.2),
    "clamp": lambda a, b, c: a.clamp_(-c, c),
    "add": lambda a, b, c: a.add_(b.mean()),
    "multiply": lambda a, b, c: a.mul_(b.mean().tanh()),
    "addcmul": lambda a, b, c: a.addcmul_(b.mean(), b.mean()),
    "lerp": lambda a, b, c: a.lerp_(b.mean().expand_as(a), 0.3),
    "copy": lambda a, b, c: a.copy_(b.mean().expand_as(a)),
    "zero": lambda a, b, c: a.zero_(),
    "fill": lambda a, b, c: a.fill_(c),
    "masked": lambda a, b, c: a.masked_fill_(a.detach() > 0, c),
    "assigned": lambda a, b, c: a.__setitem__(slice(0, 1), c),
    "indexed": lambda a, b, c: a.index_fill_(0, _with_indices([0, 1], a), c),
    "foreach": lambda a, b, c: torch._foreach_add_([a], c),
    "dropout": lambda a, b, c: F.dropout(a, 0.3, inplace=True),
    "silu": lambda a, b, c: F.silu(a, inplace=True),
    "bernoulli": lambda a, b, c: a.bernoulli_(0.5),
    "uniform": lambda a, b, c: a.uniform_(),
}

# Run without gradients; what they give goes on without one.
WITHOUT_GRADIENT: dict[str, Make] = {
    "in_place": lambda a, b, c: (a * c).sin().add_(b),
    "out_of_nothing": lambda a, b, c: torch.mul(
        a, c, out=torch.empty(0, device=a.device)
    ),
    "out": lambda a, b, c: torch.add(a, b, out=torch.empty_like(a)),
    "copied": lambda a, b, c: a.clone().copy_(b).mul_(a),
    "sorted": lambda a, b, c: torch.sort(a, 1)[0],
    "random": lambda a, b, c: torch.rand_like(a) * a,
    "chosen": lambda a, b, c: torch.where(a > 0, 1.0, 0.0) + 0 * b,
}

FUNCTIONS: dict[str, Make] = {
    "square": lambda a, b, c: _applied(Square, a * 0.5),
    "exponential": lambda a, b, c: _applied(CappedExponential, a),
    "returns_its_input": lambda a, b, c: _applied(ReturnsItsInput, a),
    "reuses_its_save": lambda a, b, c: _applied(ReusesItsSave, a),
    "doubles": lambda a, b, c: _applied(Doubles, a * c),
}

UNSEEN_FUNCTIONS: dict[str, Make] = {
    "overwrites": lambda a, b, c: _applied(OverwritesUnseen, a * c),
    "overwrites_after": lambda a, b, c: _applied(OverwritesUnseen, a.sin()),
    "overwrites_in_pool": lambda a, b, c: _applied(OverwritesUnseen, a),
    "overwrites_in_list": lambda a, b, c: _applied(OverwritesInList, a, [b]),
    "overwrites_in_backward": lambda a, b, c: _applied(OverwritesInBackward, a),
    "overwrites_own_in_backward": lambda a, b, c: _applied(OverwritesInBackward, a * c),
    "slope": lambda a, b, c: _applied(UnseenSlope, a),
}


def _applied(function: Any, *args: Any) -> Tensor:
    out: Tensor = function.apply(*args)
    return out
