"""Recurrence: stacks that torch runs, cells in a loop, state spaces, an equation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.torch_models.made import Made

WORDS = 200


def text(rows: int = 8, length: int = 64) -> dict[str, Tensor]:
    return {"ids": torch.randint(WORDS, (rows, length))}


class Language(nn.Module):
    """Words through layers to the next word."""

    def __init__(self, layers: list[nn.Module], width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = F.dropout(self.embed(ids[:, :-1]), 0.1, self.training)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class Stack(nn.Module):
    """What torch's own recurrent layers give, without their state."""

    def __init__(self, recurrent: nn.RNNBase, width: int, out: int) -> None:
        super().__init__()
        self.recurrent = recurrent
        self.project = nn.Linear(width, out)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.project(self.recurrent(x)[0])


def lstm() -> Made:
    stack = nn.LSTM(64, 96, 3, batch_first=True, dropout=0.2)
    return Language([Stack(stack, 96, 64)]), text()


def gru_both_ways() -> Made:
    layers: list[nn.Module] = [
        Stack(nn.GRU(64, 48, batch_first=True, bidirectional=True), 96, 64)
        for _ in range(3)
    ]
    return Language(layers), text()


class SeqToSeq(nn.Module):
    """An encoder, and a decoder that looks at all of it at each word."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.encoder = nn.GRU(width, width, 2, batch_first=True, dropout=0.1)
        self.cell = nn.GRUCell(2 * width, width)
        self.keys, self.query = nn.Linear(width, width), nn.Linear(width, width)
        self.score = nn.Linear(width, 1)
        self.head = nn.Linear(2 * width, WORDS)

    def forward(self, sources: Tensor, targets: Tensor) -> Tensor:
        seen, state = self.encoder(self.embed(sources))
        state, keys = state[-1], self.keys(seen)
        logits = []
        for word in targets[:, :-1].unbind(1):
            scores = self.score(torch.tanh(keys + self.query(state)[:, None]))
            context = (scores.softmax(1) * seen).sum(1)
            state = self.cell(torch.cat([self.embed(word), context], -1), state)
            logits.append(self.head(torch.cat([state, context], -1)))
        given = torch.stack(logits, 1)
        return F.cross_entropy(given.flatten(0, 1), targets[:, 1:].flatten())


def seq_to_seq() -> Made:
    return SeqToSeq(), {
        "sources": torch.randint(WORDS, (8, 40)),
        "targets": torch.randint(WORDS, (8, 17)),
    }


class Cells(nn.Module):
    """A cell in a loop over time, normalised and with dropout at each step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], x.shape[2])
        out = []
        for step in range(x.shape[1]):
            h, c = self.cell(F.dropout(x[:, step], 0.1, self.training), (h, c))
            out.append(self.norm(h))
        return x + torch.stack(out, 1)


def cells_in_a_loop() -> Made:
    return Language([Cells(64) for _ in range(3)]), text(length=33)


class Diagonal(nn.Module):
    """A diagonal state space as a convolution by FFT (S4D)."""

    def __init__(self, width: int, states: int = 16) -> None:
        super().__init__()
        self.log_step = nn.Parameter(torch.rand(width) * 4 - 6)
        self.log_real = nn.Parameter(torch.full((width, states), 0.5).log())
        self.imaginary = nn.Parameter(torch.arange(states).float().repeat(width, 1) * 3)
        self.mix = nn.Parameter(torch.randn(width, states, dtype=torch.cfloat))
        self.skip = nn.Parameter(torch.randn(width))
        self.out = nn.Conv1d(width, 2 * width, 1)

    def forward(self, x: Tensor) -> Tensor:
        u = x.transpose(1, 2)
        length = u.shape[-1]
        poles = torch.complex(-self.log_real.exp(), self.imaginary)
        step = poles * self.log_step.exp()[:, None]
        powers = step[..., None] * torch.arange(length, device=x.device)
        scaled = self.mix * (step.exp() - 1) / poles
        kernel = 2 * (scaled[..., None] * powers.exp()).sum(1).real
        spectrum = torch.fft.rfft(u, 2 * length) * torch.fft.rfft(kernel, 2 * length)
        y = torch.fft.irfft(spectrum, 2 * length)[..., :length]
        y = F.dropout(F.gelu(y + u * self.skip[:, None]), 0.1, self.training)
        return x + F.glu(self.out(y), 1).transpose(1, 2)


def s4() -> Made:
    return Language([Diagonal(64) for _ in range(3)]), text()


