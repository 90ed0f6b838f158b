"""Architectures in plain torch, tiny: what replay has to train to the bit.

Each is a module whose forward takes a batch and returns its loss, with dropout or
another source of randomness inside. Together they use most of what a layer can do:
in-place ops, views, shared weights, buffers updated in forward, recurrence,
scatter and gather, reparametrised weights, noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

from memscale.benchmarks.torch_models import LstmModel, ResNet, UNet

Batch = tuple[torch.Tensor, ...]
CLASSES = 10
WIDTH = 16
# Wide enough that "cheap" keeps the products over it, and only those.
INNER = 160


@dataclass(frozen=True)
class Architecture:
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]


class Loss(nn.Module):
    """A body, then cross entropy over the last dimension."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        logits = self.body(*batch[:-1])
        return F.cross_entropy(logits.flatten(0, -2), batch[-1].flatten())


def vectors() -> Batch:
    return torch.randn(6, WIDTH), torch.randint(CLASSES, (6,))


def images(side: int = 8) -> Batch:
    return torch.randn(3, 3, side, side), torch.randint(CLASSES, (3,))


def tokens(length: int = 7) -> Batch:
    ids = torch.randint(CLASSES, (2, length))
    return ids, ids.roll(-1, dims=1)


def sequences() -> Batch:
    return torch.randn(2, 6, WIDTH), torch.randint(CLASSES, (2, 6))


def only_images() -> Batch:
    return (torch.rand(3, 3, 8, 8),)


class MeanSquare(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.body(x), x)


class Residual(nn.Module):
    """A pre-norm block that adds in place, as hand-written code often does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.body = nn.Sequential(
            nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)
        )
        self.dropout = nn.Dropout(0.1, inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.dropout(self.body(self.norm(x)))
        y += x
        return torch.relu_(y)


def residual_mlp() -> nn.Module:
    return Loss(nn.Sequential(*(Residual() for _ in range(3)), nn.Linear(WIDTH, 10)))


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, 0.1, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # With weights: the path that computes the scores in the open.
        y, weights = self.attention(x, x, x, need_weights=True)
        logits: torch.Tensor = self.head(self.norm(x + y * weights.mean()))
        return logits


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, INNER, 0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        logits: torch.Tensor = self.head(self.encoder(x, mask=mask.to(x.device)))
        return logits


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(WIDTH, 2, 1, 2, INNER, 0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(x, x.flip(1)))
        return logits


class Recurrent(nn.Module):
    def __init__(
        self, kind: Callable[..., nn.Module], bidirectional: bool = False
    ) -> None:
        super().__init__()
        self.layers = kind(
            WIDTH, 12, 2, dropout=0.2, batch_first=True, bidirectional=bidirectional
        )
        self.head = nn.Linear(24 if bidirectional else 12, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layers(x)[0])
        return logits


class Cells(nn.Module):
    """One cell called in a loop: each call reads what the one before wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, 12)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(x.shape[0], 12)
        c = torch.zeros_like(h)
        outputs = []
        for step in x.unbind(1):
            h, c = self.cell(step, (h, c))
            h = self.dropout(h)
            outputs.append(h)
        logits: torch.Tensor = self.head(torch.stack(outputs, 1))
        return logits


def autoencoder() -> nn.Module:
    return MeanSquare(
        nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1),
            nn.BatchNorm2d(16),
            nn.LeakyReLU(0.1, inplace=True),
            nn.Dropout2d(0.2),
            nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1),
            nn.InstanceNorm2d(8, affine=True),
            nn.RReLU(),
            nn.Conv2d(8, 3, 3, padding=1),
            nn.Sigmoid(),
        )
    )


