"""Models in plain torch: what the benchmarks need beside Hugging Face's.

Each computes its loss when it is given a target, and returns its output otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["LstmModel", "ResNet", "UNet"]


class _Basic(nn.Module):
    """ResNet's block of two 3x3 convolutions."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.shortcut = _shortcut(inputs, width, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # In place, as torchvision does: the sum's storage becomes the output's.
        y: torch.Tensor = self.body(x)
        y += self.shortcut(x)
        out: torch.Tensor = self.relu(y)
        return out


class _Bottleneck(nn.Module):
    """ResNet's block of 1x1, 3x3 and 1x1 convolutions."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = _shortcut(inputs, outputs, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.body(x)
        y += self.shortcut(x)
        out: torch.Tensor = self.relu(y)
        return out


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
    )


class ResNet(nn.Module):
    def __init__(
        self,
        layers: Sequence[int] = (2, 2, 2, 2),
        bottleneck: bool = False,
        width: int = 64,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        block = _Bottleneck if bottleneck else _Basic
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        channels = width
        stages: list[nn.Module] = []
        for stage, count in enumerate(layers):
            for i in range(count):
                stride = 2 if stage > 0 and i == 0 else 1
                stages.append(block(channels, width << stage, stride))
                channels = (width << stage) * block.expansion
        self.stages = nn.Sequential(*stages)
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
        )

    def forward(
        self, images: torch.Tensor, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.stages(self.stem(images)))
        return logits if labels is None else F.cross_entropy(logits, labels)


def _double(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.GroupNorm(8, outputs),
        nn.SiLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.GroupNorm(8, outputs),
        nn.SiLU(),
    )


class UNet(nn.Module):
    """Long skips: the first activations are needed by the last layers."""

    def __init__(
        self, width: int = 64, depth: int = 4, channels: int = 3, dropout: float = 0.0
    ) -> None:
        super().__init__()
        widths = [width << i for i in range(depth + 1)]
        self.down = nn.ModuleList(
            _double(a, b)
            for a, b in zip([channels, *widths], widths[:-1], strict=False)
        )
        self.middle = nn.Sequential(
            _double(widths[-2], widths[-1]), nn.Dropout(dropout)
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths[:-1])
        )
        self.merge = nn.ModuleList(_double(2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], dim=1))
        out: torch.Tensor = self.head(x)
        return out


class LstmModel(nn.Module):
    """A language model: embedding, LSTM layers, head."""

    def __init__(
        self,
        vocabulary: int = 32768,
        width: int = 1024,
        layers: int = 2,
        dropout: float = 0.2,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=dropout)
        self.head = nn.Linear(width, vocabulary)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(
        self, tokens: torch.Tensor, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        states, _ = self.lstm(self.dropout(self.embedding(tokens)))
        logits: torch.Tensor = self.head(self.dropout(states))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
