"""Architectures with a trick each, tiny: samplers, graphs, scans, shared weights.

As in replay_torch_zoo: a module's forward takes a batch and returns its loss.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from replay_torch_zoo import (
    CLASSES,
    WIDTH,
    Architecture,
    Batch,
    images,
    only_images,
    plain,
    sequences,
    tokens,
    vectors,
)


class Variational(nn.Module):
    """Draws its code with randn_like: the noise must come back in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Flatten(), nn.Linear(192, 24), nn.Softplus())
        self.decode = nn.Sequential(nn.Linear(12, 192), nn.Dropout(0.1), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, log_variance = self.encode(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp())
        loss = F.binary_cross_entropy(self.decode(z), x.flatten(1))
        return loss + 0.01 * divergence.mean()


class Graph(nn.Module):
    """Message passing: gather along edges, add at the nodes, keep a degree buffer."""

    degree: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Linear(2 * WIDTH, WIDTH)
        self.update = nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("degree", torch.zeros(6))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        for _ in range(2):
            pair = torch.cat([x[source], x.index_select(0, target)], dim=1)
            sent = self.dropout(F.elu(self.message(pair)))
            inbox = torch.zeros_like(x).index_add_(0, target, sent)
            x = self.update(inbox, x)
        ones = torch.ones_like(target, dtype=x.dtype)
        self.degree.zero_().scatter_add_(0, target, ones)
        logits: torch.Tensor = self.head(x / (1 + self.degree[:, None]))
        return logits


def graph() -> Batch:
    edges = torch.randint(6, (2, 14))
    return torch.randn(6, WIDTH), edges, torch.randint(CLASSES, (6,))


class SelectiveScan(nn.Module):
    """What Mamba does, step by step: gates made from the input, a carried state."""

    def __init__(self) -> None:
        super().__init__()
        self.split = nn.Linear(WIDTH, 2 * WIDTH)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, padding=2)
        self.project = nn.Linear(WIDTH, 1 + 2 * 4)
        self.log_decay = nn.Parameter(torch.zeros(WIDTH, 4))
        self.skip = nn.Parameter(torch.ones(WIDTH))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u, gate = self.split(x).chunk(2, dim=-1)
        u = F.silu(self.convolution(u.mT)[..., : x.shape[1]].mT)
        delta, read, write = self.project(u).split([1, 4, 4], dim=-1)
        delta = F.softplus(delta)
        state = u.new_zeros(x.shape[0], WIDTH, 4)
        outputs = torch.empty_like(u)
        for t in range(x.shape[1]):
            decay = torch.exp(-delta[:, t, :, None] * self.log_decay.exp())
            state = (
                decay * state + (delta[:, t] * u[:, t])[..., None] * read[:, t, None]
            )
            outputs[:, t] = (state * write[:, t, None]).sum(-1)
        y = (outputs + u * self.skip) * F.silu(gate)
        logits: torch.Tensor = self.head(self.dropout(y))
        return logits