class Selective(nn.Module):
    """A selective scan, step by step in Python (Mamba's own reference)."""

    def __init__(self, width: int, states: int = 8) -> None:
        super().__init__()
        inner = 2 * width
        self.norm = nn.RMSNorm(width)
        self.into = nn.Linear(width, 2 * inner, bias=False)
        self.conv = nn.Conv1d(inner, inner, 4, padding=3, groups=inner)
        self.select = nn.Linear(inner, 4 + 2 * states, bias=False)
        self.step = nn.Linear(4, inner)
        decay = torch.arange(1, states + 1).float().repeat(inner, 1)
        self.log_decay = nn.Parameter(decay.log())
        self.skip = nn.Parameter(torch.ones(inner))
        self.out = nn.Linear(inner, width, bias=False)
        self.states = states

    def forward(self, x: Tensor) -> Tensor:
        u, gate = self.into(self.norm(x)).chunk(2, -1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
        parts = self.select(u).split([4, self.states, self.states], -1)
        step, b, c = F.softplus(self.step(parts[0])), parts[1], parts[2]
        decay = torch.exp(step[..., None] * -self.log_decay.exp())
        fed = (step * u)[..., None] * b[:, :, None]
        state = fed.new_zeros(fed.shape[0], *fed.shape[2:])
        out = []
        for i in range(x.shape[1]):
            state = decay[:, i] * state + fed[:, i]
            out.append((state * c[:, i, None]).sum(-1))
        y = torch.stack(out, 1) + u * self.skip
        return x + self.out(y * F.silu(gate))


def mamba() -> Made:
    return Language([Selective(64) for _ in range(3)]), text(rows=4, length=33)


class Retention(nn.Module):
    """Attention without softmax, with a decay for each head (RetNet)."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.qkvg = nn.Linear(width, 4 * width, bias=False)
        self.norm = nn.GroupNorm(heads, width)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        decay = 1 - 2 ** (-5 - torch.arange(heads).float())
        self.register_buffer("decay", decay)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v, gate = self.qkvg(self.before(x)).chunk(4, -1)

        def split(t: Tensor) -> Tensor:
            return t.view(rows, length, self.heads, -1).transpose(1, 2)

        place = torch.arange(length, device=x.device)
        far = (place[:, None] - place).clamp(min=0)
        weights = self.decay[:, None, None] ** far * (place[:, None] >= place)
        scores = torch.einsum("bhid,bhjd->bhij", split(q), split(k)) * weights
        scores = scores / scores.detach().abs().sum(-1, True).clamp(min=1)
        y = (scores @ split(v)).transpose(1, 2).reshape(rows * length, width)
        y = self.norm(y).view(rows, length, width) * F.silu(gate)
        x = x + F.dropout(self.out(y), 0.1, self.training)
        return x + self.down(F.gelu(self.up(self.between(x))))


def retnet() -> Made:
    return Language([Retention(64) for _ in range(3)]), text()


class LinearAttention(nn.Module):
    """Softmax is replaced by a positive feature map; sums run along the words."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.unbind(2)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        memory = torch.einsum("bshd,bshe->bshde", k, v).cumsum(1)
        total = torch.einsum("bshd,bshd->bsh", q, k.cumsum(1))
        y = torch.einsum("bshd,bshde->bshe", q, memory) / (total[..., None] + 1e-6)
        return x + F.dropout(self.out(y.flatten(2)), 0.1, self.training)


def linear_attention() -> Made:
    return Language([LinearAttention(64) for _ in range(3)]), text(rows=4)


class Rwkv(nn.Module):
    """Time mixing by a running weighted mean, in a loop, then channel mixing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixes = nn.ParameterList(torch.rand(width) for _ in range(5))
        self.k, self.v, self.r, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.decay, self.first = (nn.Parameter(torch.rand(width)) for _ in range(2))
        self.key = nn.Linear(width, 4 * width, bias=False)
        self.value = nn.Linear(4 * width, width, bias=False)
        self.gate = nn.Linear(width, width, bias=False)

    def _mean(self, k: Tensor, v: Tensor) -> Tensor:
        above = below = torch.zeros_like(k[:, 0])
        out = []
        for key, value in zip(k.unbind(1), v.unbind(1), strict=True):
            now = torch.exp(self.first + key)
            out.append((above + now * value) / (below + now + 1e-6))
            fade = torch.exp(-torch.exp(self.decay))
            above = above * fade + key.exp() * value
            below = below * fade + key.exp()
        return torch.stack(out, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        before = F.pad(y, (0, 0, 1, -1))
        k, v, r = (torch.lerp(before, y, mix) for mix in self.mixes[:3])
        mean = self._mean(self.k(k).clamp(max=8), self.v(v))
        x = x + self.out(torch.sigmoid(self.r(r)) * mean)
        y = self.norm2(x)
        before = F.pad(y, (0, 0, 1, -1))
        k, r = (torch.lerp(before, y, mix) for mix in self.mixes[3:])
        return x + torch.sigmoid(self.gate(r)) * self.value(F.relu(self.key(k)) ** 2)


def rwkv() -> Made:
    return Language([Rwkv(64) for _ in range(3)]), text(length=33)


class NeuralOde(nn.Module):
    """The same layer again and again: Runge-Kutta steps of an equation."""

    def __init__(self, width: int = 128, steps: int = 6) -> None:
        super().__init__()
        self.into = nn.Linear(16, width)
        self.field = nn.Sequential(
            nn.Linear(width + 1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
        )
        self.head = nn.Linear(width, 1)
        self.steps = steps

    def _field(self, x: Tensor, time: float) -> Tensor:
        return self.field(torch.cat([x, x.new_full((x.shape[0], 1), time)], -1))

    def forward(self, points: Tensor, targets: Tensor) -> Tensor:
        x, h = self.into(points), 1 / self.steps
        for i in range(self.steps):
            time = i * h
            k1 = self._field(x, time)
            k2 = self._field(x + h / 2 * k1, time + h / 2)
            k3 = self._field(x + h / 2 * k2, time + h / 2)
            k4 = self._field(x + h * k3, time + h)
            x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return F.mse_loss(self.head(x)[:, 0], targets)


def neural_ode() -> Made:
    return NeuralOde(), {"points": torch.randn(256, 16), "targets": torch.randn(256)}


MAKERS = {
    "lstm": lstm,
    "gru_both_ways": gru_both_ways,
    "seq_to_seq": seq_to_seq,
    "cells_in_a_loop": cells_in_a_loop,
    "s4": s4,
    "mamba": mamba,
    "retnet": retnet,
    "linear_attention": linear_attention,
    "rwkv": rwkv,
    "neural_ode": neural_ode,
}
