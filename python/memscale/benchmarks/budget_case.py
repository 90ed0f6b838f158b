"""What a training step under a byte budget holds and takes, and what uniform
checkpointing can do with as many bytes.

All variants train one model in one process, on the simulated device. A step is
forward, backward, the optimizer's step and zero_grad.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import memscale
from memscale.benchmarks.measure import forward, loss_of
from memscale.benchmarks.recompute_case import (
    Case,
    checkpointed,
    difference,
    order_of,
    spread,
)
from memscale.memory import track
from memscale.model.layers import find_layers

__all__ = ["Bench", "Effort", "budgets_between", "measure_case", "uniform_variants"]

Attach = Callable[[], AbstractContextManager[object]]

_EQUAL_STEPS = 3
_LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    budgets: int
    rounds: int  # of a row: eager, ours and uniform checkpointing, alternating
    choosing_rounds: int  # that find the best uniform checkpointing


@dataclass
class Bench:
    """A model and its batch on the device, trained from one start again and again."""

    case: Case
    device: torch.device
    model: nn.Module = field(init=False)
    batch: Any = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        gc.collect()
        with track(self.device) as memory:
            self._others = memory.before
        self.model = self.case.build().to(self.device)
        self.batch = pytree.tree_map(lambda x: x.to(self.device), self.case.sample())
        self._start = self._state()
        self.restart()

    def _state(self) -> dict[str, torch.Tensor]:
        return {
            name: tensor.detach().to("cpu", copy=True)
            for name, tensor in self.model.state_dict().items()
        }

    def restart(self) -> None:
        """As at the start: parameters, buffers, optimizer, random numbers."""
        self.model.load_state_dict(self._start)
        # Without state: what a plan can change, activations, is most of the peak.
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=_LEARNING_RATE)
        self.clear()
        torch.manual_seed(1)

    def clear(self) -> None:
        self.model.zero_grad(set_to_none=True)
        # One variant's garbage must not be counted, or swept up, in another's step.
        gc.collect()

    def step(self) -> torch.Tensor:
        loss = loss_of(forward(self.model, self.batch))
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def result(self) -> dict[str, torch.Tensor]:
        """Losses of the first steps, and all parameters and buffers after them."""
        self.restart()
        losses = {f"loss {i}": self.step().cpu() for i in range(_EQUAL_STEPS)}
        return {**losses, **self._state()}

    def peak(self) -> int:
        """Bytes on the device at the peak of a step; others' are not counted."""
        self.clear()
        with track(self.device) as memory:
            self.step()
        return memory.peak - self._others

    def seconds(self) -> float:
        self.clear()
        start = time.process_time()
        self.step()
        return time.process_time() - start

    def timed(
        self, variants: Mapping[str, Attach], rounds: int
    ) -> dict[str, list[float]]:
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        for turn in range(rounds):
            for name in order_of(list(variants), turn):
                with variants[name]():
                    seconds[name].append(self.seconds())
        return seconds


# ---- uniform checkpointing ----


def uniform_variants(blocks: list[str]) -> dict[str, list[str]]:
    """Every k-th block, and all but every k-th, for all k; each choice once.

    Of every k blocks it is the first that is checkpointed, or the last that is not:
    what the last block drops is made again at once, so dropping it gains nothing.
    """
    variants: dict[str, list[str]] = {}
    for k in range(1, len(blocks) + 1):
        some = [block for i, block in enumerate(blocks) if i % k == 0]
        others = [block for i, block in enumerate(blocks) if i % k != k - 1]
        every = "every" if k == 1 else f"1 of {k}"
        for name, chosen in ((every, some), (f"all but {every}", others)):
            if chosen and chosen not in variants.values():
                variants[name] = chosen
    return variants


@dataclass(frozen=True)
class _Uniform:
    name: str
    attach: Attach
    peak: int
    seconds: float


