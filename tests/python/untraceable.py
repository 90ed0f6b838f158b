"""Models that cannot be traced, and how tests train them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from compat_twins import (
    ROWS,
    Net,
    Record,
    batch,
)

STEPS = 6


class Branching(Net):
    """Values decide what it does, so that fakes cannot run it."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__(depth)
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return super().forward(x if x.sum() > 0 else -x)


class Routed(Net):
    """A mixture of experts: how many rows go where is known when it runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.statistics(self.first(x))
        for i, block in enumerate(self.blocks):
            rows = torch.nonzero(x[:, i] > 0).squeeze(1)
            x = x.index_copy(0, rows, block(x[rows]))
        out: torch.Tensor = self.head(x)
        return out


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * gradient + 0 * x


class WithFunction(Branching):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(super().forward(x))  # type: ignore[no-any-return]


class WithFunc(Net):
    """torch.func forbids saved-tensor hooks while it runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.statistics(self.first(x))
        for block in self.blocks:
            x = block(x)
        scale = torch.func.grad(lambda y: y.square().sum())(x)
        out: torch.Tensor = self.head(x + scale)
        return out


def make(kind: type[nn.Module], **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(**options)


def drive(model: nn.Module, record: Record) -> None:
    """Batches that differ, a loss of the loop's own, clipping."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        loss = model(batch(step).to(next(model.parameters()).device)).square().mean()
        record("loss", loss)
        loss.backward()
        record.gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def train(model: nn.Module, steps: int = STEPS, rows: int = ROWS) -> None:
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        model(batch(step, rows).to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
