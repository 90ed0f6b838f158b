"""Models of torch alone, of kinds that took other ops in a real step than in a trace,
or might: each with a batch whose activations are large enough to be planned for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 64


class Blocks(nn.Module):
    """Blocks in a row."""

    def __init__(self, make: Callable[[], nn.Module], count: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(count))

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, *others)
        return x


class EagerAttention(nn.Module):
    """Scores, softmax and a product with dropout between, all by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (
            part.view(rows, length, 4, 16).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        scores = (q @ k.transpose(-2, -1) / 4).softmax(-1)
        mixed = F.dropout(scores, 0.1, self.training) @ v
        return x + self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))


class GroupedQueries(nn.Module):
    """torch's attention: grouped queries, a mask, dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q = self.q(x).view(rows, length, 4, 16).transpose(1, 2)
        k, v = self.kv(x).view(rows, length, 2, 2, 16).permute(2, 0, 3, 1, 4)
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=self.dropout, enable_gqa=True
        )
        return x + out.transpose(1, 2).reshape(rows, length, WIDTH)


class Multihead(nn.Module):
    """nn.MultiheadAttention with masks, with and without weights."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, 0.1, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        padding = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        mixed, _ = self.attention(
            x,
            x,
            x,
            attn_mask=causal,
            key_padding_mask=padding,
            need_weights=self.need_weights,
        )
        return self.norm(x + mixed)


class Einsum(nn.Module):
    """Products by letters, of odd shapes."""

    def __init__(self, words: str, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.words = words
        self.weight = nn.Parameter(torch.randn(shape) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.einsum(self.words, x, self.weight).tanh().reshape(x.shape)


class Experts(nn.Module):
    """Every row goes to an expert: which rows, values decide."""

    def __init__(self, loops_over_all: bool = True) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH))
            for _ in range(4)
        )
        self.loops_over_all = loops_over_all

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        weight, chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().squeeze(-1)
            if not self.loops_over_all and not len(rows):
                continue
            out = out.index_add(0, rows, expert(flat[rows]) * weight[rows, None])
        return x + out.view(x.shape)


class Scan(nn.Module):
    """A state space, step by step in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.rand(WIDTH))
        self.into = nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 4, padding=3, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        y = F.silu(self.into(y))
        state = torch.zeros_like(y[:, 0])
        states = []
        for t in range(y.shape[1]):
            state = state * self.decay.sigmoid() + y[:, t]
            states.append(state)
        return x + torch.stack(states, 1)


class Mamba(nn.Module):
    """The same in whole arrays: sums along time, products by letters."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH + 16)
        self.rates = nn.Parameter(torch.rand(WIDTH, 8))

    def forward(self, x: Tensor) -> Tensor:
        u, b, c = self.into(x).split([WIDTH, 8, 8], -1)
        steps = F.softplus(u)[..., None] * -self.rates.exp()
        fed = torch.einsum("bld,bln->bldn", u, b)
        states = (fed * (-steps.cumsum(1)).clamp(max=4).exp()).cumsum(1)
        y = torch.einsum("bldn,bln->bld", states * steps.cumsum(1).exp(), c)
        return x + y * F.silu(u)


class Fourier(nn.Module):
    """Mixing by Fourier transforms, with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.cfloat))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=WIDTH)
        whole = torch.fft.fft2(x).real
        return F.gelu(self.linear(mixed)) + 0.01 * whole


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.rnn = getattr(nn, kind)(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rnn(x)[0]


class Checkpointed(nn.Module):
    """A part of the block is checkpointed by the user."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU())
        self.outer = nn.Linear(128, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = checkpoint(self.inner, x, use_reentrant=False)
        return x + F.dropout(F.gelu(self.outer(inner)), 0.1, self.training)


class Tied(nn.Module):
    """One weight for the embedding, the head, and a product in each block."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, WIDTH, sparse=sparse)
        self.blocks = nn.ModuleList(Feedforward() for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return x if self.embedding.sparse else x @ self.embedding.weight.t()


class Feedforward(nn.Module):
    def __init__(self, wrap: Callable[[nn.Module], nn.Module] | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 256)
        self.down = nn.Linear(256, WIDTH)
        if wrap is not None:
            wrap(self.up)
            wrap(self.down)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.up(self.norm(x)))
        return x + F.dropout(self.down(y), 0.1, self.training)


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(512, WIDTH, mode="mean")
        self.blocks = nn.ModuleList(Feedforward() for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.bag(ids)
        for block in self.blocks:
            x = block(x)
        return x


class Windows(nn.Module):
    """Windows of an image, as Swin has them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, high, wide, _ = x.shape
        y = torch.roll(x, (-2, -2), (1, 2)).view(rows, high // 4, 4, wide // 4, 4, -1)
        y = F.gelu(self.linear(y.permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, WIDTH)))
        y = y.view(rows, high // 4, wide // 4, 4, 4, -1).permute(0, 1, 3, 2, 4, 5)
        return x + y.reshape(x.shape)


class Constants(nn.Module):
    """Tensors made in forward: from numbers, lists, other tensors, by filling."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.tensor([0.5] * WIDTH, device=x.device)
        empty = torch.empty(x.shape[-1], device=x.device).fill_(2.0)
        positions = torch.arange(x.shape[1], device=x.device).float().detach_()
        y = self.linear(x * scale) * torch.as_tensor(0.5).to(x.device)
        if torch.tensor(3).item() > 2:
            y = F.silu(y + empty + positions[None, :, None])
        return x + y * torch.ones(()).to(y)


class Pooled(nn.Module):
    """max_pool1d, which has a kernel of its own where no gradient is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        gates = F.max_pool1d(torch.ones_like(x[:, :1]), 3, 1, 1)
        y = F.relu(self.conv(x * gates))
        return x + F.max_pool1d(y, 3, 1, 1)


def _convolutions() -> nn.Module:
    def block() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=1, groups=4),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(16, 16, 2, 2),
            nn.GroupNorm(4, 16),
            nn.SiLU(),
            nn.MaxPool2d(2),
            nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.AvgPool2d(2),
            nn.InstanceNorm2d(16, affine=True),
            nn.PixelShuffle(2),
            nn.PixelUnshuffle(2),
        )

    return Blocks(block)


