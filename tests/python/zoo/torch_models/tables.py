"""Tables, series and recommendations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.torch_models.made import Made


class FtTransformer(nn.Module):
    """Each column is a token, numbers and categories alike."""

    def __init__(self, numbers: int = 12, width: int = 64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(numbers, width) * 0.1)
        self.bias = nn.Parameter(torch.zeros(numbers, width))
        self.categories = nn.ModuleList(nn.Embedding(20, width) for _ in range(4))
        self.first = nn.Parameter(torch.randn(1, 1, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 8, 2 * width, 0.1, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(3)
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, numbers: Tensor, categories: Tensor, targets: Tensor) -> Tensor:
        columns = zip(self.categories, categories.unbind(1), strict=True)
        tokens = [embed(column) for embed, column in columns]
        x = torch.cat(
            [
                self.first.expand(len(numbers), -1, -1),
                numbers[..., None] * self.weight + self.bias,
                torch.stack(tokens, 1),
            ],
            1,
        )
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(self.head(x[:, 0])[:, 0], targets)


def ft_transformer() -> Made:
    return FtTransformer(), {
        "numbers": torch.randn(64, 12),
        "categories": torch.randint(20, (64, 4)),
        "targets": torch.randn(64),
    }


def _clicks(rows: int, fields: int, kinds: int) -> dict[str, Tensor]:
    return {
        "numbers": torch.randn(rows, 13),
        "categories": torch.randint(kinds, (rows, fields)),
        "clicked": torch.randint(2, (rows,)).float(),
    }


class Dlrm(nn.Module):
    """Bags of categories and numbers, and the products of each with each."""

    def __init__(self, fields: int = 8, kinds: int = 500, width: int = 32) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(kinds, width, mode="sum") for _ in range(fields)
        )
        self.below = nn.Sequential(
            nn.Linear(13, 128), nn.ReLU(), nn.Linear(128, width), nn.ReLU()
        )
        pairs = (fields + 1) * fields // 2
        self.above = nn.Sequential(
            nn.Linear(pairs + width, 128),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(128, 128),
            nn.ReLU(),
            nn.Linear(128, 1),
        )
        self.register_buffer("pairs", torch.tril_indices(fields + 1, fields + 1, -1))

    def forward(
        self, numbers: Tensor, categories: Tensor, offsets: Tensor, clicked: Tensor
    ) -> Tensor:
        dense = self.below(numbers)
        parts = [
            dense,
            *(bag(categories[i], offsets) for i, bag in enumerate(self.bags)),
        ]
        x = torch.stack(parts, 1)
        products = torch.bmm(x, x.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        given = self.above(torch.cat([dense, products], 1))[:, 0]
        return F.binary_cross_entropy_with_logits(given, clicked)


def dlrm() -> Made:
    batch = _clicks(256, 8, 500)
    batch["categories"] = torch.randint(500, (8, 1024))
    return Dlrm(), {**batch, "offsets": torch.arange(0, 1024, 4)}


class DeepFm(nn.Module):
    """A factorization machine beside a network over the same embeddings."""

    def __init__(self, fields: int = 10, kinds: int = 300, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(fields * kinds, width)
        self.linear = nn.Embedding(fields * kinds, 1)
        self.numbers = nn.Linear(13, 1)
        layers: list[nn.Module] = []
        for given in (fields * width, 128, 128):
            layers += [
                nn.Linear(given, 128),
                nn.BatchNorm1d(128),
                nn.ReLU(),
                nn.Dropout(0.2),
            ]
        self.deep = nn.Sequential(*layers, nn.Linear(128, 1))
        self.register_buffer("first", torch.arange(fields) * kinds)

    def forward(self, numbers: Tensor, categories: Tensor, clicked: Tensor) -> Tensor:
        places = categories + self.first
        x = self.embed(places)
        pairs = 0.5 * (x.sum(1).square() - x.square().sum(1)).sum(1, keepdim=True)
        given = self.linear(places).sum(1) + self.numbers(numbers) + pairs
        given = given + self.deep(x.flatten(1))
        return F.binary_cross_entropy_with_logits(given[:, 0], clicked)


def deepfm() -> Made:
    return DeepFm(), _clicks(256, 10, 300)


def _series(rows: int, length: int, channels: int, ahead: int) -> dict[str, Tensor]:
    return {
        "past": torch.randn(rows, length, channels),
        "future": torch.randn(rows, ahead, channels),
    }


class NormedLayer(nn.Module):
    """A transformer's layer with batch normalisation over a transposed input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, 0.1, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(2 * width, width),
        )
        self.norm1, self.norm2 = nn.BatchNorm1d(width), nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.attention(x, x, x, need_weights=False)[0]
        y = self.norm1(y.transpose(1, 2)).transpose(1, 2)
        return self.norm2((y + self.mlp(y)).transpose(1, 2)).transpose(1, 2)


