"""Models that make images: diffusion, adversarial, autoencoders."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from zoo.torch_models.made import Made


def time_embedding(times: Tensor, width: int) -> Tensor:
    steps = torch.arange(width // 2, device=times.device) / (width // 2)
    angles = times[:, None].float() * torch.exp(-math.log(10000.0) * steps)
    return torch.cat([angles.sin(), angles.cos()], -1)


class TimedBlock(nn.Module):
    """A residual block whose scale and shift depend on the time."""

    def __init__(self, given: int, width: int, timed: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, given), nn.GroupNorm(8, width)
        self.conv1 = nn.Conv2d(given, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.time = nn.Linear(timed, 2 * width)
        self.skip = nn.Conv2d(given, width, 1) if given != width else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.time(F.silu(time))[:, :, None, None].chunk(2, 1)
        y = self.norm2(y) * (1 + scale) + shift
        y = self.conv2(F.dropout(F.silu(y), 0.1, self.training))
        return self.skip(x) + y


class CrossAttention(nn.Module):
    """Places of an image look at each other and at words."""

    def __init__(self, width: int, words: int, heads: int = 4) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, width)
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(words, 2 * width, bias=False)
        self.own = nn.MultiheadAttention(width, heads, batch_first=True)
        self.out = nn.Linear(width, width)
        self.heads = heads

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        rows, width, height, _ = x.shape
        y = self.norm(x).flatten(2).transpose(1, 2)
        y = y + self.own(y, y, y, need_weights=False)[0]

        def split(t: Tensor) -> Tensor:
            return t.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        k, v = self.kv(words).chunk(2, -1)
        seen = F.scaled_dot_product_attention(split(self.q(y)), split(k), split(v))
        y = y + self.out(seen.transpose(1, 2).flatten(2))
        return x + y.transpose(1, 2).reshape(rows, width, height, -1)


class DiffusionUNet(nn.Module):
    """Predicts the noise that was added, at a random time, under words."""

    def __init__(self, width: int = 32, words: int = 48) -> None:
        super().__init__()
        timed = 4 * width
        self.width = width
        self.time = nn.Sequential(
            nn.Linear(width, timed), nn.SiLU(), nn.Linear(timed, timed)
        )
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(TimedBlock(width, width, timed) for _ in range(3))
        self.shrink = nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.middle = TimedBlock(2 * width, 2 * width, timed)
        self.attention = CrossAttention(2 * width, words)
        self.grow = nn.Conv2d(2 * width, width, 3, padding=1)
        self.up = nn.ModuleList(TimedBlock(2 * width, width, timed) for _ in range(3))
        self.head = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, images: Tensor, words: Tensor) -> Tensor:
        rows = images.shape[0]
        noise = torch.randn_like(images)
        times = torch.randint(0, 1000, (rows,), device=images.device)
        share = torch.cos(times / 1000 * math.pi / 2).square()[:, None, None, None]
        x = self.stem(share.sqrt() * images + (1 - share).sqrt() * noise)
        time, kept = self.time(time_embedding(times, self.width)), []
        for block in self.down:
            x = block(x, time)
            kept.append(x)
        x = self.attention(self.middle(self.shrink(x), time), words)
        x = self.grow(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        for block in self.up:
            x = block(torch.cat([x, kept.pop()], 1), time)
        return F.mse_loss(self.head(F.silu(x)), noise)


def diffusion_unet() -> Made:
    batch = {"images": torch.randn(2, 3, 32, 32), "words": torch.randn(2, 16, 48)}
    return DiffusionUNet(), batch


class DitBlock(nn.Module):
    """A transformer's block whose norms are set by the time (adaLN-Zero)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = nn.MultiheadAttention(width, heads, 0.1, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        parts = self.time(time)[:, None].chunk(6, -1)
        y = self.norm1(x) * (1 + parts[0]) + parts[1]
        x = x + parts[2] * self.attention(y, y, y, need_weights=False)[0]
        return x + parts[5] * self.mlp(self.norm2(x) * (1 + parts[3]) + parts[4])


class Dit(nn.Module):
    def __init__(self, width: int = 64, patch: int = 4) -> None:
        super().__init__()
        self.patch = nn.Conv2d(4, width, patch, stride=patch)
        self.classes = nn.Embedding(11, width)
        self.place = nn.Parameter(torch.randn(1, 64, width) * 0.02)
        self.blocks = nn.ModuleList(DitBlock(width, 4) for _ in range(4))
        self.head = nn.Linear(width, patch * patch * 4)
        self.width, self.size = width, patch

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        noise = torch.randn_like(images)
        times = torch.rand(images.shape[0], device=images.device)
        mix = times[:, None, None, None]
        x = self.patch((1 - mix) * images + mix * noise).flatten(2).transpose(1, 2)
        x = x + self.place
        dropped = torch.rand(labels.shape, device=labels.device) < 0.1
        time = time_embedding(times * 1000, self.width)
        time = time + self.classes(labels.masked_fill(dropped, 10))
        for block in self.blocks:
            x = block(x, time)
        x = self.head(x).transpose(1, 2)
        given = F.fold(x, images.shape[-2:], self.size, stride=self.size)
        return F.mse_loss(given, noise - images)


