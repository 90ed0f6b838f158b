"""Graphs, point clouds, experts and detection: what indices decide."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.torch_models.made import Made

NODES, EDGES, GIVEN = 512, 2048, 32


def graph() -> dict[str, Tensor]:
    return {
        "nodes": torch.randn(NODES, GIVEN),
        "edges": torch.randint(NODES, (2, EDGES)),
        "labels": torch.randint(7, (NODES,)),
    }


class GraphModel(nn.Module):
    """Nodes through layers that know the edges, then a class for each."""

    def __init__(self, layers: list[nn.Module], width: int = 64) -> None:
        super().__init__()
        self.into = nn.Linear(GIVEN, width)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(width, 7)

    def forward(self, nodes: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        x = self.into(nodes)
        for layer in self.layers:
            x = F.dropout(layer(x, edges), 0.2, self.training)
        return F.cross_entropy(self.head(x), labels)


class Gcn(nn.Module):
    """The mean of neighbours, weighted by degrees, by index_add."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        degree = torch.ones(len(x), device=x.device)
        degree.index_add_(0, target, torch.ones_like(target, dtype=x.dtype))
        weight = (degree[source] * degree[target]).rsqrt()
        y = self.linear(x)
        gathered = torch.zeros_like(y).index_add_(
            0, target, y[source] * weight[:, None]
        )
        return F.relu(gathered + y / degree[:, None] + self.bias)


def gcn() -> Made:
    return GraphModel([Gcn(64) for _ in range(3)]), graph()


