"""One model trained plain and trained by us, and all of it compared by its bytes."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import memscale
from memscale import Config, OptimizationMode, memory, replay
from memscale._C import Tolerance
from memscale.attach import ledger
from same_bytes import how_far, same_bytes
from zoo.inputs import Batch

STEPS = 3
# Measured is the second step, and the third follows the plan that is made anew.
CONFIG: dict[str, Any] = {
    "enable_logging": False,
    "force_optimize": True,
    "warmup_steps": 1,
}


@dataclass
class Run:
    """What training showed, by name."""

    recorded: dict[str, Tensor | None] = field(default_factory=dict)
    random_ops: bool = False
    held: int = 0  # bytes after the last step, beside the model's


def train(model: nn.Module, batch: Batch, steps: int = STEPS) -> Run:
    """A few steps of AdamW on one batch, everything recorded."""
    gc.collect()
    with memory.track("cpu") as tracker:
        run = _train(model, batch, steps)
        gc.collect()
        run.held = tracker.current - tracker.before
    return run


def _train(model: nn.Module, batch: Batch, steps: int) -> Run:
    seed(1)
    run = Run()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        before = torch.get_rng_state()
        loss = loss_of(model(**copy.deepcopy(batch)))
        run.random_ops |= not torch.equal(before, torch.get_rng_state())
        loss.backward()
        _record(run, f"step {step}: loss", loss)
        for name, parameter in model.named_parameters():
            _record(run, f"step {step}: gradient of {name}", parameter.grad)
        _record(run, f"step {step}: random state", torch.get_rng_state())
        del loss
        optimizer.step()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        _record(run, name, tensor)
    return run


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    import numpy

    numpy.random.seed(number)


def loss_of(output: Any) -> Tensor:
    """The model's own, or one that depends on all that it gives."""
    is_loss = isinstance(output, Tensor) and output.dim() == 0
    loss = output if is_loss else getattr(output, "loss", None)
    if isinstance(loss, Tensor) and loss.requires_grad:
        return loss.float().mean()
    given = [t for t in _tensors_in(output) if t.requires_grad]
    if not given:
        raise ValueError("it gives nothing that can be differentiated")
    return torch.stack([_real(t).square().mean() for t in given]).sum()


def _real(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).float()


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):  # transformers' outputs are dictionaries
        for name, each in value.items():
            if "key_values" not in str(name) and "cache" not in str(name):
                yield from _tensors_in(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors_in(each)


def _record(run: Run, name: str, tensor: Tensor | None) -> None:
    run.recorded[name] = None if tensor is None else tensor.detach().clone()


def first_difference(a: Run, b: Run) -> str | None:
    """The first thing whose bytes are not the same, and how many are not; or None."""
    if a.recorded.keys() != b.recorded.keys():
        return f"recorded by one only: {sorted(a.recorded.keys() ^ b.recorded.keys())}"
    unlike = [
        name
        for name in a.recorded
        if not same_bytes(a.recorded[name], b.recorded[name])
    ]
    if not unlike:
        return None
    theirs, ours = a.recorded[unlike[0]], b.recorded[unlike[0]]
    text = f"{unlike[0]} and {len(unlike) - 1} of {len(a.recorded) - 1} others"
    return f"{text}, {how_far(theirs, ours)}"


@dataclass
class Arm:
    """One way in which we train, compared with the plain model."""

    difference: str | None
    stats: replay.Stats
    held: int  # bytes after the last step, beyond the plain model's
    plan: str = ""

    @property
    def is_equal(self) -> bool:
        return self.difference is None and self.held <= 0

    def __str__(self) -> str:
        text = (
            f"{self.stats.ops_replayed} of {self.stats.ops_recorded} ops replayed, "
            f"{self.stats.bytes_dropped >> 10} KiB dropped{self.plan}"
        )
        if self.held > 0:
            text += f", HOLDS {self.held} BYTES MORE between steps"
        if self.difference is not None:
            text += f", DIFFERS: {self.difference}"
        return text


def _arm(plain: Run, run: Run, stats: replay.Stats, plan: str = "") -> Arm:
    return Arm(first_difference(plain, run), stats, run.held - plain.held, plan)


def wrapped(model: nn.Module, batch: Batch, plain: Run, **fields: Any) -> Arm:
    """Under ``memscale.wrap``, past the plan that is made anew."""
    before, ledger.TOLERANCE = ledger.TOLERANCE, Tolerance(time=-1e9)  # always is
    try:
        memscale.wrap(model, Config(**CONFIG, **fields))
        executor = model._memscale_executor
        run = train(model, batch)
    finally:
        ledger.TOLERANCE = before
    plan = ", without a plan"
    if executor.plan is not None:
        layers = sum(layer.recomputes for layer in executor.plan.layers)
        plan = f", a plan for {layers} of {len(executor.plan.layers)} layers"
        plan += " and one made anew" if executor.ledger else ""
    arm = _arm(plain, run, executor.stats(), plan)
    memscale.detach(model)
    return arm


def attached(model: nn.Module, batch: Batch, plain: Run) -> Arm:
    """Nothing is kept but the inputs of layers."""
    handle = replay.attach(model, "block", min_bytes=1)
    try:
        run = train(model, batch)
        return _arm(plain, run, handle.stats())
    finally:
        handle.detach()


ARMS: dict[str, Callable[[nn.Module, Batch, Run], Arm]] = {
    "wrap": wrapped,
    "smallest": lambda model, batch, plain: wrapped(
        model,
        batch,
        plain,
        mode=OptimizationMode.AGGRESSIVE,
        use_8bit_optimizer=False,
    ),
    "block": attached,
}
