"""A training step before it runs: its memory, and plans for it.

::

    estimate = memscale.estimate(model, batch)      # of the plain step
    print(estimate)                 # a table
    estimate.peak_bytes             # 10_871_635_968
    estimate.fits("RTX 3090")       # a Fit: fits, needed, reserve, capacity

    plan = memscale.plan(model, batch, config=Config(budget="6GiB"))
    print(plan)                     # a table
    print(plan.explain())           # reasons
    memscale.wrap(model, Config(plan=plan))

    for plan in memscale.pareto(model, batch):      # from the smallest to the fastest
        print(plan.peak_bytes, plan.slowdown)

Decisions are made in C++ (core/plan/decision.h), from a trace: nothing is run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from memscale import _C, hardware
from memscale._C import (
    Choice,
    Plan,
    PlanError,
    Question,
    StepFacts,
    Target,
    allowed_tf32,
)
from memscale.config import Config
from memscale.estimation.estimate import Estimate, LayerShare, estimate_step
from memscale.model.inputs import LossFn
from memscale.model.layers import find_layers, parameter_bytes
from memscale.model.optimizers import innermost_optimizer
from memscale.optim.bitsandbytes import steps_in_pieces
from memscale.optim.convert import is_plain_adam
from memscale.techniques import as_wrapped
from memscale.trace.optimizer_step import OptimizerLike
from memscale.trace.training_step import (
    DEFAULT_BATCH,
    DEFAULT_LENGTH,
    Device,
    TrainingStep,
)

__all__ = [
    "Estimate",
    "Frontier",
    "LayerShare",
    "Plan",
    "estimate",
    "fallback_choices",
    "load_plan",
    "pareto",
    "plan",
    "question_of",
]

_NUM_PLANS = 12

# More than any plan has, and less than a checkpoint that was named by mistake.
_MAX_READ = 64 << 20


def estimate(
    model: nn.Module,
    sample_input: Any = None,
    optimizer: OptimizerLike = "adamw",
    config: Config | None = None,
    loss_fn: LossFn | None = None,
    *,
    device: Device = None,
    batch: int = DEFAULT_BATCH,
    length: int = DEFAULT_LENGTH,
) -> Estimate:
    """Predict the memory of a training step of ``model`` without running it.

    ``sample_input``: a tensor, a tuple or list of arguments, a dict of keyword
    arguments, or a batch of your DataLoader; without one it is built from the
    model's own description, for ``batch`` and ``length``. ``optimizer``: a name of
    torch.optim in lower case, an optimizer, a function that makes one from
    parameters, or None. ``config``: the step is predicted as it runs once the model is
    wrapped with this config, under the plan that it then follows (``Estimate.plan``);
    without one it is the plain step. ``loss_fn(output)`` or
    ``loss_fn(output, target)``; without one the model's own loss, else a stand-in:
    ``Estimate.loss`` says which. ``device``: a torch device or the name of a card,
    "RTX 3090"; default: where the model is. For a card that this machine lacks the
    simulated device's kernels are traced (and its backend is loaded).

    A model whose code depends on values that only a real run has is recorded: one
    real forward and backward on its own device, with everything restored after
    (``config.use_empirical_fallback``). Raises InputError, TraceError, HardwareError,
    PlanError if no plan is within ``config.budget``, or the model's own error if it
    rejects the sample.
    """
    _check_config(config)
    step = TrainingStep.of(
        model, sample_input, optimizer, loss_fn, device, batch=batch, length=length
    )
    if config is None:
        return estimate_step(step, Config())
    traced, question = _traced(step, config)
    if config.plan is None:
        followed = _C.plan_for(question)
    else:
        followed = load_plan(config.plan, step.model)
        _C.check_allowed(followed, config)
    return traced.under(followed, _C.step_under(question, followed))


def plan(
    model: nn.Module,
    sample_input: Any = None,
    optimizer: OptimizerLike = "adamw",
    config: Config | None = None,
    loss_fn: LossFn | None = None,
    *,
    device: Device = None,
    **sizes: int,
) -> Plan:
    """What ``wrap`` would do, without doing it. Arguments: as for ``estimate``.

    Raises PlanError, naming the smallest budget that works, if ``config.budget`` is
    too small.
    """
    _check_config(config)
    step = TrainingStep.of(model, sample_input, optimizer, loss_fn, device, **sizes)
    _, question = _traced(step, config or Config())
    return _C.plan_for(question)


def pareto(
    model: nn.Module,
    sample_input: Any = None,
    optimizer: OptimizerLike = "adamw",
    config: Config | None = None,
    loss_fn: LossFn | None = None,
    *,
    device: Device = None,
    max_plans: int = _NUM_PLANS,
    **sizes: int,
) -> Frontier:
    """The plans that no other beats, from the smallest peak to the fastest.

    Arguments: as for ``estimate``. The same rules are asked as by ``plan``; but the
    config's budget, the time that its mode may spend and the size of the model do not
    matter.
    """
    if isinstance(max_plans, bool) or not isinstance(max_plans, int) or max_plans < 2:
        raise PlanError(f"max_plans must be an int >= 2, got {max_plans!r}")
    _check_config(config)
    step = TrainingStep.of(model, sample_input, optimizer, loss_fn, device, **sizes)
    _, question = _traced(step, config or Config())
    return Frontier(_C.plan_frontier(question, max_plans))


class Frontier(list[Plan]):
    """Plans, smallest peak first. Prints as a table."""

    def __str__(self) -> str:
        from memscale.report.plan import frontier_text

        return frontier_text(self)

    def _repr_html_(self) -> str:
        from memscale.report.plan import frontier_html

        return frontier_html(self)


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


def _check_config(config: object) -> None:
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"config must be a Config, got {type(config).__name__}")


def _traced(step: TrainingStep, config: Config) -> tuple[Estimate, Question]:
    """The step as it runs wrapped, not yet under a plan, and what to ask about it."""
    traced = as_wrapped(lambda: estimate_step(step, config))
    question = question_of(
        traced, config, type(step.model).__name__, step.model, step.optimizer, step.card
    )
    return traced, question


def question_of(
    traced: Estimate,
    config: Config,
    name: str,
    model: nn.Module,
    optimizer: OptimizerLike,
    card: hardware.DeviceSpec | None = None,
    *,
    has_gradients: bool = False,
) -> Question:
    """What the planner is asked about a traced step of ``model``, called ``name``.

    ``has_gradients``: its parameters have gradients when the step begins.
    """
    facts = StepFacts(
        model=name,
        call=traced.call,
        optimizer=traced.optimizer,
        optimizer_is_adam=_is_adam(optimizer, traced.optimizer),
        has_gradients=has_gradients,
        parameter_bytes=parameter_bytes(find_layers(model)),
    )
    target = _target(traced.device, traced.target, card)
    return Question(traced.trace, config, target, facts)


def fallback_choices(
    model: nn.Module, config: Config, *, is_compiled: bool, only_asked: bool
) -> dict[str, Choice]:
    """What each technique does where there is no plan, by the technique's name."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    question = Question(
        None,
        config,
        Target(type=device.type, has_state_kernel=not steps_in_pieces(device.type)),
        StepFacts(is_compiled=is_compiled),
    )
    choices = _C.fallback_choices(question, only_asked)
    return {choice.technique: choice for choice in choices}


def _target(
    device: torch.device, name: str, card: hardware.DeviceSpec | None
) -> Target:
    kind = device.type
    memory: int | None = None
    if card is None:
        found = hardware.detect()
        if kind == "cpu":
            memory = found.host.total_memory
        elif kind == "sim":
            memory = found.devices[device.index or 0].memory
        else:
            card = found.devices[device.index or 0]
    return Target(
        type=kind,
        name=name,
        card=card,
        memory=memory,
        allowed_tf32=allowed_tf32(),
        benchmarks=torch.backends.cudnn.benchmark,
        # On a card that is not here: as if this installation were there.
        has_state_kernel=not steps_in_pieces("cuda" if card else kind),
    )


def _is_adam(optimizer: OptimizerLike, name: str) -> bool:
    """Whether it is torch's own, with options that leave its state to us."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return is_plain_adam(innermost_optimizer(optimizer))
    return name in ("Adam", "AdamW")
