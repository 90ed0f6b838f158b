"""Flows that can be run backwards, and capsules that agree."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.torch_models.made import Made


class Coupling(nn.Module):
    """One half of the channels is scaled and shifted by what the other half says."""

    def __init__(self, channels: int, width: int, flip: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(channels // 2, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 1),
            nn.ReLU(),
            nn.Conv2d(width, channels, 3, padding=1),
        )
        self.flip = flip

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.flip(1).chunk(2, 1) if self.flip else x.chunk(2, 1)
        log, shift = self.net(a).chunk(2, 1)
        log = torch.tanh(log)
        return torch.cat([a, b * log.exp() + shift], 1), log.sum((1, 2, 3))


class Invertible(nn.Module):
    """A 1x1 convolution whose determinant counts, after a learned normalisation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.shift = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.weight = nn.Parameter(torch.linalg.qr(torch.randn(channels, channels))[0])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        places = x.shape[2] * x.shape[3]
        x = F.conv2d((x + self.shift) * self.log.exp(), self.weight[:, :, None, None])
        return x, (torch.slogdet(self.weight)[1] + self.log.sum()) * places


class Flow(nn.Module):
    def __init__(self, steps: list[nn.Module]) -> None:
        super().__init__()
        self.steps = nn.ModuleList(steps)

    def forward(self, images: Tensor) -> Tensor:
        x = F.pixel_unshuffle(images + torch.rand_like(images) / 256, 2)
        total = x.new_zeros(x.shape[0])
        for step in self.steps:
            x, log = step(x)
            total = total + log
        prior = -0.5 * (x.square() + math.log(2 * math.pi)).sum((1, 2, 3))
        return -(prior + total).mean() / x[0].numel()


def real_nvp() -> Made:
    steps: list[nn.Module] = [Coupling(12, 48, bool(i % 2)) for i in range(4)]
    return Flow(steps), {"images": torch.rand(4, 3, 32, 32)}


def glow() -> Made:
    steps: list[nn.Module] = []
    for _ in range(3):
        steps += [Invertible(12), Coupling(12, 48, flip=False)]
    return Flow(steps), {"images": torch.rand(4, 3, 32, 32)}


def squash(x: Tensor) -> Tensor:
    square = x.square().sum(-1, keepdim=True)
    return square / (1 + square) * x / (square + 1e-8).sqrt()


class Capsules(nn.Module):
    """Capsules that agree on classes by routing in a loop."""

    def __init__(self, rounds: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 64, 9)
        self.primary = nn.Conv2d(64, 32, 9, stride=2)
        self.weight = nn.Parameter(torch.randn(1, 144, 10, 16, 8) * 0.05)
        self.decoder = nn.Sequential(
            nn.Linear(160, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 784)
        )
        self.rounds = rounds

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        rows = images.shape[0]
        x = self.primary(F.relu(self.conv(images)))
        x = squash(x.view(rows, 4, 8, -1).transpose(2, 3).reshape(rows, -1, 8))
        votes = (self.weight @ x[:, :, None, :, None]).squeeze(-1)
        logits = votes.new_zeros(rows, votes.shape[1], 10)
        for i in range(self.rounds):
            agreed = squash((logits.softmax(-1)[..., None] * votes).sum(1))
            if i < self.rounds - 1:
                logits = logits + (votes * agreed[:, None]).sum(-1)
        hot = F.one_hot(labels, 10).float()
        length = agreed.norm(dim=-1)
        margin = hot * F.relu(0.9 - length).square()
        margin = margin + 0.5 * (1 - hot) * F.relu(length - 0.1).square()
        made = self.decoder((agreed * hot[..., None]).flatten(1)).sigmoid()
        return margin.sum(1).mean() + 0.01 * F.mse_loss(made, images.flatten(1))


def capsules() -> Made:
    images = torch.rand(8, 1, 28, 28)
    return Capsules(), {"images": images, "labels": torch.randint(10, (8,))}


MAKERS = {"real_nvp": real_nvp, "glow": glow, "capsules": capsules}
