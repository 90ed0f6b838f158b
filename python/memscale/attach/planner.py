"""Plans for a wrapped model's batches: traced or recorded here, decided in C++.

What is decided (which batches are alike, when to plan again) is in core/session.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from memscale._C import (
    CallKind,
    Error,
    InputError,
    OpTimes,
    Plan,
    PlanError,
    Session,
)
from memscale.attach import ledger as measuring
from memscale.attach.first_real_step import FirstRealStep
from memscale.calls.targets import check_model, is_compiled
from memscale.config import Config
from memscale.estimation.estimate import Estimate, estimate_step
from memscale.model.call_kind import call_kind, has_gradients
from memscale.model.inputs import Call
from memscale.model.layers import find_layers
from memscale.model.optimizers import (
    find_optimizer,
    find_optimizers,
    innermost_optimizer,
    only_of,
)
from memscale.planning import question_of
from memscale.report.plan import plan_text
from memscale.report.progress import progress
from memscale.techniques import as_wrapped
from memscale.techniques.technique import Technique
from memscale.trace.buckets import find_buckets
from memscale.trace.leaks import remove_fakes_of_failures
from memscale.trace.optimizer_step import OptimizerLike, describe_optimizer
from memscale.trace.shell import without_hooks_of_users
from memscale.trace.training_step import TrainingStep

__all__ = ["Kind", "Planner"]


@dataclass
class Kind:
    """One kind of batch."""

    index: int  # among the session's
    # Whether parameters have gradients when a step of this kind begins.
    has_gradients: bool = False
    plan: Plan | None = None
    # The bytes of this training that were there when its last step began; None: not
    # known, or all that is allocated is this training's.
    held: int | None = None
    # How many parameters had optimizer state when ``held`` was counted.
    num_states: int = 0
    # Its first real step, to plan with; None: traced before, or not to be had.
    first_step: FirstRealStep | None = None
    # Why there is no plan, until somebody has said so.
    trouble: str | None = None


class Planner:
    """Of one wrapped model, which it does not hold alive.

    ``say(text, level)`` and ``paused()`` are the executor's. ``can_record``: whether a
    real step can be recorded to plan with.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        optimizer: weakref.ref[torch.optim.Optimizer] | None,
        techniques: Sequence[Technique],
        say: weakref.WeakMethod[Callable[..., None]],
        paused: weakref.WeakMethod[Callable[[], AbstractContextManager[None]]],
        can_record: bool,
    ) -> None:
        self.layers = list(find_layers(model).modules)
        # Why steps are recorded instead of being traced; None: they are traced.
        self.why_not_traced: str | None = None
        self._model_ref = weakref.ref(model)
        self._config = config
        self._optimizer_ref = optimizer
        self._techniques = techniques
        self._say_ref = say
        self._paused_ref = paused
        self._can_record = can_record and config.use_empirical_fallback
        self._session = Session(config, self.layers, measuring.TOLERANCE)
        self._kinds: dict[int, Kind] = {}
        # The last call that was traced, as if there were no gradients, and its trace:
        # the next call is often the same one with gradients.
        self._last_traced: tuple[CallKind, Estimate] | None = None
        # Weak: what it holds may be as large as the model.
        self._stepping: list[weakref.ref[torch.optim.Optimizer]] = []

    @property
    def _model(self) -> nn.Module:
        model = self._model_ref()
        if model is None:
            raise ReferenceError("the model of this planner is gone")
        return model

    def _say(self, text: str, level: int = logging.INFO) -> None:
        say = self._say_ref()
        if say is not None:
            say(text, level)

    # ---- kinds of batches ----

    @property
    def plans(self) -> list[Plan]:
        return [kind.plan for kind in self._kinds.values() if kind.plan is not None]

    @property
    def ledger(self) -> list[measuring.Entry]:
        return self._session.ledger

    def kind_of(self, call: Call, is_sample: bool = False) -> Kind | None:
        """The kind of this batch, planned for if it is new.

        None: there are too many kinds, and the plan in use goes on. Raises PlanError
        if the budget is too small, and InputError for a sample that the model rejects.
        """
        # A sample is traced in training mode, whatever mode the model is in now.
        described = call_kind(self._model, call, as_trained=is_sample)
        index = self._session.find(described)
        if index is not None:
            kind = self._kinds[index]
        elif self._session.is_full:
            return None
        else:
            gradients = has_gradients(self._model)
            kind = self._new_kind(described, call, is_sample, gradients)
        first_step = kind.first_step
        if first_step is not None and first_step.has_failed:
            kind.first_step = None
            kind.trouble = first_step.failure
        return kind

    def kind_to_watch(self, call: Call) -> Kind | None:
        """The kind of a batch that nothing is planned for; None: there are too many."""
        described = call_kind(self._model, call)
        index = self._session.find(described)
        if index is not None:
            return self._kinds[index]
        return None if self._session.is_full else self._add(described)

    def plan_recorded(self, first_step: FirstRealStep) -> None:
        """Plan with a step that was recorded. Raises PlanError for a small budget."""
        if first_step.estimate is None:
            return
        for kind in self._kinds.values():
            if kind.first_step is first_step:
                kind.first_step = None  # also if no plan is within the budget
                self._plan(kind, first_step.estimate, self.optimizer())

    def _new_kind(
        self, described: CallKind, call: Call, is_sample: bool, gradients: bool
    ) -> Kind:
        check_model(self._model)  # it may have been sharded since it was wrapped
        traced: Estimate | None = None
        why = self._why_compiled()
        if why is not None:
            kind = self._add(described, gradients)
            kind.trouble = why
            return kind
        why = self.why_not_traced
        if not self._config.use_static_profiling:
            why = "use_static_profiling is off"
        if why is None:
            optimizer = self.optimizer()
            try:
                with progress(f"planning {type(self._model).__name__}"):
                    traced = self._trace(call, optimizer, is_sample)
                    kind = self._add(described, gradients)
                    self._plan(kind, traced, optimizer)
                    return kind
            except _CannotPlanNow as error:
                why = str(error)
            finally:
                # Errors are in cycles with their frames, which would keep the model
                # and this batch alive until the next collection.
                if traced is None:
                    remove_fakes_of_failures()
        kind = self._add(described, gradients)
        self._plan_later(kind, why)
        return kind

    def _add(self, described: CallKind, gradients: bool = False) -> Kind:
        kind = Kind(self._session.add(described), gradients)
        self._kinds[kind.index] = kind
        if self._session.is_full:
            what = (
                "reuse the plan in use, without a prediction of their own"
                if self._config.budget is None
                else "have each layer keep only its inputs, as nobody knows what fits"
            )
            self._say(
                f"{Session.MAX_KINDS} kinds of batches have been planned for; further "
                f"ones {what}"
            )
        return kind

    # ---- what to plan with ----

    def optimizer(self) -> torch.optim.Optimizer | str:
        """The optimizer that steps the model, as it would be without techniques."""
        known = None if self._optimizer_ref is None else self._optimizer_ref()
        found = known or find_optimizer(self._model)
        if found is None:
            return "adamw"
        found = innermost_optimizer(found)
        for technique in self._techniques:
            found = technique.plain_optimizer(found)
        # Of parameters that are not the model's, nothing is known here.
        return only_of(found, self._model.parameters())

    def _why_compiled(self) -> str | None:
        for name, part in self._model.named_modules():
            if is_compiled(part):
                return (
                    f"{name or type(self._model).__name__} is compiled, and its graphs "
                    "hold what the compiler chose"
                )
        return None

    def _trace(self, call: Call, optimizer: OptimizerLike, is_sample: bool) -> Estimate:
        """Raises _CannotPlanNow if only a real step can tell."""
        without_gradients = call_kind(
            self._model, call, with_gradients=False, as_trained=is_sample
        )
        if self._last_traced is not None:
            known, estimate = self._last_traced
            optimizer_now = describe_optimizer(optimizer)
            if known == without_gradients and estimate.optimizer == optimizer_now:
                return estimate
        self._last_traced = None
        paused = self._paused_ref()
        assert paused is not None
        try:
            with paused(), without_hooks_of_users():
                step = TrainingStep.of_call(self._model, call, optimizer)
                traced = as_wrapped(
                    lambda: estimate_step(step, self._config, fallback=False)
                )
        except PlanError:
            raise
        except Error as error:
            raise _CannotPlanNow(str(error)) from error
        except Exception as error:
            if is_sample:
                lines = str(error).splitlines() or [""]
                raise InputError(
                    f"{type(self._model).__name__} rejects sample_input ({call}): "
                    f"{type(error).__name__}: {lines[0]}"
                ) from error
            # If the model rejects the batch, it will say so itself in a moment.
            raise _CannotPlanNow(
                f"{type(error).__name__} while tracing it: {error}"
            ) from error
        if not traced.trace.saves_known:
            raise _CannotPlanNow(
                "the tensors that autograd saves could not be recorded (the model uses "
                "torch.func)"
            )
        self._last_traced = without_gradients, traced
        return traced

    def _plan_later(self, kind: Kind, why: str) -> None:
        """With the first real step, where that can be recorded."""
        names = list(find_layers(self._model).modules)
        if not self._can_record or names != self.layers:
            kind.trouble = why
            return
        if self.why_not_traced is None:
            self.why_not_traced = why
            self._say(
                f"{type(self._model).__name__} is planned after its first step, which "
                "is recorded as it runs, each layer keeping only its inputs; it could "
                f"not be traced before, because {why}"
            )
        kind.first_step = FirstRealStep(
            self._model, self._techniques, weakref.WeakMethod(self.optimizer)
        )

    def _plan(self, kind: Kind, traced: Estimate, optimizer: OptimizerLike) -> None:
        """Plan with a traced or recorded step. Raises PlanError for a small budget."""
        model = self._model
        question = question_of(
            traced,
            self._config,
            type(model).__name__,
            model,
            optimizer,
            has_gradients=kind.has_gradients,
        )
        kind.plan = self._session.plan(kind.index, question)
        self._say(plan_text(kind.plan))

    # ---- steps ----

    def measure_of(self, kind: Kind) -> str:
        """What of its next step is to be measured: "nothing", "peak", "step", "all"."""
        # What its first real step needs is known when it is planned with.
        return (
            "nothing"
            if kind.first_step is not None
            else self._session.measure_of(kind.index)
        )

    def held_by_training(
        self, kind: Kind, what: str, call: Call, device: torch.device
    ) -> int | None:
        """The bytes of this training that are there now; None: all that are."""
        if device.type != "cpu":
            return None
        is_first = what != "peak" or kind.held is None
        states = [each.state for each in self._find_stepping(again=is_first)]
        num_states = sum(map(len, states))
        if is_first or num_states != kind.num_states:
            kind.num_states = num_states
            kind.held = self._held(call, device, states)
        return kind.held

    def _held(self, call: Call, device: torch.device, states: list[Any]) -> int:
        buckets = find_buckets(self._model)
        parameters = list(self._model.parameters())
        everything = [
            *parameters,
            *self._model.buffers(),
            *call.tensors(),
            *pytree.tree_leaves([[*state.values()] for state in states]),
        ]
        if buckets is None or not buckets.are_gradients:
            everything += [p.grad for p in parameters]
        tensors = (each for each in everything if isinstance(each, torch.Tensor))
        held = measuring.held_bytes(tensors, device)
        return held if buckets is None else held + buckets.num_bytes

    def _find_stepping(self, again: bool) -> list[torch.optim.Optimizer]:
        """The optimizers whose state is the training's. They are not held alive.

        ``again``: those that the program has made since count, too.
        """
        if again:
            found = find_optimizers(self._model)
            self._stepping = [weakref.ref(each) for each in found]
        known = (each() for each in self._stepping)
        return [each for each in known if each is not None]

    def times_to_measure(self, kind: Kind) -> OpTimes | None:
        """Where what ops take in its next step belongs; None: it is not measured."""
        return self._session.times_to_measure(kind.index)

    def add_step(self, kind: Kind, measured: measuring.Measured) -> None:
        """A step of that kind is over. Its plan may be another one now."""
        review = self._session.add_step(kind.index, **measured)
        if review is None:
            return
        if review.last is not None:
            self._say(f"measured: {review.last}")
        if review.problem:
            self._say(review.problem, logging.WARNING)
        if review.has_new_plan:
            kind.plan = self._session.plan_of(kind.index)
            assert kind.plan is not None
            self._say(
                f"planned anew: {review.reason}\n{plan_text(kind.plan)}",
                logging.INFO if kind.plan.budget is None else logging.WARNING,
            )


class _CannotPlanNow(Exception):
    """Only a real step can tell; the text says why."""
