"""What a wrapped model has as ``_memscale_executor``: all that was done to it.

::

    memscale.wrap(model)
    print(model._memscale_executor)            # what each layer does
    model._memscale_executor.stats()           # what was dropped and replayed so far
    with model._memscale_executor.paused():    # as if it were not wrapped
        ...

Layers tell of their calls (see memscale.calls.way_in), nothing else: parameters,
buffers, hooks, forward, class and ``state_dict`` are the model's own all the time.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn

from memscale import logs, replay
from memscale._C import Choice, Plan, PlanError
from memscale.attach.first_real_step import FirstRealStep
from memscale.attach.given_plan import doubts_about, is_for_another_batch
from memscale.attach.ledger import Entry, Measurement
from memscale.attach.planner import Kind, Planner
from memscale.calls.before_call import BeforeCall
from memscale.calls.targets import innermost, is_compiled
from memscale.config import Config
from memscale.model.inputs import Call
from memscale.model.layers import find_layers
from memscale.planning import fallback_choices
from memscale.report.plan import plan_text, wrapped_text
from memscale.techniques.table import make_techniques

__all__ = ["Executor"]

_log = logging.getLogger("memscale")

# Fields of techniques that are to come. A mode may name them; whoever sets one is told.
_NOT_BUILT = (
    "enable_offloading",
    "enable_tiling",
    "use_mixed_precision",
    "max_cpu_offload_gb",
    "async_offload",
    "auto_policy",
    "observability_port",
)

# Tracing changes what the process has one of: random states, switches of torch.
_tracing = threading.RLock()


class Executor:
    """Owns every handle. Made by ``wrap`` and ``optimize``."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        optimizer: torch.optim.Optimizer | None = None,
        given: Plan | None = None,
    ) -> None:
        self.config = config
        self.compiled = is_compiled(model := innermost(model))
        # Weak: a model that is dropped is freed at once, as it would be without us.
        self._model_ref = weakref.ref(model)
        self._given = given
        self._on_detach: list[Callable[[], object]] = []
        self._plan: Plan | None = None
        self._kind: Kind | None = None  # whose step is being measured
        self._measurement: Measurement | None = None
        self._first_step: FirstRealStep | None = None  # that is being recorded
        # Whether something else than a step may have raised the device's peak.
        self._peak_is_of_others = False
        self._said: set[str] = {"compiled"} if self.compiled else set()
        if self.compiled and config.budget is not None:
            raise PlanError(
                f"budget cannot be kept by {type(model).__name__}, which is compiled: "
                "its graphs hold what the compiler chose. Leave out the budget, or do "
                "not compile the model"
            )
        # Called at the model's first call in training, before it is planned for.
        self.first_checks: list[Callable[..., object]] = []
        fallback = self._fallback(only_asked=False)
        asked = self._fallback(only_asked=True)
        # What each technique does while there is no plan.
        self._otherwise = fallback if self.compiled else asked

        # Weak: nothing here waits for a garbage collection.
        say = weakref.WeakMethod(self.say)
        # Weak as well: what it holds may be as large.
        stepped_by = None if optimizer is None else weakref.ref(optimizer)
        made = make_techniques(
            model,
            list(find_layers(model).modules),
            stepped_by,
            fallback,
            BeforeCall(self),
            say,
        )
        self.techniques = made.all
        self._recompute = made.recompute
        self._replay = made.recompute.replay
        self._replay.owned_by(weakref.WeakMethod(self.detach))
        for technique in self.techniques:
            self._on_detach.append(technique.detach)
        self._planner = Planner(
            model,
            config,
            stepped_by,
            self.techniques,
            say,
            weakref.WeakMethod(self.paused),
            can_record=self._recompute.can_record,
        )
        try:
            self._follow(given)
        except BaseException:
            self.detach()
            raise

    @property
    def _model(self) -> nn.Module:
        model = self._model_ref()
        if model is None:
            raise ReferenceError("the model of this executor is gone")
        return model

    def _fallback(self, only_asked: bool) -> dict[str, Choice]:
        return fallback_choices(
            self._model, self.config, is_compiled=self.compiled, only_asked=only_asked
        )

    # ---- what users ask ----

    @property
    def plan(self) -> Plan | None:
        """The plan in use; None before the first batch, or if it cannot be traced."""
        return self._plan

    @property
    def plans(self) -> list[Plan]:
        """One for each kind of batch that was seen."""
        return self._planner.plans

    @property
    def ledger(self) -> list[Entry]:
        """Predicted and measured: the first steps of each plan."""
        return self._planner.ledger

    def stats(self) -> replay.Stats:
        """Saves dropped, ops replayed, and what could not be, since it was wrapped."""
        return self._replay.stats()

    def technique_stats(self) -> dict[str, dict[str, int]]:
        """What each technique counts, by the technique's name."""
        return {each.name: each.stats() for each in self.techniques}

    def reset_stats(self) -> None:
        self._replay.reset_stats()

    def paused(self) -> AbstractContextManager[None]:
        """Within it, the model runs as if it were not wrapped."""
        self.void_step()
        return self._replay.paused()

    def __str__(self) -> str:
        text = wrapped_text(self._model, self.config, self.compiled)
        if self._plan is not None:
            return f"{text}\n{plan_text(self._plan)}"
        words = [each.describe() for each in self.techniques]
        done = "; ".join(word for word in words if word is not None)
        return f"{text}\nwithout a plan: {done}" if done else text

    # ---- attach and detach ----

    def on_detach(self, work: Callable[[], object]) -> None:
        """Have ``work`` done when this is detached."""
        self._on_detach.append(work)

    def detach(self) -> None:
        """Take all of it back. Graphs that exist still can go backward."""
        self.void_step()
        with ExitStack() as all_of_it:  # also if some of it fails
            for work in self._on_detach:
                all_of_it.callback(work)
            self._on_detach.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copy of the model is not wrapped

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def wraps(self, model: nn.Module) -> bool:
        return model is self._model_ref()

    # ---- plans ----

    def plan_for(self, call: Call, is_sample: bool = False) -> Plan | None:
        """Plan for a batch like this, once; None if the model cannot be traced.

        Raises PlanError if the budget is too small, and InputError for a sample that
        the model rejects. (A batch that it rejects is about to meet the model itself,
        which says so better.)
        """
        if self._given is not None or self.compiled:
            return self._plan
        with _tracing:
            self._kind_of(call, is_sample)
            return self._plan

    def _kind_of(self, call: Call, is_sample: bool = False) -> Kind | None:
        """The batch's kind; its plan is the one in use now."""
        kind = self._planner.kind_of(call, is_sample)
        if kind is None:
            return None
        if kind.trouble is not None:
            self._go_without_plan(kind.trouble)
            kind.trouble = None
        if kind.plan is not self._plan:
            self._follow(kind.plan)
        return kind

    def _follow(self, plan: Plan | None) -> None:
        self._plan = plan
        for technique in self.techniques:
            technique.attach(plan, self._otherwise.get(technique.name))

    def _go_without_plan(self, why: str) -> None:
        text = f"{type(self._model).__name__} runs without a prediction: {why}"
        if self.config.budget is not None:
            text += (
                "; each layer keeps only its inputs, and each step is measured against "
                "the budget"
            )
        self._say_once(text, text, logging.WARNING)
        self._otherwise = self._fallback(only_asked=False)
        if self._plan is None:
            self._follow(None)

    # ---- steps ----

    def begin_step(self, call: Call) -> None:
        """The model is about to be called for training."""
        self._look_for_unlike_calls()
        if self._given is not None:
            self._look_at_batch(self._given, call)
        if self.compiled or (self._given is not None and self.config.budget is None):
            return
        with _tracing:
            self._end_step()
            if self._given is not None:
                kind = self._planner.kind_to_watch(call)
            else:
                kind = self._kind_of(call)
            if kind is None:
                self._reuse_plan()
                return
            if kind.first_step is not None:
                self._first_step = kind.first_step
                # Nobody knows yet what fits.
                self._recompute.hold_least()
                kind.first_step.begin(call)
            what = self._planner.measure_of(kind)
            if what == "peak" and self._peak_is_of_others:
                what = "step"  # its measurement begins with a peak of its own
            self._peak_is_of_others = False
            if what != "nothing":
                self._kind = kind
                if what == "all":
                    self._replay.time_ops(self._planner.times_to_measure(kind))
                device = self._device()
                held = self._planner.held_by_training(kind, what, call, device)
                self._measurement = Measurement(device, what, self._replayed, held)

    def called_under_hooks(self) -> None:
        """The model is called where others watch, or forbid, what autograd saves.

        Raises PlanError under a budget: nothing can be dropped there.
        """
        if self.config.budget is not None:
            raise PlanError(
                f"budget cannot be kept where {type(self._model).__name__} is called "
                "under saved-tensor hooks of others (a checkpoint around the model, "
                "save_on_cpu) or where torch forbids them (torch.func): nothing can be "
                "dropped there. Leave out one of the two"
            )

    def _reuse_plan(self) -> None:
        """For a kind of batch that is one too many."""
        if self._given is not None:
            return
        if self.config.budget is not None:
            self._otherwise = self._fallback(only_asked=False)
            self._follow(None)
        elif self._plan is None and self._planner.plans:
            self._follow(self._planner.plans[-1])

    def _end_step(self) -> None:
        first_step, self._first_step = self._first_step, None
        if first_step is not None:
            first_step.end()
            self._planner.plan_recorded(first_step)
            self._follow(self._plan)
        measurement, self._measurement = self._measurement, None
        if measurement is not None:
            assert self._kind is not None
            measured = measurement.end()
            self._replay.time_ops(None)
            self._planner.add_step(self._kind, measured)

    def void_step(self) -> None:
        """What is measured would not be a step of training."""
        self._peak_is_of_others = True
        first_step, self._first_step = self._first_step, None
        if first_step is not None:
            first_step.cancel()
            self._follow(self._plan)
        measurement, self._measurement = self._measurement, None
        if measurement is not None:
            self._replay.time_ops(None)
            measurement.cancel()

    def evaluates(self) -> None:
        """The model is called without gradients."""
        first_step, self._first_step = self._first_step, None
        self.void_step()
        if first_step is not None:
            first_step.evaluates()
            self._first_step = first_step

    def _device(self) -> torch.device:
        device = next((p.device for p in self._model.parameters()), None)
        return device or torch.device("cpu")

    def _replayed(self) -> int:
        return self._replay.stats().nanoseconds_replayed

    # ---- words ----

    def say(self, text: str, level: int = logging.INFO) -> None:
        if self.config.enable_logging:
            _log.log(level, "%s", text)

    def _say_once(self, what: str, text: str, level: int = logging.INFO) -> None:
        if what not in self._said:
            self._said.add(what)
            self.say(text, level)

    def _look_for_unlike_calls(self) -> None:
        if "unlike" not in self._said and self._replay.calls_unlike_keep_set:
            least = self._plan is not None and self._plan.budget is not None
            then = (
                "hold the least"
                if least
                else "keep what is expensive and recompute the rest"
            )
            self._say_once(
                "unlike",
                "some layers ran other ops than the plan knows: from the first "
                f"difference on they {then}",
                logging.WARNING,
            )

    def _look_at_batch(self, plan: Plan, call: Call) -> None:
        if self.config.budget is not None and is_for_another_batch(plan, call):
            raise PlanError(
                f"the plan was made for {plan.call}, this batch is {call}: whether it "
                "keeps the budget is not known. Leave out the plan, to have one made "
                "for each batch, or the budget"
            )
        if "batch" not in self._said and is_for_another_batch(plan, call):
            self._say_once(
                "batch",
                f"the plan was made for {plan.call}, this batch is {call}: its "
                "prediction is not of this one",
            )

    def say_wrapped(self) -> None:
        """What was wrapped, on what hardware; the plan follows with the first batch."""
        undo = logs.use(self.config)
        if undo is not None:
            self.on_detach(undo)
        self.say(wrapped_text(self._model, self.config, self.compiled))
        doubts = None if self._given is None else doubts_about(self._given)
        if doubts is not None:
            self.say(doubts)
        for name in _NOT_BUILT:
            if self.config.is_set(name) and getattr(self.config, name):
                self.say(f"{name} has no effect yet in this version", logging.WARNING)
        if not any(p.requires_grad for p in self._model.parameters()):
            self.say(
                "no parameter requires a gradient: nothing to save", logging.WARNING
            )

    def say_compiled(self) -> None:
        """Once, when a wrapped model is compiled later."""
        self._say_once(
            "compiled",
            "the wrapped model is compiled: its graphs hold what the compiler "
            "chose, and nothing is recomputed in them"
            + ("" if self.config.budget is None else "; the budget is not kept"),
            logging.INFO if self.config.budget is None else logging.WARNING,
        )
