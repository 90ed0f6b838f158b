"""Images: convolutional networks, windows, mixers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 10


def _pictures(rows: int = 4, side: int = 32, channels: int = 3) -> dict[str, Tensor]:
    return {
        "images": torch.randn(rows, channels, side, side),
        "labels": torch.randint(CLASSES, (rows,)),
    }


class Bottleneck(nn.Module):
    """A residual block of 1x1, 3x3 and 1x1 convolutions, added in place."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, inner, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, width, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(width)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.act(self.norm1(self.conv1(x)))
        out = self.act(self.norm2(self.conv2(out)))
        out = self.norm3(self.conv3(out))
        out += x
        return self.act(out)


class ResNet(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        self.blocks = nn.Sequential(*(Bottleneck(width, width // 2) for _ in range(4)))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.blocks(self.stem(images)).mean((2, 3))
        return F.cross_entropy(self.head(self.dropout(x)), labels)


def resnet() -> tuple[nn.Module, dict[str, Any]]:
    return ResNet(), _pictures()


MAKERS = {"resnet": resnet}
