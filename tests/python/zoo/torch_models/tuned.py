"""Fields over space, and ways to train: adapters, ties, random depth, contrast."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.torch_models.images import Bottleneck, VitBlock, pictures
from zoo.torch_models.made import Made
from zoo.torch_models.structures import Attention


class Nerf(nn.Module):
    """A perceptron over points of rays, and their colours added up along each."""

    def __init__(self, width: int = 128, waves: int = 6) -> None:
        super().__init__()
        given = 3 + 6 * waves
        self.first = nn.Linear(given, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.again = nn.Linear(width + given, width)
        self.density, self.colour = nn.Linear(width, 1), nn.Linear(width, 3)
        self.register_buffer("waves", 2.0 ** torch.arange(waves))

    def forward(self, origins: Tensor, directions: Tensor, colours: Tensor) -> Tensor:
        depth = torch.linspace(0, 1, 32, device=origins.device)
        depth = depth + torch.rand(len(origins), 32, device=origins.device) / 32
        points = origins[:, None] + directions[:, None] * depth[..., None]
        angles = (points[..., None] * self.waves).flatten(-2)
        given = torch.cat([points, angles.sin(), angles.cos()], -1)
        x = F.relu(self.first(given))
        for layer in self.layers:
            x = F.relu(layer(x))
        x = F.relu(self.again(torch.cat([x, given], -1)))
        opaque = 1 - torch.exp(-F.softplus(self.density(x)[..., 0]) / 32)
        clear = torch.cumprod(1 - opaque + 1e-10, -1)
        weights = opaque * torch.cat([torch.ones_like(clear[:, :1]), clear[:, :-1]], 1)
        made = (weights[..., None] * self.colour(x).sigmoid()).sum(1)
        return F.mse_loss(made, colours)


def nerf() -> Made:
    rays = {"origins": torch.randn(64, 3), "directions": torch.randn(64, 3)}
    return Nerf(), {**rays, "colours": torch.rand(64, 3)}


class SpectralLayer(nn.Module):
    """A product in frequencies with complex weights, beside a pointwise one."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        shape = (2, width, width, modes, modes)
        self.weights = nn.Parameter(torch.randn(shape, dtype=torch.cfloat) / width)
        self.point = nn.Conv2d(width, width, 1)
        self.modes = modes

    def forward(self, x: Tensor) -> Tensor:
        m = self.modes
        spectrum = torch.fft.rfft2(x)
        out = torch.zeros_like(spectrum)
        low, high = spectrum[..., :m, :m], spectrum[..., -m:, :m]
        out[..., :m, :m] = torch.einsum("bixy,ioxy->boxy", low, self.weights[0])
        out[..., -m:, :m] = torch.einsum("bixy,ioxy->boxy", high, self.weights[1])
        return F.gelu(torch.fft.irfft2(out, s=x.shape[-2:]) + self.point(x))


class Fno(nn.Module):
    """A Fourier neural operator: from one field to another."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.lift = nn.Conv2d(3, width, 1)
        self.layers = nn.Sequential(*(SpectralLayer(width, 8) for _ in range(4)))
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, fields: Tensor, solutions: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.layers(self.lift(fields))), solutions)


def fno() -> Made:
    fields, solutions = torch.randn(4, 3, 32, 32), torch.randn(4, 1, 32, 32)
    return Fno(), {"fields": fields, "solutions": solutions}


class Perceiver(nn.Module):
    """A few latents look at many inputs, again and again with the same weights."""

    def __init__(self, width: int = 64, latents: int = 32) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(latents, width) * 0.02)
        self.into = nn.Linear(16, width)
        self.cross = nn.MultiheadAttention(width, 1, batch_first=True)
        self.blocks = nn.ModuleList(VitBlock(width, 4) for _ in range(3))
        self.head = nn.Linear(width, 10)

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        given = self.into(inputs)
        x = self.latents.expand(len(inputs), -1, -1)
        for _ in range(2):
            x = x + self.cross(x, given, given, need_weights=False)[0]
            for block in self.blocks:
                x = block(x)
        return F.cross_entropy(self.head(x.mean(1)), labels)


def perceiver() -> Made:
    inputs = torch.randn(8, 256, 16)
    return Perceiver(), {"inputs": inputs, "labels": torch.randint(10, (8,))}


class Adapted(nn.Module):
    """A frozen linear layer with a small one beside it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        more = self.up(self.down(F.dropout(x, 0.1, self.training)))
        return self.base(x) + 2.0 * more


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = Attention(width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        y = self.down(F.gelu(self.up(self.norm(x))))
        return x + F.dropout(y, 0.1, self.training)


class Gpt(nn.Module):
    """A language model; its head may be its embedding, layers may be left out."""

    def __init__(
        self, width: int = 64, layers: int = 4, tied: bool = False, drop: float = 0.0
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.drop = drop

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids[:, :-1])
        for layer in self.layers:
            if self.drop and self.training and float(torch.rand(())) < self.drop:
                continue
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def _ids() -> dict[str, Tensor]:
    return {"ids": torch.randint(256, (4, 65))}


def lora() -> Made:
    model = Gpt().requires_grad_(False)
    for layer in model.layers:
        assert isinstance(layer, Layer)
        layer.attention.qkv = Adapted(layer.attention.qkv)  # type: ignore[assignment]
        layer.up = Adapted(layer.up)  # type: ignore[assignment]
    return model, _ids()


def tied() -> Made:
    return Gpt(tied=True), _ids()


def layer_drop() -> Made:
    return Gpt(drop=0.3), _ids()


class FrozenNorms(nn.Module):
    """Fine-tuned with the statistics of its norms as they are: in eval()."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(*(Bottleneck(width, 32) for _ in range(3)))
        self.head = nn.Linear(width, 10)

    def train(self, mode: bool = True) -> FrozenNorms:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.blocks(self.stem(images)).mean((2, 3))
        return F.cross_entropy(self.head(F.dropout(x, 0.2, self.training)), labels)


def frozen_norms() -> Made:
    return FrozenNorms(), pictures(side=16)


class Siamese(nn.Module):
    """Two views of each image through one body; the others are what differs."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 2, 1)
        self.blocks = nn.Sequential(*(Bottleneck(width, 32) for _ in range(3)))
        self.project = nn.Sequential(
            nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1)
        )

    def _view(self, images: Tensor) -> Tensor:
        noisy = images + 0.1 * torch.randn_like(images)
        x = self.blocks(self.stem(noisy)).mean((2, 3))
        return F.normalize(self.project(x), dim=-1)

    def forward(self, images: Tensor) -> Tensor:
        a, b = self._view(images), self._view(images.flip(-1))
        both = torch.cat([a, b])
        alike = both @ both.t() / 0.1
        alike = alike.masked_fill(
            torch.eye(len(both), dtype=torch.bool, device=both.device), float("-inf")
        )
        other = torch.arange(len(both), device=both.device).roll(len(a))
        return F.cross_entropy(alike, other)


def siamese() -> Made:
    return Siamese(), {"images": torch.randn(8, 3, 24, 24)}


MAKERS = {
    "nerf": nerf,
    "fno": fno,
    "perceiver": perceiver,
    "lora": lora,
    "tied": tied,
    "frozen_norms": frozen_norms,
    "siamese": siamese,
}
RANDOM_DEPTH = {"layer_drop": layer_drop}
