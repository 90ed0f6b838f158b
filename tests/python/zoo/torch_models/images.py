"""Images: convolutional networks, windows, mixers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.torch_models.made import Made

CLASSES = 10


def pictures(rows: int = 4, side: int = 32, channels: int = 3) -> dict[str, Tensor]:
    return {
        "images": torch.randn(rows, channels, side, side),
        "labels": torch.randint(CLASSES, (rows,)),
    }


class Classifier(nn.Module):
    """A body that gives features of an image, pooled, then classes."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body = body
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.body(images).mean((2, 3))
        return F.cross_entropy(self.head(self.dropout(x)), labels)


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


def resnet() -> Made:
    width = 64
    stem = [
        nn.Conv2d(3, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
    ]
    blocks = [Bottleneck(width, width // 2) for _ in range(4)]
    return Classifier(nn.Sequential(*stem, *blocks), width), pictures()


class Dense(nn.Module):
    """Each layer sees what all layers before it gave."""

    def __init__(self, width: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(width + i * growth),
                nn.ReLU(),
                nn.Conv2d(width + i * growth, growth, 3, padding=1, bias=False),
            )
            for i in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            new = F.dropout(layer(torch.cat(features, 1)), 0.1, self.training)
            features.append(new)
        return torch.cat(features, 1)


def densenet() -> Made:
    body = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        Dense(32, 16, 4),
        nn.Conv2d(96, 48, 1),
        nn.AvgPool2d(2),
        Dense(48, 16, 4),
    )
    return Classifier(body, 112), pictures()


class Squeeze(nn.Module):
    """Squeeze and excitation: each channel is scaled by what all of them say."""

    def __init__(self, width: int, act: nn.Module, gate: nn.Module) -> None:
        super().__init__()
        self.down = nn.Conv2d(width, width // 4, 1)
        self.up = nn.Conv2d(width // 4, width, 1)
        self.act, self.gate = act, gate

    def forward(self, x: Tensor) -> Tensor:
        scale = F.adaptive_avg_pool2d(x, 1)
        return x * self.gate(self.up(self.act(self.down(scale))))


class Inverted(nn.Module):
    """An inverted residual: wide inside, depthwise, each row dropped at random."""

    def __init__(self, width: int, act: type[nn.Module], gate: nn.Module) -> None:
        super().__init__()
        inner = width * 4
        self.body = nn.Sequential(
            nn.Conv2d(width, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            act(),
            nn.Conv2d(inner, inner, 3, padding=1, groups=inner, bias=False),
            nn.BatchNorm2d(inner),
            act(),
            Squeeze(inner, act(), gate),
            nn.Conv2d(inner, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        keep = torch.rand(x.shape[0], 1, 1, 1, device=x.device) > 0.1
        return x + y * keep / 0.9


def mobilenet() -> Made:
    blocks = [Inverted(24, nn.Hardswish, nn.Hardsigmoid()) for _ in range(3)]
    stem = nn.Sequential(nn.Conv2d(3, 24, 3, 2, 1), nn.BatchNorm2d(24), nn.Hardswish())
    return Classifier(nn.Sequential(stem, *blocks), 24), pictures()


def efficientnet() -> Made:
    blocks = [Inverted(24, nn.SiLU, nn.Sigmoid()) for _ in range(3)]
    stem = nn.Sequential(nn.Conv2d(3, 24, 3, 2, 1), nn.BatchNorm2d(24), nn.SiLU())
    model = Classifier(nn.Sequential(stem, *blocks), 24)
    return model.to(memory_format=torch.channels_last), pictures()


class ConvNextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        return x + F.dropout(y, 0.1, self.training).permute(0, 3, 1, 2)


def convnext() -> Made:
    stem = nn.Conv2d(3, 48, 4, stride=4)
    blocks = [ConvNextBlock(48) for _ in range(3)]
    return Classifier(nn.Sequential(stem, *blocks), 48), pictures(side=64)


class MixerBlock(nn.Module):
    """A perceptron over places, then one over channels."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.places = self._perceptron(places)
        self.channels = self._perceptron(width)

    @staticmethod
    def _perceptron(width: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(width, 2 * width),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.places(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Patches(nn.Module):
    """An image as a row of patches through blocks, and back to a map."""

    def __init__(self, patch: int, width: int, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, patch, stride=patch)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images)
        rows, width, height, _ = x.shape
        x = x.flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return x.transpose(1, 2).reshape(rows, width, height, -1)


def mlp_mixer() -> Made:
    blocks: list[nn.Module] = [MixerBlock(64, 96) for _ in range(4)]
    return Classifier(Patches(4, 96, blocks), 96), pictures(rows=8)


class VitBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(4 * width, width),
        )
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        rows, places, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(rows, places, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(rows, places, width))
        return x + self.mlp(self.norm2(x))


def vit() -> Made:
    blocks: list[nn.Module] = [VitBlock(96, 4) for _ in range(4)]
    return Classifier(Patches(4, 96, blocks), 96), pictures(rows=8)


class WindowBlock(nn.Module):
    """Attention within windows, shifted or not, with a bias for each offset."""

    def __init__(self, width: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.bias = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        place = torch.stack(torch.meshgrid(*[torch.arange(window)] * 2, indexing="ij"))
        offset = place.flatten(1)[:, :, None] - place.flatten(1)[:, None] + window - 1
        self.register_buffer("offset", offset[0] * (2 * window - 1) + offset[1])
        self.heads, self.window, self.shift = heads, window, shift

    def _attend(self, x: Tensor) -> Tensor:
        count, places, width = x.shape
        qkv = self.qkv(x).reshape(count, places, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5
        scores = scores + self.bias[self.offset].permute(2, 0, 1)
        weights = F.dropout(scores.softmax(-1), 0.1, self.training)
        return self.out((weights @ v).transpose(1, 2).reshape(count, places, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, height, width, channels = x.shape
        w = self.window
        y = torch.roll(self.norm1(x), (-self.shift, -self.shift), (1, 2))
        y = y.view(rows, height // w, w, width // w, w, channels)
        y = y.permute(0, 1, 3, 2, 4, 5).reshape(-1, w * w, channels)
        y = self._attend(y).view(rows, height // w, width // w, w, w, channels)
        y = y.permute(0, 1, 3, 2, 4, 5).reshape(rows, height, width, channels)
        x = x + torch.roll(y, (self.shift, self.shift), (1, 2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Swin(nn.Module):
    """Two stages of windows with the merging of patches between them."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.first = nn.ModuleList(
            WindowBlock(width, 2, 4, 2 * (i % 2)) for i in (0, 1)
        )
        self.merge = nn.Linear(4 * width, 2 * width, bias=False)
        self.second = nn.ModuleList(
            WindowBlock(2 * width, 4, 4, 2 * (i % 2)) for i in range(2)
        )

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).permute(0, 2, 3, 1)
        for block in self.first:
            x = block(x)
        corners = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        x = self.merge(torch.cat(corners, -1))
        for block in self.second:
            x = block(x)
        return x.permute(0, 3, 1, 2)


def swin() -> Made:
    return Classifier(Swin(), 64), pictures(rows=4, side=64)


MAKERS = {
    "resnet": resnet,
    "densenet": densenet,
    "mobilenet": mobilenet,
    "efficientnet": efficientnet,
    "convnext": convnext,
    "mlp_mixer": mlp_mixer,
    "vit": vit,
    "swin": swin,
}