class Discriminator(nn.Module):
    """Both forms of spectral_norm: each updates its buffers in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.old = spectral_norm(nn.Conv2d(3, 8, 3, padding=1))
        self.new = parametrizations.spectral_norm(nn.Conv2d(8, 8, 3, stride=2))
        self.head = parametrizations.weight_norm(nn.Linear(72, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(F.leaky_relu(self.old(x), 0.2), 0.1, self.training)
        x = F.leaky_relu_(self.new(x), 0.2)
        logits: torch.Tensor = self.head(x.flatten(1))
        return logits


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.across = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
        self.within = nn.Sequential(
            nn.Linear(WIDTH, INNER), nn.GELU(), nn.Dropout(0.1), nn.Linear(INNER, WIDTH)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.across(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        out: torch.Tensor = x + self.within(self.norms[1](x))
        return out


def mixer() -> nn.Module:
    return Loss(nn.Sequential(Mixer(), Mixer(), nn.Linear(WIDTH, CLASSES)))


class DenseBlock(nn.Module):
    """Every convolution reads all the outputs before it."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(4 * (i + 1)),
                nn.ReLU(inplace=True),
                nn.Conv2d(4 * (i + 1), 4, 3, padding=1),
                nn.Dropout(0.1),
            )
            for i in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [x]
        for convolution in self.convolutions:
            features.append(convolution(torch.cat(features, 1)))
        return torch.cat(features, 1)


def densenet() -> nn.Module:
    pool = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(256, CLASSES))
    return Loss(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), DenseBlock(), pool))


class Squeeze(nn.Module):
    """EfficientNet's block: depthwise, squeeze and excite, stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Sequential(
            nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16), nn.SiLU(inplace=True)
        )
        self.depthwise = nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False),
            nn.BatchNorm2d(16),
            nn.SiLU(inplace=True),
        )
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.project = nn.Sequential(nn.Conv2d(16, 8, 1), nn.BatchNorm2d(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.depthwise(self.expand(x))
        scale = F.silu(self.squeeze(F.adaptive_avg_pool2d(y, 1)), inplace=True)
        y = self.project(torch.sigmoid(self.excite(scale)) * y)
        keep = torch.empty(x.shape[0], 1, 1, 1, device=x.device).bernoulli_(0.8)
        out: torch.Tensor = x + y * keep.div_(0.8)
        return out


def efficientnet() -> nn.Module:
    stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
    head = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(128, CLASSES))
    return Loss(nn.Sequential(stem, Squeeze(), Squeeze(), head))


def resnet() -> nn.Module:
    model = ResNet(layers=(1, 1), bottleneck=True, width=16, classes=CLASSES)
    model.head.insert(2, nn.Dropout(0.2))
    return model


def basic_resnet() -> nn.Module:
    model = ResNet(layers=(1, 1), width=4, classes=CLASSES)
    model.head.insert(2, nn.Dropout(0.2))
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.to(memory_format=torch.channels_last)
    return model


def plain(body: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Loss(body())


ARCHITECTURES: dict[str, Architecture] = {
    "residual_mlp": Architecture(residual_mlp, vectors),
    "attention": Architecture(plain(SelfAttention), sequences),
    "encoder": Architecture(plain(Encoder), sequences),
    "encoder_decoder": Architecture(plain(EncoderDecoder), sequences),
    "lstm": Architecture(plain(lambda: Recurrent(nn.LSTM, True)), sequences),
    "gru": Architecture(plain(lambda: Recurrent(nn.GRU)), sequences),
    "rnn": Architecture(plain(lambda: Recurrent(nn.RNN)), sequences),
    "lstm_cells": Architecture(plain(Cells), sequences),
    "tied_lstm": Architecture(
        lambda: LstmModel(CLASSES, 12, 2, dropout=0.2, tied=True), tokens
    ),
    "resnet_bottleneck": Architecture(resnet, lambda: images(16)),
    "resnet_channels_last": Architecture(basic_resnet, lambda: images(16)),
    "unet": Architecture(
        lambda: MeanSquare(UNet(width=8, depth=2, dropout=0.1)), only_images
    ),
    "autoencoder": Architecture(autoencoder, only_images),
    "discriminator": Architecture(plain(Discriminator), images),
    "mixer": Architecture(mixer, sequences),
    "densenet": Architecture(densenet, images),
    "efficientnet": Architecture(efficientnet, images),
}
