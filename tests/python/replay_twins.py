"""Two copies of a model, one under replay, and ways to compare what they do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memscale import replay

WIDTH = 8


@dataclass
class Twins:
    """The same model twice: ``plain``, and ``ours`` under ``handle``."""

    plain: nn.Module
    ours: nn.Module
    handle: replay.Replay

    def both(self, act: Callable[[nn.Module], Any], seed: int = 3) -> tuple[Any, Any]:
        """What ``act`` returns for each, from the same random state."""
        results = []
        for model in (self.plain, self.ours):
            torch.manual_seed(seed)
            results.append(act(model))
        return results[0], results[1]

    def assert_equal_gradients(self) -> None:
        mine = dict(self.ours.named_parameters())
        assert any(p.grad is not None for p in mine.values())
        for name, parameter in self.plain.named_parameters():
            assert same(parameter.grad, mine[name].grad), name

    def assert_same_step(self, *batch: Any, **named: Any) -> None:
        """One step of each: loss, gradients, buffers and random state agree."""

        def step(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
            model.zero_grad()
            loss = model(*batch, **named).square().mean()
            loss.backward()
            return loss.detach(), torch.get_rng_state()

        plain, ours = self.both(step)
        assert torch.equal(plain[0], ours[0])
        assert torch.equal(plain[1], ours[1])
        self.assert_equal_gradients()
        buffers = dict(self.ours.named_buffers())
        for name, buffer in self.plain.named_buffers():
            assert torch.equal(buffer, buffers[name]), name


def twins(
    model: nn.Module,
    policy: replay.Policy | Mapping[str, replay.Policy] = "block",
    device: str = "cpu",
    min_bytes: int = 0,
) -> Twins:
    plain, ours = model.to(device), copy.deepcopy(model).to(device)
    return Twins(plain, ours, replay.attach(ours, policy, min_bytes=min_bytes))


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)


class Block(nn.Module):
    """A small block with dropout and something done in place."""

    def __init__(self, width: int = WIDTH, p: float = 0.2) -> None:
        super().__init__()
        self.first = nn.Linear(width, 2 * width)
        self.second = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(p)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = torch.nn.functional.gelu(self.first(x))
        y = self.dropout(self.second(y))
        y += x
        return torch.tanh(y)


class Wrapped(nn.Module):
    """A function as the only layer of a model, with a parameter to train."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = _Layer(function)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer(*args, **kwargs)


class _Layer(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, WIDTH))
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.weight, *args, **kwargs)


def blocks(count: int = 3, p: float = 0.2, width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(*(Block(width, p) for _ in range(count)))


def batch(device: str = "cpu", rows: int = 4, width: int = WIDTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(rows, width, generator=generator).to(device)