class PatchTst(nn.Module):
    """Patches of each channel, apart from the others."""

    def __init__(self, width: int = 64, ahead: int = 24) -> None:
        super().__init__()
        self.patch = nn.Linear(16, width)
        self.place = nn.Parameter(torch.randn(31, width) * 0.02)
        self.layers = nn.ModuleList(NormedLayer(width) for _ in range(3))
        self.head = nn.Sequential(nn.Flatten(1), nn.Linear(31 * width, ahead))

    def forward(self, past: Tensor, future: Tensor) -> Tensor:
        mean, scale = past.mean(1, True), past.std(1, keepdim=True) + 1e-5
        x = ((past - mean) / scale).transpose(1, 2).flatten(0, 1).unfold(-1, 16, 8)
        x = F.dropout(self.patch(x) + self.place, 0.1, self.training)
        for layer in self.layers:
            x = layer(x)
        given = self.head(x).view(len(past), past.shape[-1], -1).transpose(1, 2)
        return F.mse_loss(given * scale + mean, future)


def patch_tst() -> Made:
    return PatchTst(), _series(4, 256, 4, 24)


class NBeatsBlock(nn.Module):
    """What it explains is taken off the past and added to the future."""

    def __init__(self, length: int, ahead: int, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for given in (length, width, width):
            layers += [nn.Linear(given, width), nn.ReLU(inplace=True)]
        self.body = nn.Sequential(*layers, nn.Dropout(0.1))
        self.back, self.ahead = nn.Linear(width, length), nn.Linear(width, ahead)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.body(x)
        return self.back(y), self.ahead(y)


class NBeats(nn.Module):
    def __init__(self, length: int = 96, ahead: int = 24) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NBeatsBlock(length, ahead, 128) for _ in range(4))

    def forward(self, past: Tensor, future: Tensor) -> Tensor:
        rest, total = past[..., 0], torch.zeros_like(future[..., 0])
        for block in self.blocks:
            back, ahead = block(rest)
            rest, total = rest - back, total + ahead
        wrong = (total - future[..., 0]).abs()
        return (wrong / (total.abs() + future[..., 0].abs() + 1e-3)).mean()


def n_beats() -> Made:
    return NBeats(), _series(256, 96, 1, 24)


class Gated(nn.Module):
    """A gated residual network."""

    def __init__(self, given: int, width: int) -> None:
        super().__init__()
        self.up, self.mid = nn.Linear(given, width), nn.Linear(width, width)
        self.gate = nn.Linear(width, 2 * width)
        self.skip = nn.Linear(given, width) if given != width else nn.Identity()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.mid(F.elu(self.up(x))), 0.1, self.training)
        return self.norm(self.skip(x) + F.glu(self.gate(y), -1))


class Fusion(nn.Module):
    """Which variables count is learned; an LSTM, then attention; quantiles (TFT)."""

    def __init__(self, channels: int = 6, width: int = 48, ahead: int = 24) -> None:
        super().__init__()
        self.each = nn.ModuleList(Gated(1, width) for _ in range(channels))
        self.choose = Gated(channels, channels)
        self.recurrent = nn.LSTM(width, width, batch_first=True)
        self.enrich, self.after = Gated(width, width), Gated(width, width)
        self.attention = nn.MultiheadAttention(width, 4, 0.1, batch_first=True)
        self.head = nn.Linear(width, 3)
        self.ahead = ahead
        self.register_buffer("quantiles", torch.tensor([0.1, 0.5, 0.9]))

    def forward(self, past: Tensor, future: Tensor) -> Tensor:
        parts = [net(past[..., i : i + 1]) for i, net in enumerate(self.each)]
        weights = self.choose(past).softmax(-1)
        x = (torch.stack(parts, -1) * weights[..., None, :]).sum(-1)
        x = self.enrich(x + self.recurrent(x)[0])
        length = x.shape[1]
        future_mask = torch.ones(length, length, dtype=torch.bool, device=x.device)
        seen, weights = self.attention(x, x, x, attn_mask=future_mask.triu(1))
        x = self.after(x + seen)
        wrong = future[..., :1] - self.head(x[:, -self.ahead :])
        return torch.maximum(
            self.quantiles * wrong, (self.quantiles - 1) * wrong
        ).mean()


def fusion() -> Made:
    return Fusion(), _series(8, 72, 6, 24)


MAKERS = {
    "ft_transformer": ft_transformer,
    "dlrm": dlrm,
    "deepfm": deepfm,
    "patch_tst": patch_tst,
    "n_beats": n_beats,
    "fusion": fusion,
}
