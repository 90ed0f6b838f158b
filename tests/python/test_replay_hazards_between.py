"""Weights that change between two backwards: the second one needs the old ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from memscale import replay


class _Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(torch.sigmoid(x + self.bias)) * 0.3


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(_Shifted(), nn.Tanh()) for _ in range(3)))


def _clip_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def _clip(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.1, 0.1)


def _two_graphs(model: nn.Module, change: Callable[[nn.Module], None]) -> None:
    x = torch.randn(16, 64)
    first, second = model(x), model(2 * x)
    first.sum().backward()
    change(model)  # as a WGAN clips its critic
    second.sum().backward()


def _anothers_backward(model: nn.Module, change: Callable[[nn.Module], None]) -> None:
    other = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    handle = replay.attach(other, "block", min_bytes=0)
    x = torch.randn(16, 64)
    ours, others = model(x), other(x)
    others.sum().backward()
    change(model)
    ours.sum().backward()
    handle.detach()


@pytest.mark.parametrize("change", [_clip_data, _clip])
@pytest.mark.parametrize("act", [_two_graphs, _anothers_backward])
@pytest.mark.parametrize("policy", ["cheap", "block"])
def test_weights_changed_between_backwards(
    act: Callable[..., None], change: Callable[[nn.Module], None], policy: str
) -> None:
    results = []
    for attached in (False, True):
        model = _model()
        handle = replay.attach(model, policy, min_bytes=0) if attached else None
        act(model, change)
        results.append([p.grad for p in model.parameters()])
        if handle is not None:
            assert handle.stats().saves_dropped > 0
    for plain, ours in zip(*results, strict=True):
        assert torch.equal(plain, ours)