class Gat(nn.Module):
    """Attention over edges: a softmax over each node's own, by scatter."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.ends = nn.Parameter(torch.randn(2, heads, width // heads) * 0.1)
        self.heads = heads

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        y = self.linear(x).view(len(x), self.heads, -1)
        a, b = (y * self.ends[0]).sum(-1), (y * self.ends[1]).sum(-1)
        scores = F.leaky_relu(a[source] + b[target], 0.2)
        where = target[:, None].expand_as(scores)
        most = torch.full_like(a, -1e9).scatter_reduce(0, where, scores, "amax")
        scores = torch.exp(scores - most.detach()[target])
        total = torch.zeros_like(a).scatter_add(0, where, scores)
        weights = F.dropout(scores / (total[target] + 1e-9), 0.1, self.training)
        sent = y[source] * weights[..., None]
        return F.elu(torch.zeros_like(y).index_add(0, target, sent).flatten(1) + x)


def gat() -> Made:
    return GraphModel([Gat(64) for _ in range(3)]), graph()


class Messages(nn.Module):
    """A network makes each edge's message, another what a node does with them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Sequential(
            nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.update = nn.GRUCell(width, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        sent = self.message(torch.cat([x[source], x[target]], -1))
        where = target[:, None].expand_as(sent)
        mean = torch.zeros_like(x).scatter_reduce(
            0, where, sent, "mean", include_self=False
        )
        return self.norm(self.update(mean, x))


def message_passing() -> Made:
    return GraphModel([Messages(64) for _ in range(3)]), graph()


class PointNet(nn.Module):
    """A perceptron for each point, normalised over a transposed input; the largest."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.into = nn.Linear(3, width)
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(4))
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(width, 10))

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        x = self.into(points)
        for linear, norm in zip(self.linears, self.norms, strict=True):
            y = norm(linear(x).transpose(1, 2)).transpose(1, 2)
            x = x + F.relu(y)
        return F.cross_entropy(self.head(x.max(1).values), labels)


def pointnet() -> Made:
    points = torch.randn(8, 128, 3)
    return PointNet(), {"points": points, "labels": torch.randint(10, (8,))}


class TopExperts(nn.Module):
    """Each token goes to its best two experts, found by indices."""

    def __init__(self, width: int, experts: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)
            )
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        weights = weights / weights.sum(-1, True)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == i)
            given = expert(flat[token]) * weights[token, slot, None]
            out.index_add_(0, token, given)
        return x + out.view_as(x)


class DenseExperts(nn.Module):
    """All experts run for every token, as one product; the router weighs them."""

    def __init__(self, width: int, experts: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * 0.05)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * 0.05)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        weights = F.dropout(self.router(y).softmax(-1), 0.1, self.training)
        inner = F.gelu(torch.einsum("bsd,edf->besf", y, self.up))
        out = torch.einsum("besf,efd->besd", inner, self.down)
        return x + torch.einsum("besd,bse->bsd", out, weights)


class GroupedExperts(nn.Module):
    """Tokens sorted by expert, all experts in one product of groups."""

    def __init__(self, width: int, experts: int = 4) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 4 * width) * 0.05)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * 0.05)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.zeros(len(self.up), dtype=torch.int32, device=x.device)
        ones = torch.ones_like(chosen.flatten(), dtype=torch.int32)
        ends = counts.scatter_add(0, chosen.flatten(), ones).cumsum(0).int()
        token = order // 2
        gate, up = torch._grouped_mm(flat[token], self.up, offs=ends).chunk(2, -1)
        given = torch._grouped_mm(F.silu(gate) * up, self.down, offs=ends)
        given = given * weights.flatten()[order, None]
        return x + torch.zeros_like(flat).index_add(0, token, given).view_as(x)


class Attention(nn.Module):
    """Written out, causal, with dropout of its weights."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        y = F.dropout(weights, 0.1, self.training) @ v
        return x + self.out(y.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """A language model of attention and experts."""

    def __init__(self, kind: type[nn.Module], width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(200, width)
        self.layers = nn.ModuleList(
            nn.Sequential(Attention(width), kind(width)) for _ in range(3)
        )
        self.head = nn.Linear(width, 200)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids[:, 1:].flatten())


def experts_by_index() -> Made:
    return Experts(TopExperts), {"ids": torch.randint(200, (4, 65))}


def experts_dense() -> Made:
    return Experts(DenseExperts), {"ids": torch.randint(200, (4, 65))}


def experts_grouped() -> Made:
    return Experts(GroupedExperts), {"ids": torch.randint(200, (4, 65))}


class ConvBlock(nn.Sequential):
    def __init__(self, given: int, width: int, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(given, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        )


class Detector(nn.Module):
    """A pyramid of features and one head for all of them, without anchors.

    Boxes are learned where an object is: how many places that are, values decide.
    """

    def __init__(self, width: int = 32, classes: int = 5) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            ConvBlock(given, width, 2) for given in (3, width, width, width)
        )
        self.lateral = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(3))
        self.smooth = nn.ModuleList(
            nn.Conv2d(width, width, 3, padding=1) for _ in range(3)
        )
        self.tower = nn.Sequential(*(ConvBlock(width, width) for _ in range(3)))
        self.classes = nn.Conv2d(width, classes, 3, padding=1)
        self.sides = nn.Conv2d(width, 4, 3, padding=1)

    def _pyramid(self, images: Tensor) -> list[Tensor]:
        x, maps = images, []
        for block in self.down:
            x = block(x)
            maps.append(x)
        top: Tensor | None = None
        pyramid = []
        for i in (2, 1, 0):
            level = self.lateral[i](maps[i + 1])
            if top is not None:
                level = level + F.interpolate(top, size=level.shape[-2:])
            top = level
            pyramid.append(self.smooth[i](level))
        return pyramid

    def forward(self, images: Tensor, labels: Tensor, sides: Tensor) -> Tensor:
        found, logits = [], []
        for level in self._pyramid(images):
            x = F.dropout(self.tower(level), 0.1, self.training)
            logits.append(self.classes(x).flatten(2))
            found.append(self.sides(x).flatten(2))
        scores = torch.cat(logits, 2).transpose(1, 2)
        given = torch.cat(found, 2).transpose(1, 2)
        hot = F.one_hot(labels, scores.shape[-1] + 1)[..., 1:].float()
        apart = F.binary_cross_entropy_with_logits(scores, hot, reduction="none")
        chance = torch.exp(-apart)
        focal = ((1 - chance) ** 2 * apart).sum() / (labels > 0).sum().clamp(min=1)
        row, place = torch.nonzero(labels > 0, as_tuple=True)
        boxes = F.smooth_l1_loss(given[row, place].exp(), sides[row, place])
        return focal + boxes


def detector() -> Made:
    places = 16 * 16 + 8 * 8 + 4 * 4
    labels = torch.randint(1, 6, (2, places)) * (torch.rand(2, places) < 0.1)
    images, sides = torch.randn(2, 3, 64, 64), torch.rand(2, places, 4)
    return Detector(), {"images": images, "labels": labels, "sides": sides}


class Matcher(nn.Module):
    """Queries look at an image; each object takes the query that fits it best."""

    def __init__(self, width: int = 64, classes: int = 5, queries: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(
            ConvBlock(3, width // 2, 2), ConvBlock(width // 2, width, 2)
        )
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True), 3
        )
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(width, 4, 2 * width, batch_first=True), 3
        )
        self.queries = nn.Parameter(torch.randn(queries, width))
        self.classes, self.boxes = nn.Linear(width, classes + 1), nn.Linear(width, 4)

    @torch.no_grad()
    def _match(self, cost: Tensor) -> list[tuple[int, int]]:
        """The cheapest pair, then the cheapest of the others, and so on."""
        pairs, cost = [], cost.clone()
        for _ in range(cost.shape[1]):
            query, target = divmod(int(cost.argmin()), cost.shape[1])
            pairs.append((query, target))
            cost[query], cost[:, target] = float("inf"), float("inf")
        return pairs

    def forward(self, images: Tensor, labels: Tensor, boxes: Tensor) -> Tensor:
        x = self.encoder(self.body(images).flatten(2).transpose(1, 2))
        x = self.decoder(self.queries.expand(len(x), -1, -1), x)
        logits, given = self.classes(x), self.boxes(x).sigmoid()
        total = logits.new_zeros(())
        for i in range(len(images)):
            cost = torch.cdist(given[i], boxes[i], p=1)
            cost = cost - logits[i].softmax(-1)[:, labels[i]]
            query, target = map(list, zip(*self._match(cost), strict=True))
            wanted = torch.full((len(self.queries),), 5, device=images.device)
            wanted[query] = labels[i, target]
            total = total + F.cross_entropy(logits[i], wanted)
            total = total + F.l1_loss(given[i, query], boxes[i, target])
        return total


def matcher() -> Made:
    return Matcher(), {
        "images": torch.randn(2, 3, 32, 32),
        "labels": torch.randint(5, (2, 3)),
        "boxes": torch.rand(2, 3, 4),
    }


MAKERS = {
    "gcn": gcn,
    "gat": gat,
    "message_passing": message_passing,
    "pointnet": pointnet,
    "experts_by_index": experts_by_index,
    "experts_dense": experts_dense,
    "experts_grouped": experts_grouped,
    "detector": detector,
    "matcher": matcher,
}
