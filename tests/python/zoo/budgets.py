"""Plans as promises: what was predicted of a training step, beside what it took.

One device at a time. The plain model trains first: the peak of its second step is
compared with its estimate. Then copies of it train under the smallest and the middle
budget of its frontier, and each step's peak is compared with the budget.

Bytes are counted from before the model's copy is made: parameters, gradients, the
optimizer's state and the batch are part of it, and none of it is taken from the
prediction.
"""

from __future__ import annotations

import copy
import gc
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import memscale
from memscale import Config, OptimizationMode, memory
from memscale._C import Error, PlanError
from memscale.model.inputs import Call, find_loss
from same_bytes import how_far, same_bytes
from zoo.compare import seed
from zoo.inputs import Batch

_LEAST = re.compile(r"at least (\d+) bytes")

# The first step makes the optimizer's state, the second is measured by the ledger, the
# third follows what was planned anew, and so may the fourth.
STEPS = 4
DEVICES = ("cpu", "sim")


@dataclass
class Budgeted:
    """A few steps under one budget, all in bytes."""

    budget: int
    predicted: int | None = None  # by the plan in use at the end
    peaks: list[int] = field(default_factory=list)  # of each step
    unlike: int = 0  # calls of layers that ran other ops than their plan knows
    difference: str | None = None  # from the plain model
    trouble: str | None = None  # why it did not train
    least: int | None = None  # if it was refused: what was said to be possible

    @property
    def over(self) -> float:
        """By what part of the budget the last step exceeds it; negative: it is kept."""
        return self.peaks[-1] / self.budget - 1

    @property
    def is_kept(self) -> bool:
        return self.trouble is None and self.peaks[-1] <= self.budget

    def __str__(self) -> str:
        if self.trouble is not None:
            return f"NOT TRAINED: {self.trouble}"
        text = "kept" if self.is_kept else f"EXCEEDED by {self.over:.2%}"
        early = max(self.peaks[:-1])
        if self.is_kept and early > self.budget:
            text += f" (an earlier step by {early / self.budget - 1:.2%})"
        if self.unlike:
            text += f", {self.unlike} UNLIKE CALLS"
        if self.difference is not None:
            text += f", DIFFERS: {self.difference}"
        return text


@dataclass
class Shown:
    """All that one device shows of a model.

    ``planned``: "traced", "recorded" (in its first real step) or "none";
    ``trouble``: why there is nothing to show.
    """

    planned: str = ""
    why: str = ""
    predicted: int = 0  # the plain step's peak
    measured: int = 0
    steady: bool = True  # whether the plain step takes the same each time
    budgets: dict[str, Budgeted] = field(default_factory=dict)
    trouble: str | None = None

    @property
    def error(self) -> float:
        """Signed: below zero, the step took more than was predicted."""
        return self.predicted / self.measured - 1

    @property
    def unlike(self) -> int:
        return sum(each.unlike for each in self.budgets.values())

    @property
    def difference(self) -> str | None:
        for name, each in self.budgets.items():
            if each.difference is not None:
                return f"{name}: {each.difference}"
        return None

    def __str__(self) -> str:
        if self.trouble is not None:
            return self.trouble
        text = self.planned + (f" ({self.why})" if self.why else "")
        text += f", plain {self.error:+.4%}" if self.predicted else ""
        for name, each in self.budgets.items():
            text += f", {name} {each}"
        return text

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Shown:
        budgets = {name: Budgeted(**each) for name, each in fields["budgets"].items()}
        return cls(**{**fields, "budgets": budgets})


class _Training:
    """A copy of a model on a device, and its peaks in absolute bytes."""

    def __init__(self, model: nn.Module, batch: Batch, device: str) -> None:
        gc.collect()
        self._device = device
        self._others = self._bytes_now()
        self.model = copy.deepcopy(model).to(device)
        self._given = batch
        self.batch = self._copied()
        if device == "cpu":  # where the copies of buffers are not counted
            self._others = self._bytes_now() - _bytes_of(self.model, self.batch)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-3)
        self.peaks: list[int] = []
        self.losses: list[float] = []

    def _bytes_now(self) -> int:
        with memory.track(self._device) as tracker:
            return tracker.before

    def _copied(self) -> Batch:
        move = lambda tensor: tensor.detach().clone().to(self._device)  # noqa: E731
        moved: Batch = pytree.tree_map_only(Tensor, move, self._given)
        return moved

    def run(self, steps: int = STEPS) -> None:
        seed(1)
        for _ in range(steps):
            self.batch = {}
            self.batch = self._copied()  # some models write into theirs
            gc.collect()
            with memory.track(self._device) as tracker:
                loss, why = find_loss(self.model(**self.batch), _CALL, None)
                if loss is None:
                    raise ValueError(why)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.peaks.append(tracker.peak - self._others)
            self.losses.append(loss.item())
            del loss

    def end(self) -> dict[str, Tensor]:
        """Losses, parameters and buffers."""
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {"losses": torch.tensor(self.losses)} | {
            name: tensor.detach().cpu().clone() for name, tensor in named
        }


