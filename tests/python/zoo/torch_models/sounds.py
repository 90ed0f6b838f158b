"""Sound: stacks of one-dimensional convolutions, speech to text, vocoders."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from zoo.torch_models.made import Made


class GatedBlock(nn.Module):
    """A dilated causal convolution with a gate, as WaveNet has them."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, 2 * width, 2, dilation=dilation)
        self.out = nn.Conv1d(width, 2 * width, 1)
        self.dilation = dilation

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.conv(F.pad(x, (self.dilation, 0))).chunk(2, 1)
        more, skip = self.out(torch.tanh(a) * torch.sigmoid(b)).chunk(2, 1)
        return x + more, skip


class WaveNet(nn.Module):
    def __init__(self, width: int = 32, levels: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(levels, width)
        self.blocks = nn.ModuleList(GatedBlock(width, 2**i) for i in range(6))
        self.head = nn.Sequential(
            nn.ReLU(), nn.Dropout(0.1), nn.Conv1d(width, levels, 1)
        )

    def forward(self, samples: Tensor) -> Tensor:
        x = self.embed(samples[:, :-1]).transpose(1, 2)
        total = 0.0
        for block in self.blocks:
            x, skip = block(x)
            total = total + skip
        return F.cross_entropy(self.head(total), samples[:, 1:])


def wavenet() -> Made:
    return WaveNet(), {"samples": torch.randint(64, (2, 513))}


class TemporalBlock(nn.Module):
    """Two causal convolutions with normalised weights and a residual."""

    def __init__(self, given: int, width: int, dilation: int) -> None:
        super().__init__()
        pad = 2 * dilation
        self.conv1 = weight_norm(nn.Conv1d(given, width, 3, 1, pad, dilation))
        self.conv2 = weight_norm(nn.Conv1d(width, width, 3, 1, pad, dilation))
        self.skip = nn.Conv1d(given, width, 1) if given != width else None
        self.dropout = nn.Dropout(0.2)
        self.pad = pad

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(F.relu(self.conv1(x)[..., : -self.pad]))
        y = self.dropout(F.relu(self.conv2(y)[..., : -self.pad]))
        return F.relu(y + (x if self.skip is None else self.skip(x)))


class Tcn(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            TemporalBlock(8, width, 1),
            *(TemporalBlock(width, width, 2**i) for i in range(1, 5)),
        )
        self.head = nn.Linear(width, 1)

    def forward(self, series: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.blocks(series)[..., -1])[:, 0], targets)


def tcn() -> Made:
    return Tcn(), {"series": torch.randn(4, 8, 256), "targets": torch.randn(4)}


class ConformerBlock(nn.Module):
    """Half a perceptron, attention, a convolution, half a perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.halves = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.SiLU(),
                nn.Dropout(0.1),
                nn.Linear(4 * width, width),
            )
            for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.attention = nn.MultiheadAttention(width, heads, 0.1, batch_first=True)
        self.up = nn.Conv1d(width, 2 * width, 1)
        self.depthwise = nn.Conv1d(width, width, 15, padding=7, groups=width)
        self.norm = nn.BatchNorm1d(width)
        self.down = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        x = x + 0.5 * self.halves[0](x)
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, key_padding_mask=padded, need_weights=False)[0]
        y = F.glu(self.up(self.norms[1](x).transpose(1, 2)), 1)
        y = self.down(F.silu(self.norm(self.depthwise(y))))
        x = x + F.dropout(y.transpose(1, 2), 0.1, self.training)
        return self.norms[2](x + 0.5 * self.halves[1](x))


class Conformer(nn.Module):
    """Spectra, a quarter as many frames, blocks, and CTC over letters."""

    def __init__(self, width: int = 64, letters: int = 30) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU()
        )
        self.project = nn.Linear(16 * 10, width)
        self.blocks = nn.ModuleList(ConformerBlock(width, 4) for _ in range(3))
        self.head = nn.Linear(width, letters)

    def forward(
        self, spectra: Tensor, lengths: Tensor, letters: Tensor, counts: Tensor
    ) -> Tensor:
        x = self.stem(spectra[:, None])
        x = self.project(x.transpose(1, 2).flatten(2))
        lengths = lengths // 4
        padded = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
        for block in self.blocks:
            x = block(x, padded)
        chances = self.head(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(chances, letters, lengths, counts)


def conformer() -> Made:
    return Conformer(), {
        "spectra": torch.randn(4, 256, 40),
        "lengths": torch.tensor([256, 256, 200, 180]),
        "letters": torch.randint(1, 30, (4, 12)),
        "counts": torch.tensor([12, 10, 12, 8]),
    }


class ResidualStack(nn.Module):
    """Residuals at three dilations, normalised weights."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            weight_norm(
                nn.Conv1d(width, width, kernel, padding="same", dilation=dilation)
            )
            for dilation in (1, 3, 5)
        )

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = x + conv(F.leaky_relu(x, 0.1))
        return x


class HifiGan(nn.Module):
    """A vocoder: transposed convolutions from spectra to samples."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem = weight_norm(nn.Conv1d(40, width, 7, padding=3))
        widths = [width // 2**i for i in range(4)]
        self.ups = nn.ModuleList(
            weight_norm(nn.ConvTranspose1d(a, b, 8, 4, 2)) for a, b in pairwise(widths)
        )
        self.stacks = nn.ModuleList(
            nn.ModuleList(ResidualStack(b, kernel) for kernel in (3, 7))
            for b in widths[1:]
        )
        self.head = weight_norm(nn.Conv1d(widths[-1], 1, 7, padding=3))

    def forward(self, spectra: Tensor, sound: Tensor) -> Tensor:
        x = self.stem(spectra)
        for up, stacks in zip(self.ups, self.stacks, strict=True):
            x = up(F.leaky_relu(x, 0.1))
            x = sum(stack(x) for stack in stacks) / len(stacks)
        made = torch.tanh(self.head(F.leaky_relu(x)))[:, 0]
        window = torch.hann_window(128, device=made.device)
        ours, real = (
            torch.stft(s, 128, 32, window=window, return_complex=True).abs()
            for s in (made, sound)
        )
        return F.l1_loss(made, sound) + F.l1_loss(ours, real)


def hifi_gan() -> Made:
    return HifiGan(), {
        "spectra": torch.randn(2, 40, 32),
        "sound": torch.randn(2, 32 * 64).clamp(-1, 1),
    }


MAKERS = {
    "wavenet": wavenet,
    "tcn": tcn,
    "conformer": conformer,
    "hifi_gan": hifi_gan,
}
