"""A wrapped model beside a never-wrapped twin: train both, compare all of it."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import graph

import memscale
from memscale import Config, OptimizationMode, simdev
from memscale.attach.executor import Executor
from memscale.calls import hook_stack
from never_wrapped import assert_as_never_wrapped

MODES = [OptimizationMode.BALANCED, OptimizationMode.AGGRESSIVE]
each_mode = pytest.mark.parametrize("mode", MODES, ids=["balanced", "aggressive"])

# Large enough that what a block saves is not below replay.DEFAULT_MIN_BYTES.
WIDTH, ROWS = 64, 320
STEPS = 3

_disable = graph.disable_saved_tensors_hooks


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, p: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.gelu(self.up(self.norm(x)))
        return x + self.dropout(self.down(y))


class Net(nn.Module):
    """Blocks with dropout, and running statistics for the buffers."""

    def __init__(self, depth: int = 2, width: int = WIDTH, block: Any = Block) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.statistics = nn.BatchNorm1d(width)
        self.blocks = nn.ModuleList(block(width) for _ in range(depth))
        self.head = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.statistics(self.first(x))
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def batch(step: int = 0, rows: int = ROWS, width: int = WIDTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(rows, width, generator=generator)


def config_of(
    mode: OptimizationMode = OptimizationMode.BALANCED, **options: Any
) -> Config:
    """Of a test: its models are so small that they would be left as they are.

    Without what is lossy, which a mode may choose: results are compared to the bit.
    """
    options = {"force_optimize": True, "use_8bit_optimizer": False, **options}
    return Config(mode=mode, **options)


def executor_of(model: Any) -> Executor:
    executor: Executor = model._memscale_executor
    return executor


@dataclass
class Record:
    """What a run did, as named tensors."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def __call__(self, name: str, tensor: torch.Tensor | None) -> None:
        name = f"{len(self.tensors)}: {name}"
        value = torch.tensor(float("nan")) if tensor is None else tensor
        self.tensors[name] = value.detach().cpu().clone()

    def gradients(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self(f"gradient of {name}", parameter.grad)

    def state(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self(f"parameter {name}", parameter)
        for name, buffer in model.named_buffers():
            self(f"buffer {name}", buffer)
        self("random state", torch.get_rng_state())


Drive = Callable[[nn.Module, Record], None]


def run(drive: Drive, model: nn.Module, seed: int = 7) -> Record:
    record = Record()
    torch.manual_seed(seed)
    drive(model, record)
    record.state(model)
    return record


def assert_same(plain: Record, ours: Record) -> None:
    assert list(plain.tensors) == list(ours.tensors)
    for name, tensor in plain.tensors.items():
        other = ours.tensors[name]
        assert tensor.dtype == other.dtype, name
        # Bytes: a NaN is the same as itself.
        assert torch.equal(_bytes(tensor), _bytes(other)), f"not the same: {name}"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def steps(
    loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None,
    count: int = STEPS,
    device: torch.device | str = "cpu",
) -> Drive:
    """The usual loop."""

    def drive(model: nn.Module, record: Record) -> None:
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        for step in range(count):
            x = batch(step).to(device)
            loss = model(x).square().mean() if loss_of is None else loss_of(model, x)
            record("loss", loss)
            loss.backward()
            record.gradients(model)
            optimizer.step()
            optimizer.zero_grad()

    return drive


def make(build: Callable[[], nn.Module] = Net, device: Any = "cpu") -> nn.Module:
    torch.manual_seed(0)
    return build().to(device).train()


def check_twins(
    drive: Drive,
    mode: OptimizationMode,
    build: Callable[[], nn.Module] = Net,
    *,
    drops: bool | None = True,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Executor:
    """``drive`` a plain model and a wrapped one: all they do is the same.

    ``drops``: whether something must have been dropped; None: either. Then the model
    is detached, and must be as one that was never wrapped.
    """
    plain = make(build, device)
    ours = make(build, device)
    memscale.wrap(ours, config_of(mode, **options))
    executor = executor_of(ours)
    expected = run(drive, plain)
    assert_same(expected, run(drive, ours))
    if drops is not None:
        assert (executor.stats().saves_dropped > 0) == drops, executor.stats()
    memscale.detach(ours)
    assert_as_never_wrapped(ours, plain)
    return executor


def copy_of(model: nn.Module) -> nn.Module:
    """A twin, made before the model is wrapped."""
    return copy.deepcopy(model)


@pytest.fixture(autouse=True)
def untouched_process() -> Iterator[None]:
    """After each test no hook, no patch and no log handler of ours is left."""
    logger = logging.getLogger("memscale")
    handlers, level = list(logger.handlers), logger.level
    if not hasattr(torch, "sim"):
        simdev.enable()  # before autograd starts its threads, one for each device
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small only wait for one another
    gc.freeze()  # planning collects garbage: not to look at all that is imported
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)
    assert hook_stack.top() is None
    assert hook_stack.is_free()
    if graph.disable_saved_tensors_hooks is not _disable:
        gc.collect()  # models that a failed test, or an exception, holds in a cycle
    assert graph.disable_saved_tensors_hooks is _disable
    left = [h for h in logger.handlers if h not in handlers]
    assert len(left) <= 1  # the terminal's, once in a process
    assert not any(isinstance(h, logging.FileHandler) for h in left)
    for handler in left:
        logger.removeHandler(handler)
    logger.setLevel(level)
