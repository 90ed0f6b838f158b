"""What a wrapped model has as ``_memscale_executor``: all that was done to it.

::

    memscale.wrap(model)
    print(model._memscale_executor)            # what each layer does
    model._memscale_executor.stats()           # what was dropped and replayed so far
    with model._memscale_executor.paused():    # as if it were not wrapped
        ...

Layers tell of their calls (see memscale._way_in), nothing else: parameters, buffers,
hooks, forward, class and ``state_dict`` are the model's own all the time.
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
from memscale._before_call import BeforeCall
from memscale._bitsandbytes import steps_in_pieces
from memscale._C import Error, InputError, Plan, PlanError, TraceError
from memscale._first_real_step import FirstRealStep
from memscale._leaks import remove_fakes_of_failures
from memscale._optimizer_step import (
    OptimizerLike,
    innermost_optimizer,
    only_of,
)
from memscale._planned import (
    Planned,
    doubts_about,
    is_for_another_batch,
    resident_bytes,
    state_of,
)
from memscale._progress import progress
from memscale._shell import without_hooks_of_users
from memscale._signature import Signatures
from memscale._use_cache import Caches
from memscale.config import Config, EffectiveConfig, OptimizationMode
from memscale.eight_bit import EightBitState, find_optimizer
from memscale.estimator import Estimate, estimate_call
from memscale.inputs import Call
from memscale.layers import find_layers, parameter_bytes
from memscale.ledger import Entry, Watch
from memscale.plan_text import plan_text, wrapped_text
from memscale.planning import as_wrapped, decide, forgets_cache
from memscale.targets import check_model, innermost, is_compiled

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

# Of batches that are planned for: each costs about a second, once.
_MAX_KINDS = 16

# Tracing changes what the process has one of: random states, switches of torch.
_tracing = threading.RLock()


class Executor:
    """Owns every handle. Made by ``wrap`` and ``optimize``."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        optimizer: torch.optim.Optimizer | None = None,
        told: Plan | None = None,
    ) -> None:
        self.config = config
        self.effective = config.resolve()
        model = innermost(model)
        # Weak: a model that is dropped is freed at once, as it would be without us.
        self._model_ref = weakref.ref(model)
        # Weak as well: what it holds may be as large.
        self._optimizer_ref = None if optimizer is None else weakref.ref(optimizer)
        # Weak: nothing here waits for a garbage collection.
        self._caches = Caches(model, weakref.WeakMethod(self.say))
        self._on_detach: list[Callable[[], object]] = []
        self._planned: Signatures[Planned] = Signatures()
        self._plan: Plan | None = None
        self._watch: Watch | None = None
        self._first_step: FirstRealStep | None = None  # that is being recorded
        self._why_not_traced: str | None = None
        self._said_unlike = False
        self._said_batch = False
        self.ledger: list[Entry] = []
        self.compiled = is_compiled(model)
        self._said_compiled = self.compiled
        self._told = told
        self._policy = _policy(self.effective, self.compiled, config.budget)
        self._layers = list(find_layers(model).modules)
        # Called at the model's first call in training, before it is planned for.
        self.first_checks: list[Callable[..., object]] = []
        self._replay = replay.attach(
            model, self._policy, around=self._caches.in_call, before=BeforeCall(self)
        )
        self._replay.owned_by(weakref.WeakMethod(self.detach))
        self._eight_bit: EightBitState | None = None
        try:
            if told is not None:
                self._follow(told)
        except BaseException:
            self._replay.detach()
            raise
        self._on_detach.append(self._replay.detach)
        is_asked_for = config.is_set("use_8bit_optimizer")
        if (is_asked_for and self.effective.use_8bit_optimizer) or (
            told is not None and told.optimizer_bits == 8
        ):
            self._hold_state_in_8_bits()
        elif self.compiled:
            self._hold_state_as_the_mode_says()

    @property
    def _model(self) -> nn.Module:
        model = self._model_ref()
        if model is None:
            raise ReferenceError("the model of this executor is gone")
        return model

    @property
    def _optimizer(self) -> torch.optim.Optimizer | None:
        return None if self._optimizer_ref is None else self._optimizer_ref()

    # ---- what users ask ----

    @property
    def plan(self) -> Plan | None:
        """The plan in use; None before the first batch, or if it cannot be traced."""
        return self._plan

    @property
    def plans(self) -> list[Plan]:
        """One for each kind of batch that was seen."""
        return [each.plan for each in self._planned.values() if each.plan is not None]

    def stats(self) -> replay.Stats:
        """Saves dropped, ops replayed, and what could not be, since it was wrapped."""
        return self._replay.stats()

    def reset_stats(self) -> None:
        self._replay.reset_stats()

    def paused(self) -> AbstractContextManager[None]:
        """Within it, the model runs as if it were not wrapped."""
        self.void_step()
        return self._replay.paused()

    def __str__(self) -> str:
        text = wrapped_text(self._model, self.config, self.compiled)
        return text if self._plan is None else f"{text}\n{plan_text(self._plan)}"

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
        if self._told is not None or self.compiled:
            return self._plan
        with _tracing:
            return self._planned_for(call, is_sample).plan

    def _planned_for(self, call: Call, is_sample: bool = False) -> Planned:
        state = state_of(self._model)
        planned = self._planned.find(call, state)
        if planned is None and len(self._planned) == _MAX_KINDS:
            return Planned(self._plan)  # an argument that counts steps, say
        if planned is None:
            planned = self._make_plan(call, is_sample)
            self._planned.add(call, state, planned)
            if len(self._planned) == _MAX_KINDS:
                self.say(f"{_MAX_KINDS} kinds of batches: later ones get no plan")
        first_step = planned.first_step
        if first_step is not None and first_step.estimate is not None:
            planned.first_step = None  # also if no plan is within the budget
            self._plan_from(planned, first_step.estimate, self._optimizer_now())
        elif first_step is not None and first_step.has_failed:
            planned.first_step = None
            self._say_no_plan(first_step.failure)
        if planned.plan is not self._plan:
            self._follow(planned.plan)
        if planned.plan is not None and planned.plan.optimizer_bits == 8:
            self._hold_state_in_8_bits()
        return planned

    def _hold_state_in_8_bits(self) -> None:
        if self._eight_bit is not None:
            return
        # Weak: nothing here waits for a garbage collection.
        self._eight_bit = EightBitState(self._model, weakref.WeakMethod(self.say))
        self._on_detach.append(self._eight_bit.detach)
        if self._optimizer is not None:
            self._eight_bit.convert(self._optimizer)

    def _follow(self, plan: Plan | None) -> None:
        self._plan = plan
        # A recorded step does not show what reads a cache that a layer has left.
        self._caches.early = (
            plan is not None and forgets_cache(plan) and self._why_not_traced is None
        )
        # By name: layers may have come and gone since the model was wrapped.
        chosen: dict[str, replay.Policy] = {}
        if plan is not None:
            chosen = {each.layer: each.keep_set or each.policy for each in plan.layers}
        self._replay.set_policies(
            [chosen.get(name, self._policy) for name in self._layers]
        )

    # ---- the first steps, see memscale.ledger ----

    def begin_step(self, call: Call) -> None:
        """The model is about to be called for training."""
        self._look_for_unlike_calls()
        if self._told is not None:
            self._look_at_batch(self._told, call)
        if self._told is not None or self.compiled:
            return
        with _tracing:
            self._end_step()
            planned = self._planned_for(call)
            if planned.first_step is not None:
                self._record(planned.first_step, call)
            watch = planned.watch
            if watch is not None and not watch.done:
                self._watch = watch
                self._replay.time_ops(watch.op_times)
                watch.begin_step(*self._now())

    def _record(self, first_step: FirstRealStep, call: Call) -> None:
        self._first_step = first_step
        # The least that can be held: nobody knows yet what fits.
        self._replay.set_policies(["block"] * len(self._layers))
        first_step.begin(call)

    def _end_step(self) -> None:
        first_step, self._first_step = self._first_step, None
        if first_step is not None:
            first_step.end()
            self._follow(self._plan)
        watch, self._watch = self._watch, None
        if watch is None:
            return
        self._replay.time_ops(None)
        watch.end_step(*self._now())
        if not watch.done:
            return
        self.ledger += watch.entries
        self.say(f"measured: {watch.entries[-1]}")
        self._plan_anew(watch)

    def _look_for_unlike_calls(self) -> None:
        if not self._said_unlike and self.stats().calls_unlike_keep_set:
            self._said_unlike = True
            self.say(
                "some layers ran other ops than the plan knows: from the first "
                "difference on they keep what is expensive and recompute the rest",
                logging.WARNING,
            )

    def _look_at_batch(self, plan: Plan, call: Call) -> None:
        if not self._said_batch and is_for_another_batch(plan, call):
            self._said_batch = True
            self.say(
                f"the plan was made for {plan.call}, this batch is {call}: its "
                "prediction is not of this one"
            )

    def void_step(self) -> None:
        """What is measured would not be a step of training."""
        first_step, self._first_step = self._first_step, None
        if first_step is not None:
            first_step.cancel()
            self._follow(self._plan)
        watch, self._watch = self._watch, None
        if watch is not None:
            self._replay.time_ops(None)
            watch.cancel()

    def _now(self) -> tuple[torch.device, int]:
        device = next((p.device for p in self._model.parameters()), None)
        replayed = self._replay.stats().nanoseconds_replayed
        return device or torch.device("cpu"), replayed

    def evaluates(self) -> None:
        """The model is called without gradients."""
        first_step, self._first_step = self._first_step, None
        self.void_step()
        if first_step is not None:
            first_step.evaluates()
            self._first_step = first_step

    def _plan_anew(self, watch: Watch) -> None:
        """Once, if what was measured breaks what was promised."""
        planned = next(p for p in self._planned.values() if p.watch is watch)
        traced, planned.traced = planned.traced, None
        margin, is_slow = watch.margin(), watch.is_slow()
        if traced is None or not (margin or is_slow):
            return
        try:
            plan = decide(
                traced,
                self.config,
                watch.plan.model,
                margin=margin,
                op_times=(watch.op_times, self._layers) if is_slow else None,
                optimizer=self._optimizer_now(),
                layer_bytes=parameter_bytes(find_layers(self._model)),
            )
        except PlanError as error:
            text = f"the first steps need more than predicted, and {error}"
            self.say(text, logging.WARNING)
            return
        planned.plan = plan
        self.say(f"planned anew after the first steps:\n{plan_text(plan)}")

    def _make_plan(self, call: Call, is_sample: bool) -> Planned:
        model = self._model
        name = type(model).__name__
        check_model(model)  # it may have been sharded since it was wrapped
        compiled = [part for part, m in model.named_modules() if is_compiled(m)]
        if compiled:
            self._say_no_plan(
                f"{compiled[0] or name} is compiled, and its graphs hold what the "
                "compiler chose"
            )
            return Planned()
        if not self.config.use_static_profiling:
            return self._plan_later("use_static_profiling is off")
        if self._why_not_traced is not None:
            return self._plan_later(self._why_not_traced)
        optimizer = self._optimizer_now()
        traced: Estimate | None = None
        planned = Planned()
        try:
            with (
                progress(f"planning {name}"),
                self.paused(),
                without_hooks_of_users(),
            ):
                traced = as_wrapped(
                    lambda: estimate_call(
                        model, call, optimizer, self.config, None, fallback=False
                    )
                )
                if not traced.trace.saves_known:
                    raise TraceError(
                        "the tensors that autograd saves could not be recorded (the "
                        "model uses torch.func)"
                    )
                self._plan_from(planned, traced, optimizer)
        except PlanError:
            raise
        except Error as error:
            return self._plan_later(str(error))
        except Exception as error:
            if is_sample:
                lines = str(error).splitlines() or [""]
                raise InputError(
                    f"{name} rejects sample_input ({call}): "
                    f"{type(error).__name__}: {lines[0]}"
                ) from error
            # If the model rejects the batch, it will say so itself in a moment.
            return self._plan_later(f"{type(error).__name__} while tracing it: {error}")
        finally:
            # Errors are in cycles with their frames, which would keep the model and
            # this batch alive until the next collection.
            if traced is None:
                remove_fakes_of_failures()
        return planned

    def _plan_from(
        self, planned: Planned, traced: Estimate, optimizer: OptimizerLike
    ) -> None:
        """Plan with a traced or recorded step. Raises PlanError for a small budget."""
        plan = decide(
            traced,
            self.config,
            type(self._model).__name__,
            optimizer=optimizer,
            layer_bytes=parameter_bytes(find_layers(self._model)),
        )
        self.say(plan_text(plan))
        planned.plan = plan
        if self.config.warmup_steps > 0:
            planned.traced = traced
            planned.watch = Watch(
                plan, resident_bytes(traced, plan), self.config.warmup_steps
            )

    def _plan_later(self, why: str) -> Planned:
        """With the first real step, where that can be recorded."""
        names = list(find_layers(self._model).modules)
        if (
            not self.config.use_empirical_fallback
            or self._policy == "keep"
            or names != self._layers
        ):
            self._say_no_plan(why)
            return Planned()
        if self._why_not_traced is None:
            self._why_not_traced = why
            self.say(
                f"{type(self._model).__name__} is planned after its first step, which "
                "is recorded as it runs, each layer keeping only its inputs; it could "
                f"not be traced before, because {why}"
            )
        return Planned(
            first_step=FirstRealStep(
                self._model,
                self._replay,
                self._caches,
                weakref.WeakMethod(self._optimizer_now),
            )
        )

    def _optimizer_now(self) -> torch.optim.Optimizer | str:
        """The optimizer that steps the model, as it was before conversion to 8 bits."""
        found = self._optimizer or find_optimizer(self._model)
        if found is None:
            return "adamw"
        found = innermost_optimizer(found)
        if self._eight_bit is not None:
            found = self._eight_bit.before(found)
        # Of parameters that are not the model's, nothing is known here.
        return only_of(found, self._model.parameters())

    def _say_no_plan(self, why: str) -> None:
        text = f"{type(self._model).__name__} runs without a prediction: {why}"
        if self.config.budget is not None:
            text += (
                "; each layer keeps only its inputs, and whether that is within the "
                "budget is not known"
            )
        self.say(text, logging.WARNING)
        self._hold_state_as_the_mode_says()

    def _hold_state_as_the_mode_says(self) -> None:
        """Without a plan. Where it takes long, it has to be asked for."""
        device, _ = self._now()
        is_asked_for = self.config.is_set("use_8bit_optimizer")
        if self.effective.use_8bit_optimizer and (
            is_asked_for or not steps_in_pieces(device.type)
        ):
            self._hold_state_in_8_bits()

    def say(self, text: str, level: int = logging.INFO) -> None:
        if self.config.enable_logging:
            _log.log(level, "%s", text)

    def say_wrapped(self) -> None:
        """What was wrapped, on what hardware; the plan follows with the first batch."""
        undo = logs.use(self.config)
        if undo is not None:
            self.on_detach(undo)
        self.say(wrapped_text(self._model, self.config, self.compiled))
        doubts = None if self._told is None else doubts_about(self._told)
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
        if not self._said_compiled:
            self._said_compiled = True
            self.say(
                "the wrapped model is compiled: its graphs hold what the compiler "
                "chose, and nothing is recomputed in them"
            )


def _policy(effective: EffectiveConfig, compiled: bool, budget: int | None) -> str:
    """What every layer does until there is a plan, and where none can be made."""
    if compiled or not effective.enable_checkpointing:
        return "keep"
    is_small = effective.mode == OptimizationMode.AGGRESSIVE or budget is not None
    return "block" if is_small else "cheap"
