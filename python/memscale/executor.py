"""What a wrapped model has as ``_memscale_executor``: all that was done to it.

::

    memscale.wrap(model)
    print(model._memscale_executor)            # what each layer does
    model._memscale_executor.stats()           # what was dropped and replayed so far
    with model._memscale_executor.paused():    # as if it were not wrapped
        ...

Attached are hooks, nothing else: parameters, buffers, forward, class and ``state_dict``
are the model's own all the time. ``detach`` takes every hook away.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling

from memscale import logs, replay
from memscale._C import Error, Plan, PlanError
from memscale._optimizer_step import OptimizerLike
from memscale._progress import progress
from memscale._signature import Signatures
from memscale._use_cache import UseCache
from memscale.config import Config, EffectiveConfig, OptimizationMode
from memscale.estimator import estimate_call
from memscale.inputs import Call
from memscale.plan_text import plan_text, wrapped_text
from memscale.planning import decide, load_plan

__all__ = ["Executor"]

_log = logging.getLogger("memscale")


class Executor:
    """Owns every handle. Made by ``wrap`` and ``optimize``."""

    def __init__(
        self, model: nn.Module, config: Config, optimizer: OptimizerLike | None = None
    ) -> None:
        self.config = config
        self.effective = config.resolve()
        # Not to be kept alive by what is attached to it.
        self._model_ref = weakref.ref(model)
        self._optimizer = optimizer
        self._use_cache = UseCache(model)
        self._on_detach: list[Callable[[], object]] = []
        self._planned: Signatures[Plan | None] = Signatures()
        self._plan: Plan | None = None
        self.compiled = hasattr(model, "_orig_mod")
        self._told = None if config.plan is None else load_plan(config.plan, model)
        policy = _policy(self.effective, self.compiled)
        self._replay = replay.attach(model, policy, around=self._use_cache.off)
        if self._told is not None:
            self._follow(self._told)
        handle = model.register_forward_pre_hook(
            _BeforeCall(self), with_kwargs=True, prepend=True
        )
        self._on_detach += [handle.remove, self._replay.detach]

    # ---- what users ask ----

    @property
    def plan(self) -> Plan | None:
        """The plan in use; None before the first batch, or if it cannot be traced."""
        return self._plan

    @property
    def plans(self) -> list[Plan]:
        """One for each kind of batch that was seen."""
        return [plan for plan in self._planned.values() if plan is not None]

    def stats(self) -> replay.Stats:
        """Saves dropped, ops replayed, and what could not be, since it was wrapped."""
        return self._replay.stats()

    def reset_stats(self) -> None:
        self._replay.reset_stats()

    def paused(self) -> AbstractContextManager[None]:
        """Within it, the model runs as if it were not wrapped."""
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
        while self._on_detach:
            self._on_detach.pop()()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copy of the model is not wrapped

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    @property
    def _model(self) -> nn.Module:
        model = self._model_ref()
        assert model is not None  # it owns this
        return model

    def wraps(self, model: nn.Module) -> bool:
        return model is self._model_ref()

    # ---- plans ----

    def plan_for(self, call: Call) -> Plan | None:
        """Plan for a batch like this, once; None if the model cannot be traced.

        Raises PlanError if the budget is too small.
        """
        if self._told is not None or self.compiled:
            return self._plan
        found, plan = self._planned.find(call)
        if not found:
            plan = self._make_plan(call)
            self._planned.add(call, plan)
        if plan is not None and plan is not self._plan:
            self._follow(plan)
        return plan

    def _follow(self, plan: Plan) -> None:
        self._plan = plan
        self._replay.set_policies(
            [layer.keep_set or layer.policy for layer in plan.layers]
        )

    def _make_plan(self, call: Call) -> Plan | None:
        name = type(self._model).__name__
        try:
            with progress(f"planning {name}"), self.paused(), self._use_cache.off():
                traced = estimate_call(
                    self._model,
                    call,
                    self._optimizer or "adamw",
                    self.config,
                    None,
                    fallback=False,
                )
                plan = decide(traced, self.config, name)
        except PlanError:
            raise
        except Error as error:
            self.say(f"{name} runs without a prediction: {error}", logging.WARNING)
            return None
        except Exception as error:
            # The model rejects the batch, and will say so itself in a moment.
            _log.debug("not traced: %s", error)
            return None
        finally:
            # Tracing leaves cycles, of errors and their frames: they would keep the
            # model and this batch alive until the next collection.
            gc.collect()
        self.say(plan_text(plan))
        return plan

    def say(self, text: str, level: int = logging.INFO) -> None:
        if self.config.enable_logging:
            _log.log(level, "%s", text)

    def say_wrapped(self) -> None:
        """What was wrapped, on what hardware; the plan follows with the first batch."""
        logs.configure(self.config)
        self.say(wrapped_text(self._model, self.config, self.compiled))
        if not any(p.requires_grad for p in self._model.parameters()):
            self.say(
                "no parameter requires a gradient: nothing to save", logging.WARNING
            )


def _policy(effective: EffectiveConfig, compiled: bool) -> str:
    """Of all layers, until there is a plan, and where none can be made."""
    if compiled or not effective.enable_checkpointing:
        return "keep"
    return "block" if effective.mode == OptimizationMode.AGGRESSIVE else "cheap"


class _BeforeCall:
    """The model's first hook. A copy of the model is not wrapped."""

    def __init__(self, executor: Executor | None) -> None:
        self._executor = executor

    def __deepcopy__(self, memo: dict[int, Any]) -> _BeforeCall:
        return _BeforeCall(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (None,)

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        executor = self._executor
        if executor is None or not torch.is_grad_enabled() or is_compiling():
            return
        # A shell that is traced has the hooks of its original.
        if executor.wraps(model):
            executor.plan_for(Call(args, kwargs, source="your batch"))
