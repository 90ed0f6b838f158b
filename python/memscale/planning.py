"""Plans: what each layer does, why, and what that is predicted to come to.

::

    plan = memscale.plan(model, batch, config=Config(budget="6GiB"))
    print(plan)                     # a table
    print(plan.explain())           # reasons
    memscale.wrap(model, Config(plan=plan))

    for plan in memscale.pareto(model, batch):      # from the smallest to the fastest
        print(plan.peak_bytes, plan.slowdown)

Decisions are made in C++ (core/decision.h), from a trace: nothing is run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memscale import _C, hardware
from memscale._bitsandbytes import steps_in_pieces
from memscale._C import (
    CostModel,
    OpTimes,
    Plan,
    PlanError,
    Question,
    allowed_tf32,
    format_bytes,
)
from memscale._optimizer_step import OptimizerLike, innermost_optimizer
from memscale._use_cache import ForgottenError, forgetting
from memscale.config import Config
from memscale.estimator import Estimate, estimate
from memscale.inputs import LossFn
from memscale.layers import find_layers, parameter_bytes
from memscale.optim import why_not_8bit
from memscale.replay import DEFAULT_MIN_BYTES

__all__ = [
    "Plan",
    "as_wrapped",
    "decide",
    "forgets_cache",
    "load_plan",
    "pareto",
    "plan",
]

_NUM_PLANS = 12

# More than any plan has, and less than a checkpoint that was named by mistake.
_MAX_READ = 64 << 20


def plan(
    model: nn.Module,
    sample_input: Any = None,
    optimizer: OptimizerLike = "adamw",
    config: Config | None = None,
    loss_fn: LossFn | None = None,
    *,
    device: torch.device | str | hardware.DeviceSpec | None = None,
    **sizes: int,
) -> Plan:
    """What ``wrap`` would do, without doing it. Arguments: as for ``estimate``.

    Raises PlanError, naming the smallest budget that works, if ``config.budget`` is
    too small.
    """
    config = config or Config()
    traced = _traced(model, sample_input, optimizer, config, loss_fn, device, sizes)
    return decide(
        traced,
        config,
        type(model).__name__,
        _card(device),
        optimizer=optimizer,
        layer_bytes=parameter_bytes(find_layers(model)),
    )


def pareto(
    model: nn.Module,
    sample_input: Any = None,
    optimizer: OptimizerLike = "adamw",
    config: Config | None = None,
    loss_fn: LossFn | None = None,
    *,
    device: torch.device | str | hardware.DeviceSpec | None = None,
    max_plans: int = _NUM_PLANS,
    **sizes: int,
) -> Frontier:
    """The plans that no other beats, from the smallest peak to the fastest.

    Arguments: as for ``estimate``; the config's mode and budget do not matter.
    """
    if isinstance(max_plans, bool) or not isinstance(max_plans, int) or max_plans < 2:
        raise PlanError(f"max_plans must be an int >= 2, got {max_plans!r}")
    config = config or Config()
    traced = _traced(model, sample_input, optimizer, config, loss_fn, device, sizes)
    question = _question(traced, config, type(model).__name__, _card(device))
    _tell_sizes(question, traced, parameter_bytes(find_layers(model)))
    question.optimizer_can_be_8bit = _can_be_8bit(optimizer, traced)
    return Frontier(_C.plan_frontier(question, max_plans))


class Frontier(list[Plan]):
    """Plans, smallest peak first. Prints as a table."""

    def __str__(self) -> str:
        from memscale.plan_text import frontier_text

        return frontier_text(self)

    def _repr_html_(self) -> str:
        from memscale.plan_text import frontier_html

        return frontier_html(self)


def decide(
    traced: Estimate,
    config: Config,
    model: str,
    card: hardware.DeviceSpec | None = None,
    *,
    margin: int = 0,
    op_times: tuple[OpTimes, list[str]] | None = None,
    optimizer: OptimizerLike = None,
    layer_bytes: list[int] | None = None,
) -> Plan:
    """A plan from an estimate.

    ``margin``: bytes by which predictions were too low before; ``op_times``: how long
    ops took in calls like this, by the model's layers, which have these names;
    ``optimizer``: that was traced; ``layer_bytes``: of parameters, by layer.
    """
    question = _question(traced, config, model, card, op_times)
    question.margin = margin
    _tell_sizes(question, traced, layer_bytes or [])
    question.optimizer_can_be_8bit = _can_be_8bit(optimizer, traced)
    decision = _C.decide(question)
    smallest = decision.smallest_budget
    if smallest is not None:
        assert config.budget is not None
        raise PlanError(
            f"budget must be at least {smallest} bytes ({format_bytes(smallest)}, at a "
            f"predicted slowdown of {decision.plan.slowdown:.0%}) for {model} with "
            f"{traced.call} and {traced.optimizer}, "
            f"got {config.budget} ({format_bytes(config.budget)})"
        )
    return decision.plan


def load_plan(source: str, model: nn.Module) -> Plan:
    """The plan of ``Config(plan=...)``: JSON or the path of a file; for this model."""
    text = source
    if not source.lstrip().startswith("{"):
        try:
            with Path(source).open("rb") as file:
                text = file.read(_MAX_READ).decode()
        except (OSError, ValueError) as error:
            # An OSError's own text quotes the path at any length.
            why = getattr(error, "strerror", None) or error
            start = source if len(source) <= 100 else source[:100] + "..."
            raise PlanError(
                f"plan must be JSON or a file that holds it, got {start!r} ({why})"
            ) from None
    made = Plan.from_json(text)
    layers = find_layers(model)
    made.check_fits(list(layers.modules), parameter_bytes(layers))
    return made


def _traced(
    model: nn.Module,
    sample_input: Any,
    optimizer: OptimizerLike,
    config: Config,
    loss_fn: LossFn | None,
    device: torch.device | str | hardware.DeviceSpec | None,
    sizes: dict[str, int],
) -> Estimate:
    return as_wrapped(
        lambda: estimate(
            model, sample_input, optimizer, config, loss_fn, device=device, **sizes
        )
    )


def as_wrapped(trace: Callable[[], Estimate]) -> Estimate:
    """What ``trace`` gives for a step as it runs wrapped: caches forget, if they may.

    A model whose layers read what others cached has its caches as they are.
    """
    try:
        with forgetting():
            return trace()
    except ForgottenError:
        return trace()


def forgets_cache(plan: Plan) -> bool:
    """Whether caches forgot in the step that it was made from."""
    return any(verdict.rule == "forget_cache" for verdict in plan.verdicts)


def _card(
    device: torch.device | str | hardware.DeviceSpec | None,
) -> hardware.DeviceSpec | None:
    """The card that was named; None: what the trace was made for is here."""
    if isinstance(device, hardware.DeviceSpec):
        return device
    if isinstance(device, str):
        try:
            torch.device(device)
        except RuntimeError:
            return None if device == "sim" else hardware.find(device)
    return None


def _question(
    traced: Estimate,
    config: Config,
    model: str,
    card: hardware.DeviceSpec | None,
    op_times: tuple[OpTimes, list[str]] | None = None,
) -> Question:
    kind = traced.device.type
    if card is None and kind not in ("cpu", "sim"):
        card = hardware.detect().devices[traced.device.index or 0]
    cost = CostModel.of_cpu() if card is None else CostModel.of(card, *allowed_tf32())
    trace = traced.trace
    if op_times is not None:
        times, layers = op_times
        trace = times.applied_to(trace, cost, layers)
    question = Question(trace, config, cost)
    question.on_cpu = kind == "cpu"
    # Of a card that is not here: as if this installation were there.
    question.steps_8bit_in_pieces = steps_in_pieces("cuda" if card else kind)
    question.on_cuda = kind == "cuda" or _is_cuda(card)
    question.benchmarks = torch.backends.cudnn.benchmark
    question.granularity = traced.granularity
    question.device_memory = _memory(traced.device, card)
    question.min_bytes = DEFAULT_MIN_BYTES
    question.model = model
    question.call = traced.call
    question.device = traced.target
    question.optimizer = traced.optimizer
    return question


def _tell_sizes(question: Question, traced: Estimate, layer_bytes: list[int]) -> None:
    # A recorded step may have met layers that were not there before.
    if len(layer_bytes) == len(traced.trace.layers):
        question.parameter_bytes = layer_bytes


def _is_cuda(card: hardware.DeviceSpec | None) -> bool:
    """Whether torch calls such a card "cuda": AMD's too."""
    return card is not None and card.vendor in ("NVIDIA", "AMD")


def _can_be_8bit(optimizer: OptimizerLike, traced: Estimate) -> bool:
    if isinstance(optimizer, torch.optim.Optimizer):
        return why_not_8bit(innermost_optimizer(optimizer)) is None
    return traced.optimizer in ("Adam", "AdamW")


def _memory(device: torch.device, card: hardware.DeviceSpec | None) -> int | None:
    if card is not None:
        return card.memory
    found = hardware.detect()
    if device.type == "cpu":
        return found.host.total_memory
    return found.devices[device.index or 0].memory
