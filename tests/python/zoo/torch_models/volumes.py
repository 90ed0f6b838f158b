"""Images to masks of them, volumes and clips: U-Nets and 3-D convolutions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.torch_models.images import CLASSES
from zoo.torch_models.made import Made


class DoubleConv(nn.Sequential):
    """Twice convolution, normalisation and activation, in two or three dimensions."""

    def __init__(self, given: int, width: int, dims: int = 2) -> None:
        conv = nn.Conv2d if dims == 2 else nn.Conv3d
        norm = nn.BatchNorm2d if dims == 2 else nn.InstanceNorm3d
        super().__init__(
            conv(given, width, 3, padding=1),
            norm(width),
            nn.LeakyReLU(0.1, inplace=True),
            conv(width, width, 3, padding=1),
            norm(width),
            nn.LeakyReLU(0.1, inplace=True),
        )


class UNet(nn.Module):
    def __init__(self, channels: int, width: int, dims: int) -> None:
        super().__init__()
        pool = nn.MaxPool2d if dims == 2 else nn.MaxPool3d
        up = nn.ConvTranspose2d if dims == 2 else nn.ConvTranspose3d
        conv = nn.Conv2d if dims == 2 else nn.Conv3d
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(
            DoubleConv(given, w, dims)
            for given, w in zip([channels, *widths], widths, strict=False)
        )
        self.pool = pool(2)
        self.up = nn.ModuleList(up(2 * w, w, 2, stride=2) for w in widths[1::-1])
        self.merge = nn.ModuleList(DoubleConv(2 * w, w, dims) for w in widths[1::-1])
        self.head = conv(width, 2, 1)

    def forward(self, images: Tensor, masks: Tensor) -> Tensor:
        x, kept = images, []
        for i, block in enumerate(self.down):
            x = block(self.pool(x) if i else x)
            kept.append(x)
        kept.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([kept.pop(), up(x)], 1))
        logits = self.head(F.dropout(x, 0.1, self.training))
        chance = logits.softmax(1)[:, 1]
        dice = 2 * (chance * masks).sum() / (chance.sum() + masks.sum() + 1)
        return F.cross_entropy(logits, masks) + 1 - dice


def unet_2d() -> Made:
    batch = {"images": torch.randn(2, 3, 48, 48)}
    return UNet(3, 16, 2), {**batch, "masks": torch.randint(2, (2, 48, 48))}


def unet_3d() -> Made:
    batch = {"images": torch.randn(1, 1, 16, 32, 32)}
    return UNet(1, 8, 3), {**batch, "masks": torch.randint(2, (1, 16, 32, 32))}


class VideoBlock(nn.Module):
    """A 3-D convolution as one over space and one over time, and a whole one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.space = nn.Conv3d(width, width, (1, 3, 3), padding=(0, 1, 1), bias=False)
        self.time = nn.Conv3d(width, width, (3, 1, 1), padding=(1, 0, 0), bias=False)
        self.both = nn.Conv3d(width, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm3d(width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.space(x)))
        y = F.relu(self.norms[1](self.time(y)))
        return F.relu(x + self.norms[2](self.both(y)))


class Video(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv3d(3, width, (3, 7, 7), (1, 2, 2), (1, 3, 3))
        self.blocks = nn.Sequential(*(VideoBlock(width) for _ in range(3)))
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(width, CLASSES))

    def forward(self, clips: Tensor, labels: Tensor) -> Tensor:
        x = self.blocks(self.stem(clips))
        return F.cross_entropy(self.head(x.mean((2, 3, 4))), labels)


def video() -> Made:
    clips = torch.randn(2, 3, 8, 32, 32)
    return Video(), {"clips": clips, "labels": torch.randint(CLASSES, (2,))}


MAKERS = {"unet_2d": unet_2d, "unet_3d": unet_3d, "video": video}