def _sequences(rows: int = 64, length: int = 16) -> tuple[Tensor, ...]:
    return (torch.randn(rows, length, WIDTH),)


def _encoder(**fields: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, batch_first=True, **fields)
        return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    return make


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(WIDTH, 4, 3, 3, 128, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.transformer.generate_square_subsequent_mask(
            x.shape[1], device=x.device
        )
        return self.transformer(x, x, tgt_mask=mask, tgt_is_causal=True)


Maker = Callable[[], nn.Module]
Batch = Callable[[], tuple[Tensor, ...]]

# Each can be traced.
TRACED: dict[str, tuple[Maker, Batch]] = {
    "eager attention": (lambda: Blocks(EagerAttention), _sequences),
    "eager attention, one row": (
        lambda: Blocks(EagerAttention),
        lambda: _sequences(1, 384),
    ),
    "grouped queries": (lambda: Blocks(lambda: GroupedQueries(0.0)), _sequences),
    "grouped queries, dropout": (
        lambda: Blocks(lambda: GroupedQueries(0.1)),
        _sequences,
    ),
    "multihead": (lambda: Blocks(lambda: Multihead(False)), _sequences),
    "multihead, weights": (lambda: Blocks(lambda: Multihead(True)), _sequences),
    "encoder": (_encoder(), _sequences),
    "encoder, one row": (_encoder(), lambda: _sequences(1, 384)),
    "encoder, norm first": (_encoder(norm_first=True, dropout=0.0), _sequences),
    "translator": (Translator, _sequences),
    "einsum": (
        lambda: Blocks(lambda: Einsum("blhd,hde->blhe", (4, 16, 16))),
        lambda: (torch.randn(64, 16, 4, 16),),
    ),
    "einsum, one row": (
        lambda: Blocks(lambda: Einsum("blhd,hde->blhe", (4, 16, 16))),
        lambda: (torch.randn(1, 512, 4, 16),),
    ),
    "einsum, odd": (
        lambda: Blocks(lambda: Einsum("bijc,cdi->bdcj", (7, 5, 5))),
        lambda: (torch.randn(333, 5, 11, 7),),
    ),
    "scan": (lambda: Blocks(Scan), _sequences),
    "mamba": (lambda: Blocks(Mamba), _sequences),
    "fourier": (lambda: Blocks(Fourier), _sequences),
    "lstm": (lambda: Blocks(lambda: Recurrent("LSTM")), _sequences),
    "gru": (lambda: Blocks(lambda: Recurrent("GRU")), _sequences),
    "rnn": (lambda: Blocks(lambda: Recurrent("RNN")), _sequences),
    "checkpoint inside": (lambda: Blocks(Checkpointed), _sequences),
    "tied": (Tied, lambda: (torch.randint(0, 512, (64, 16)),)),
    "sparse gradient": (
        lambda: Tied(sparse=True),
        lambda: (torch.randint(0, 512, (64, 16)),),
    ),
    "bags": (Bags, lambda: (torch.randint(0, 512, (1024, 8)),)),
    "weight norm": (
        lambda: Blocks(lambda: Feedforward(parametrizations.weight_norm)),
        _sequences,
    ),
    "spectral norm": (
        lambda: Blocks(lambda: Feedforward(parametrizations.spectral_norm)),
        _sequences,
    ),
    "windows": (lambda: Blocks(Windows), lambda: (torch.randn(4, 16, 16, WIDTH),)),
    "constants": (lambda: Blocks(Constants), _sequences),
    "pooled": (lambda: Blocks(Pooled), lambda: (torch.randn(32, WIDTH, 32),)),
    "convolutions": (_convolutions, lambda: (torch.randn(4, 16, 16, 16),)),
}

# Values decide what they do.
RECORDED: dict[str, tuple[Maker, Batch]] = {
    "experts": (lambda: Blocks(Experts), _sequences),
}