def dit() -> Made:
    images = torch.randn(4, 4, 32, 32)
    return Dit(), {"images": images, "labels": torch.randint(10, (4,))}


class Generator(nn.Sequential):
    def __init__(self, width: int = 32) -> None:
        def up(given: int, to: int, stride: int, padding: int) -> list[nn.Module]:
            conv = nn.ConvTranspose2d(given, to, 4, stride, padding, bias=False)
            return [conv, nn.BatchNorm2d(to), nn.ReLU(inplace=True)]

        super().__init__(
            *up(64, 4 * width, 1, 0),
            *up(4 * width, 2 * width, 2, 1),
            *up(2 * width, width, 2, 1),
            nn.ConvTranspose2d(width, 3, 4, 2, 1),
            nn.Tanh(),
        )


class Discriminator(nn.Module):
    """Its weights are divided by their largest singular value."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        widths = [3, width, 2 * width, 4 * width]
        self.layers = nn.ModuleList(
            spectral_norm(nn.Conv2d(a, b, 4, 2, 1)) for a, b in pairwise(widths)
        )
        self.head = spectral_norm(nn.Linear(4 * width * 16, 1))

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for layer in self.layers:
            x = F.dropout2d(F.leaky_relu(layer(x), 0.2), 0.1, self.training)
        return self.head(x.flatten(1))


class Gan(nn.Module):
    """Both players in one step: hinge losses, the made images detached for one."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = Generator(), Discriminator()

    def forward(self, images: Tensor) -> Tensor:
        seeds = torch.randn(images.shape[0], 64, 1, 1, device=images.device)
        made = self.generator(seeds)
        real, fake = self.discriminator(images), self.discriminator(made.detach())
        judged = F.relu(1 - real).mean() + F.relu(1 + fake).mean()
        return judged - self.discriminator(made).mean()


def gan() -> Made:
    return Gan(), {"images": torch.randn(8, 3, 32, 32)}


class RealOrNot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.discriminator = Discriminator()

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        judged = self.discriminator(images)[:, 0]
        return F.binary_cross_entropy_with_logits(judged, labels)


def discriminator() -> Made:
    labels = torch.randint(2, (8,)).float()
    return RealOrNot(), {"images": torch.randn(8, 3, 32, 32), "labels": labels}


class Vae(nn.Module):
    def __init__(self, width: int = 32, latent: int = 32) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1),
            nn.ELU(),
            nn.Conv2d(width, 2 * width, 4, 2, 1),
            nn.ELU(),
            nn.Flatten(),
            nn.Linear(2 * width * 64, 2 * latent),
        )
        self.decoder = nn.Sequential(
            nn.Linear(latent, 2 * width * 64),
            nn.Unflatten(1, (2 * width, 8, 8)),
            nn.ELU(),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, width, 3, padding=1),
            nn.ELU(),
            nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.Conv2d(width, 3, 3, padding=1),
            nn.Sigmoid(),
        )

    def forward(self, images: Tensor) -> Tensor:
        mean, log = self.encoder(images).chunk(2, -1)
        drawn = mean + torch.randn_like(mean) * (0.5 * log).exp()
        made = self.decoder(drawn)
        apart = -0.5 * (1 + log - mean.square() - log.exp()).sum(-1).mean()
        return F.binary_cross_entropy(made, images) + 0.001 * apart


def vae() -> Made:
    return Vae(), {"images": torch.rand(8, 3, 32, 32)}


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout2d(self.conv1(F.relu(x)), 0.1, self.training)
        return x + self.conv2(F.relu(y))


class VqVae(nn.Module):
    """Nearest codes, with gradients straight through; codes move by averages."""

    def __init__(self, width: int = 32, codes: int = 128) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1), *(Residual(width) for _ in range(3))
        )
        self.decoder = nn.Sequential(
            *(Residual(width) for _ in range(3)), nn.ConvTranspose2d(width, 3, 4, 2, 1)
        )
        self.register_buffer("codes", torch.randn(codes, width))
        self.register_buffer("counts", torch.ones(codes))

    def forward(self, images: Tensor) -> Tensor:
        x = self.encoder(images).permute(0, 2, 3, 1)
        flat = x.reshape(-1, x.shape[-1])
        far = flat.square().sum(1, True) - 2 * flat @ self.codes.t()
        nearest = (far + self.codes.square().sum(1)).argmin(1)
        found = F.embedding(nearest, self.codes).view_as(x)
        with torch.no_grad():
            hot = F.one_hot(nearest, len(self.codes)).type_as(flat)
            self.counts.mul_(0.99).add_(hot.sum(0), alpha=0.01)
            self.codes.lerp_(hot.t() @ flat / hot.sum(0).clamp(1)[:, None], 0.01)
        straight = x + (found - x).detach()
        made = self.decoder(straight.permute(0, 3, 1, 2))
        return F.mse_loss(made, images) + 0.25 * F.mse_loss(x, found.detach())


def vq_vae() -> Made:
    return VqVae(), {"images": torch.randn(4, 3, 32, 32)}


MAKERS = {
    "diffusion_unet": diffusion_unet,
    "dit": dit,
    "gan": gan,
    "discriminator": discriminator,
    "vae": vae,
    "vq_vae": vq_vae,
}
