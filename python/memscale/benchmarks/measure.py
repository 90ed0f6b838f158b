"""The peak of real training steps, to compare a prediction with."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from memscale.benchmarks.models import LossFn, Sample
from memscale.memory import track

__all__ = ["Attach", "OptimizerFactory", "forward", "loss_of", "measure_peak"]

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
# What is done to a model while it trains.
Attach = Callable[[nn.Module], AbstractContextManager[None]]


@contextlib.contextmanager
def _plain(model: nn.Module) -> Iterator[None]:
    yield


def forward(model: nn.Module, batch: Sample | torch.Tensor) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch) if isinstance(batch, torch.Tensor) else model(*batch)


def loss_of(output: Any, loss_fn: LossFn | None = None) -> torch.Tensor:
    """``loss_fn(output)``, or the loss that the model computed itself."""
    if loss_fn is not None:
        return loss_fn(output)
    loss = output if isinstance(output, torch.Tensor) else output.loss
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        raise ValueError("the model gives no loss: pass labels, or a loss_fn")
    return loss


def _loss(
    model: nn.Module, batch: Sample | torch.Tensor, loss_fn: LossFn | None
) -> torch.Tensor:
    # A function of its own, so that nothing but the loss outlives the forward: an
    # output kept in the loop's scope would hold logits and caches through backward.
    return loss_of(forward(model, batch), loss_fn)


def measure_peak(
    model: nn.Module,
    batch: Sample | torch.Tensor,
    loss_fn: LossFn | None,
    optimizer_factory: OptimizerFactory,
    device: torch.device | str,
    steps: int = 3,
    attach: Attach = _plain,
) -> int:
    """Train a copy of ``model`` on ``device``; the peak bytes of a settled step.

    Counted is all that the run holds on the device: parameters, buffers, the batch,
    gradients, optimizer state, activations, workspaces. The first step is left out,
    because the optimizer makes its state there. ``model`` and ``batch`` are not
    changed, so that a second call returns the same number.
    """
    if steps < 2:
        raise ValueError(f"steps is {steps}: the second is the first that counts")
    device = torch.device(device)
    if any(tensor.is_meta for tensor in model.parameters()):
        raise ValueError("a model on the meta device cannot be trained")
    # What is garbage now must not be freed, and so subtracted, half-way.
    gc.collect()
    with track(device) as run:
        trained = copy.deepcopy(model).to(device)
        for module in trained.modules():  # deepcopy's buffers are not counted
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.clone()
        moved = tree_map(
            lambda x: x.to(device, copy=True) if isinstance(x, torch.Tensor) else x,
            batch,
        )
        optimizer = optimizer_factory(
            [p for p in trained.parameters() if p.requires_grad]
        )
        # Dropout's noise can decide where a mixture of experts sends its tokens.
        torch.manual_seed(0)

        def step() -> None:
            loss = _loss(trained, moved, loss_fn)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

        with attach(trained):
            step()
            with track(device) as settled:
                for _ in range(steps - 1):
                    step()
    return settled.peak - run.before