def _measure_uniform(bench: Bench, rounds: int) -> list[_Uniform]:
    """Every uniform checkpointing, the fastest first."""
    layers = find_layers(bench.model)
    blocks = [name for name in layers.modules if name in layers.blocks]
    variants: dict[str, Attach] = {}
    peaks: dict[str, int] = {}
    for name, chosen in uniform_variants(blocks).items():
        variants[name] = lambda chosen=chosen: checkpointed(bench.model, chosen)  # type: ignore[misc]
        with variants[name]():
            bench.step()
            peaks[name] = bench.peak()
    seconds = bench.timed(variants, rounds)
    found = [
        _Uniform(name, attach, peaks[name], statistics.median(seconds[name]))
        for name, attach in variants.items()
    ]
    return sorted(found, key=lambda uniform: uniform.seconds)


# ---- ours ----


@contextlib.contextmanager
def _following(model: nn.Module, plan: memscale.Plan) -> Iterator[None]:
    config = memscale.Config(plan=plan, enable_logging=False)
    memscale.wrap(model, config)
    try:
        yield
    finally:
        memscale.detach(model)


def budgets_between(smallest: int, largest: int, count: int) -> list[int]:
    """Evenly, both ends included."""
    return [smallest + (largest - smallest) * i // (count - 1) for i in range(count)]


def _trained(
    bench: Bench, budget: int, plain: Mapping[str, torch.Tensor]
) -> tuple[memscale.Plan, dict[str, Any]]:
    """The plan for a budget, and what training under it does."""
    bench.restart()
    config = memscale.Config(budget=budget, enable_logging=False)
    with memscale.optimize(bench.model, bench.optimizer, config) as executor:
        assert executor is not None, "MEMSCALE_DISABLE is set"
        different = difference(bench.result(), plain)
        peak = bench.peak()
        plan = executor.plan
        assert plan is not None
        stats = executor.stats()
    return plan, {
        "budget": budget,
        "predicted_peak": plan.peak_bytes,
        "measured_peak": peak,
        "predicted_slowdown": plan.slowdown,
        "recomputing_layers": sum(layer.recomputes for layer in plan.layers),
        "equal_to_eager": not different,
        "calls_unlike_keep_set": stats.calls_unlike_keep_set,
    }


def _row(
    bench: Bench,
    budget: int,
    plain: Mapping[str, torch.Tensor],
    uniform: list[_Uniform],
    rounds: int,
) -> dict[str, Any]:
    plan, row = _trained(bench, budget, plain)
    variants: dict[str, Attach] = {
        "eager": contextlib.nullcontext,
        "ours": lambda: _following(bench.model, plan),
    }
    best = next((each for each in uniform if each.peak <= budget), None)
    row["uniform"] = None if best is None else best.name
    if best is not None:
        variants["uniform"] = best.attach
        row["uniform_peak"] = best.peak
    seconds = bench.timed(variants, rounds)
    row["seconds"] = {name: spread(figures) for name, figures in seconds.items()}

    def over(name: str, peer: str) -> dict[str, float]:
        pairs = zip(seconds[name], seconds[peer], strict=True)
        return spread([ours / its for ours, its in pairs])

    row["time_over_eager"] = over("ours", "eager")
    if best is not None:
        row["time_over_uniform"] = over("ours", "uniform")
        row["uniform_over_eager"] = over("uniform", "eager")
    return row


def measure_case(
    case: Case, device: torch.device, effort: Effort
) -> Iterator[dict[str, Any]]:
    """A row per budget, from the smallest that a plan can meet to eager's peak."""
    bench = Bench(case, device)
    smallest = memscale.pareto(bench.model, bench.batch, bench.optimizer)[0].peak_bytes
    # Libraries leave many objects; looking through them would take a step's time.
    gc.collect()
    gc.freeze()
    try:
        plain = bench.result()
        eager_peak = bench.peak()
        uniform = _measure_uniform(bench, effort.choosing_rounds)
        for budget in budgets_between(smallest, eager_peak, effort.budgets):
            row: dict[str, Any] = {
                "case": case.label,
                "eager_peak": eager_peak,
                "rounds": effort.rounds,
            }
            try:
                row.update(_row(bench, budget, plain, uniform, effort.rounds))
            except Exception as error:
                # One failing row must not hide the others; it misses a goal.
                text = f"{type(error).__name__}: {error}".splitlines()[0]
                row.update(budget=budget, failed=text)
            yield row
    finally:
        gc.unfreeze()