def _bytes_of(model: nn.Module, batch: Batch) -> int:
    """Of all that they hold, each storage once."""
    given = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    tensors = [*model.parameters(), *model.buffers(), *given]
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())


_CALL = Call((), {})


def show(model: nn.Module, batch: Batch, device: str) -> Shown:
    """The model trains on ``device``, plain and under budgets."""
    shown = Shown()
    try:
        plain = _Training(model, batch, device)
        plain.run()
        end = plain.end()
    except Exception as error:
        shown.trouble = f"the plain model does not train there: {brief(error)}"
        return shown
    shown.measured = plain.peaks[1]
    shown.steady = len(set(plain.peaks[1:])) == 1
    messages: list[str] = []
    with _heard(messages):
        try:
            estimate = memscale.estimate(plain.model, plain.batch, plain.optimizer)
            shown.predicted = estimate.peak_bytes
        except Exception as error:
            shown.why = f"no estimate: {brief(error)}"
        smallest, largest = _ends(plain, shown)
    del plain
    budgets = {"smallest": smallest, "middle": (smallest + largest) // 2}
    if smallest == largest:
        del budgets["middle"]
    for name, budget in budgets.items():
        if budget:
            made = _train_under(model, batch, device, budget, shown, end)
            if made.least is not None and shown.planned == "recorded":
                # What the frontier was made of is another run than the first step.
                made = _train_under(model, batch, device, made.least, shown, end)
            shown.budgets[name] = made
    unlike = [
        each
        for each in shown.budgets.values()
        if each.difference is not None and each.trouble is None
    ]
    if unlike and not _is_same_twice(model, batch, device, end):
        for each in unlike:
            each.difference = None
        shown.why = "plain training is not the same twice there"
    return shown


def _ends(plain: _Training, shown: Shown) -> tuple[int, int]:
    """The smallest and the largest peak of the frontier; (0, 0): there is none."""
    try:
        front = memscale.pareto(plain.model, plain.batch, plain.optimizer)
        return front[0].peak_bytes, front[-1].peak_bytes
    except Exception as error:
        shown.why = f"no frontier: {brief(error)}"
    config = Config(
        mode=OptimizationMode.AGGRESSIVE, use_8bit_optimizer=False, force_optimize=True
    )
    try:
        memscale.wrap(plain.model, config)
        executor = plain.model._memscale_executor
        plain.run(2)
        plan = executor.plan
        memscale.detach(plain.model)
    except Exception as error:
        shown.why = f"no plan: {brief(error)}"
        return 0, 0
    return (0, 0) if plan is None else (plan.peak_bytes, plan.plain_peak_bytes)


def _train_under(
    model: nn.Module,
    batch: Batch,
    device: str,
    budget: int,
    shown: Shown,
    end: dict[str, Tensor],
) -> Budgeted:
    made = Budgeted(budget)
    messages: list[str] = []
    training = _Training(model, batch, device)
    executor: Any = None
    try:
        with _heard(messages):
            memscale.wrap(training.model, Config(budget=budget, warmup_steps=1))
            executor = training.model._memscale_executor
            training.run()
        made.peaks = training.peaks
        made.difference = _first_difference(end, training.end())
    except Exception as error:
        made.trouble = f"RAISES {brief(error)}"
        if isinstance(error, PlanError):
            made.trouble = f"refused {brief(error)}"
            least = _LEAST.search(str(error))
            made.least = int(least[1]) if least else None
        elif not isinstance(error, Error):
            made.difference = made.trouble
    if executor is not None:
        made.unlike = executor.stats().calls_unlike_keep_set
        made.predicted = executor.plan.peak_bytes if executor.plan else None
        _say_how_planned(shown, executor, messages, made)
        memscale.detach(training.model)
    return made


def _say_how_planned(
    shown: Shown, executor: Any, messages: list[str], made: Budgeted
) -> None:
    why = executor._planner.why_not_traced
    shown.planned = "traced" if why is None else "recorded"
    shown.why = why or shown.why
    if executor.plan is None and made.least is None:
        shown.planned = "none"
        said = [text for text in messages if "without a prediction" in text]
        shown.why = said[-1] if said else made.trouble or shown.why


def _first_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> str | None:
    unlike = [name for name in a if not same_bytes(a[name], b.get(name))]
    if not unlike:
        return None
    far = how_far(a[unlike[0]], b.get(unlike[0]))
    return f"{unlike[0]} and {len(unlike) - 1} of {len(a) - 1} others, {far}"


def _is_same_twice(
    model: nn.Module, batch: Batch, device: str, end: dict[str, Tensor]
) -> bool:
    again = _Training(model, batch, device)
    again.run()
    return _first_difference(end, again.end()) is None


@contextmanager
def _heard(messages: list[str]) -> Iterator[None]:
    """What the library logs, instead of printing it."""

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, listener = logging.getLogger("memscale"), Listener()
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(listener)
    try:
        yield
    finally:
        logger.removeHandler(listener)
        logger.propagate = propagates


def brief(error: Any) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