class Experts(nn.Module):
    """Top-2 of 4 experts: how many rows each gets depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.route = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        noisy = self.route(rows) + 0.1 * torch.randn(len(rows), 4, device=x.device)
        weights, chosen = noisy.softmax(-1).topk(2)
        out = torch.zeros_like(rows)
        for i, expert in enumerate(self.experts):
            row, place = torch.where(chosen == i)
            out.index_add_(0, row, expert(rows[row]) * weights[row, place, None])
        logits: torch.Tensor = self.head(F.dropout(out, 0.1, self.training))
        return logits.view(*x.shape[:-1], CLASSES)


class Unrolled(nn.Module):
    """One block used six times with Runge-Kutta steps, then its transpose: all tied."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(
            nn.Linear(WIDTH, 24), nn.Tanh(), nn.Dropout(0.1), nn.Linear(24, WIDTH)
        )
        self.embedding = nn.Embedding(CLASSES, WIDTH, max_norm=1.0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for _ in range(3):
            middle = x + 0.25 * self.field(x)
            x = x + 0.5 * self.field(middle)
        return F.linear(x, self.embedding.weight)


class Hypernetwork(nn.Module):
    """A network that writes another's weights, which is then called with them."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Linear(WIDTH, CLASSES)
        self.writer = nn.Linear(WIDTH, WIDTH * CLASSES + CLASSES)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.writer(self.dropout(x).mean(0)).tanh()
        weight, bias = flat.split([WIDTH * CLASSES, CLASSES])
        written = {"weight": weight.view(CLASSES, WIDTH), "bias": bias}
        logits: torch.Tensor = self.main(x) + functional_call(self.main, written, (x,))
        return logits


class Recommender(nn.Module):
    """Bags of embeddings and all their pairwise products, as DLRM has."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(CLASSES, 8, mode=mode) for mode in ("sum", "mean")
        )
        self.head = nn.Sequential(
            nn.Linear(8 * 2 + 1, 12),
            nn.PReLU(),
            nn.AlphaDropout(0.1),
            nn.Linear(12, 10),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        bags = torch.stack([bag(ids) for bag in self.bags], dim=1)
        products = torch.bmm(bags, bags.mT)
        upper = products[:, *torch.triu_indices(2, 2, 1, device=ids.device)]
        logits: torch.Tensor = self.head(torch.cat([bags.flatten(1), upper], dim=1))
        return logits


def bags() -> Batch:
    return torch.randint(CLASSES, (6, 4)), torch.randint(CLASSES, (6,))


class WaveNet(nn.Module):
    """Gated dilated convolutions; skips summed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.ModuleList(
            nn.Conv1d(WIDTH, 2 * WIDTH, 2, dilation=2**i, padding=2**i)
            for i in range(3)
        )
        self.head = nn.Conv1d(WIDTH, CLASSES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.mT.contiguous()
        skips = torch.zeros_like(x)
        for convolution in self.filters:
            y = F.glu(convolution(x)[..., : x.shape[-1]], dim=1)
            y = F.feature_alpha_dropout(y, 0.1, self.training)
            skips += y
            x = x + y
        logits: torch.Tensor = self.head(F.relu(skips))
        return logits.mT


class Points(nn.Module):
    """PointNet with a learnt rotation; maxima route gradients by index."""

    def __init__(self) -> None:
        super().__init__()
        self.rotate = nn.Linear(WIDTH, WIDTH * WIDTH)
        self.lift = nn.Sequential(
            nn.Conv1d(WIDTH, 24, 1), nn.BatchNorm1d(24), nn.Hardswish(inplace=True)
        )
        self.head = nn.Sequential(nn.Dropout1d(0.2), nn.Linear(48, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turn = self.rotate(x.amax(1)).view(-1, WIDTH, WIDTH)
        points = self.lift((x + torch.bmm(x, turn)).mT)
        highest, _ = points.max(-1, keepdim=True)
        both = torch.cat([highest.expand_as(points), points], dim=1)
        logits: torch.Tensor = self.head(both.mT)
        return logits


class Quantised(nn.Module):
    """A code book reached by a straight-through estimate, and Gumbel noise."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(8, WIDTH))
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Mish(), nn.Dropout(0.1))
        self.choose = nn.Linear(WIDTH, 8)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        nearest = torch.cdist(x, self.codes).argmin(-1)
        hard = F.embedding(nearest, self.codes)
        straight = x + (hard - x).detach()
        soft = F.gumbel_softmax(self.choose(x), tau=0.7) @ self.codes
        logits: torch.Tensor = self.head(straight + soft)
        return logits


class FourierMixing(nn.Module):
    """FNet: complex values inside, and a learnt filter in the frequency domain."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(4, WIDTH, dtype=torch.cfloat))
        self.norm = nn.RMSNorm(WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(x, dim=1, norm="ortho") * self.filter
        y = torch.fft.irfft(spectrum, n=x.shape[1], dim=1, norm="ortho")
        y = y + torch.fft.fft2(x).real
        logits: torch.Tensor = self.head(self.dropout(self.norm(x + y)))
        return logits


class Twins(nn.Module):
    """One encoder on two noisy views of the batch, one side without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU6(inplace=True), nn.Flatten()
        )
        self.predictor = nn.Sequential(
            nn.Linear(216, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 216)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        near = self.encoder(x + 0.1 * torch.randn_like(x))
        with torch.no_grad():
            far = self.encoder(F.dropout(x, 0.2))
        return -F.cosine_similarity(self.predictor(near), far).mean()


ARCHITECTURES: dict[str, Architecture] = {
    "variational": Architecture(Variational, only_images),
    "graph": Architecture(plain(Graph), graph),
    "selective_scan": Architecture(plain(SelectiveScan), sequences),
    "experts": Architecture(plain(Experts), sequences),
    "unrolled_tied": Architecture(plain(Unrolled), tokens),
    "hypernetwork": Architecture(plain(Hypernetwork), vectors),
    "recommender": Architecture(plain(Recommender), bags),
    "wavenet": Architecture(plain(WaveNet), sequences),
    "points": Architecture(plain(Points), sequences),
    "quantised": Architecture(plain(Quantised), sequences),
    "fourier": Architecture(plain(FourierMixing), sequences),
    "twins": Architecture(Twins, lambda: images()[:1]),
}
