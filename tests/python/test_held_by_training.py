"""What a training holds between its steps, counted on the CPU, and kinds of samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import Config

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 64


def _model() -> nn.Module:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))
    return nn.Sequential(*blocks)


def _batch() -> torch.Tensor:
    return torch.randn(32, WIDTH)


def _bytes(tensors: Iterator[Any]) -> int:
    return sum(each.nbytes for each in tensors if isinstance(each, torch.Tensor))


def _states(optimizer: torch.optim.Optimizer) -> int:
    return _bytes(each for s in optimizer.state.values() for each in s.values())


def _held(model: nn.Module) -> int:
    """As the last measured step began."""
    executor: Any = model._memscale_executor
    assert executor._kind is not None
    held = executor._kind.held
    assert isinstance(held, int)
    return held


def test_state_that_is_made_after_many_micro_batches() -> None:
    model = memscale.wrap(_model(), Config(budget="1GiB", enable_logging=False))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = _batch()
    for _ in range(2):
        for _ in range(8):
            model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    gradients = _bytes(model.parameters())  # those of the micro-batches before
    expected = gradients + _bytes(model.parameters()) + batch.nbytes
    assert _held(model) == expected + _states(optimizer)


def test_every_optimizer_of_the_model() -> None:
    model = memscale.wrap(_model(), Config(budget="1GiB", enable_logging=False))
    optimizers = [torch.optim.AdamW(block.parameters()) for block in model]
    batch = _batch()
    for _ in range(3):
        model(batch).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected = _bytes(model.parameters()) + batch.nbytes
    assert _held(model) == expected + sum(map(_states, optimizers))


def test_a_sample_for_a_model_in_eval_is_of_its_training() -> None:
    model = _model().eval()
    config = Config(force_optimize=True, enable_logging=False)
    memscale.wrap(model, config, sample_input=_batch())
    executor: Any = model._memscale_executor
    assert len(executor.plans) == 1
    model.train()
    model(_batch()).sum().backward()
    assert len(executor.plans) == 1  # the sample's is used
    model.zero_grad()
    model.eval()
    model(_batch()).sum().backward()
    assert len(executor.plans) == 2
    assert executor.stats().calls_unlike_keep_set == 0
