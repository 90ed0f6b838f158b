"""How a training loop may be written around a random program, by name."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from random_model import Program
from random_steps import ROWS, WIDTH
from random_tricks import Rounds


def batch(device: str) -> Tensor:
    return torch.randn(ROWS, WIDTH).to(device)


def _plain(model: Program, x: Tensor, rng: random.Random) -> Tensor:
    loss: Tensor = model(x)[0]
    loss.backward()
    return loss


def _autocast(model: Program, x: Tensor, rng: random.Random) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        loss: Tensor = model(x)[0]
    loss.backward()
    return loss


def _two_graphs(model: Program, x: Tensor, rng: random.Random) -> Tensor:
    loss: Tensor = model(x)[0] + model(batch(x.device.type))[0]
    loss.backward()
    return loss


def _any_order(model: Program, x: Tensor, rng: random.Random) -> Tensor:
    losses = [model(each)[0] for each in (x, x * 2, batch(x.device.type))]
    rng.shuffle(losses)
    for loss in losses:
        loss.backward()
    total: Tensor = torch.stack([loss.detach() for loss in losses]).sum()
    return total


def _evaluates_between(model: Program, x: Tensor, rng: random.Random) -> Tensor:
    loss: Tensor = model(x)[0]
    with torch.no_grad():
        model(batch(x.device.type))
    loss.backward()
    return loss


def _writes_outputs(model: Program, x: Tensor, rng: random.Random) -> Tensor:
    loss, outputs, pool = model(x)
    with torch.no_grad():
        for output in outputs[-2:]:
            output.mul_(1.5)
        if rng.random() < 0.5:
            pool.pick_to_write(rng.randrange(7)).mul_(2)
    del pool
    loss.backward()
    result: Tensor = loss
    return result


def _writes_input(model: Program, x: Tensor, rng: random.Random) -> Tensor:
    loss: Tensor = model(x)[0]
    x.add_(1)
    loss.backward()
    return loss


def _data_writes_input(model: Program, x: Tensor, rng: random.Random) -> Tensor:
    loss: Tensor = model(x)[0]
    x.data.add_(1)
    loss.backward()
    return loss


def _writes_parameters(model: Program, x: Tensor, rng: random.Random) -> Tensor:
    loss: Tensor = model(x)[0]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1)
    loss.backward()
    return loss


def _data_writes_parameters(model: Program, x: Tensor, rng: random.Random) -> Tensor:
    loss: Tensor = model(x)[0]
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(0.1)
    loss.backward()
    return loss


def _retains(model: Program, x: Tensor, rng: random.Random) -> Tensor:
    loss: Tensor = model(x)[0]
    loss.backward(retain_graph=True)
    (loss * 2).backward()
    return loss


def _autograd_grad(model: Program, x: Tensor, rng: random.Random) -> Tensor:
    """Some of the gradients first, then all."""
    loss: Tensor = model(x)[0]
    some = list(model.parameters())[:: rng.randrange(1, 4)]
    given = torch.autograd.grad(loss, some, retain_graph=True, allow_unused=True)
    loss.backward()
    for parameter, gradient in zip(some, given, strict=True):
        if gradient is not None and parameter.grad is not None:
            parameter.grad += gradient
    return loss


def _mode_around(model: Program, x: Tensor, rng: random.Random) -> Tensor:
    with Rounds():
        loss: Tensor = model(x)[0]
    loss.backward()
    return loss


def _hook_writes(model: Program, x: Tensor, rng: random.Random) -> Tensor:
    """As optimizers do that step in backward."""
    loss, _, pool = model(x)
    # Not views: torch itself ends in a segmentation fault for some of them.
    tensors = [t for t in pool.whole if t.requires_grad and not t._is_view()]
    bias = rng.choice([p for p in model.parameters() if p.dim() == 1])

    def write(_: Tensor) -> None:
        with torch.no_grad():
            bias.mul_(0.9)

    rng.choice(tensors or [loss]).register_hook(write)
    del tensors, pool
    loss.backward()
    result: Tensor = loss
    return result


Way = Callable[[Program, Tensor, random.Random], Tensor]

# How a step is written; drawn for each step anew.
WAYS: dict[str, Way] = {
    "plain": _plain,
    "autocast": _autocast,
    "two_graphs": _two_graphs,
    "any_order": _any_order,
    "evaluates_between": _evaluates_between,
    "writes_outputs": _writes_outputs,
    "writes_input": _writes_input,
    "data_writes_input": _data_writes_input,
    "writes_parameters": _writes_parameters,
    "data_writes_parameters": _data_writes_parameters,
    "retains": _retains,
    "autograd_grad": _autograd_grad,
    "mode_around": _mode_around,
    "hook_writes": _hook_writes,
}
# Where we may raise torch's error though eager does not: what replay needs was
# changed, and it is too late to copy it.
MAY_REFUSE = {"writes_parameters", "hook_writes"}
