"""The optimizer of a wrapped model, with its state in 8 bits; back at detach.

An optimizer that is known is converted at once, any other that holds parameters of the
model at its first step, before it steps. The object stays the same: see
memscale.optim.to_8bit. Those that cannot be converted are left alone, and that is said.
"""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import nn

from memscale._C import Choice, Plan, Recorder
from memscale.calls.optimizer_steps import stop_watching, watch
from memscale.model.optimizers import holds_parameters, innermost_optimizer
from memscale.optim import from_8bit, is_8bit, to_8bit
from memscale.optim.adam import OPTIONS, EightBit
from memscale.optim.bitsandbytes import steps_in_pieces

__all__ = ["EightBitState", "OptimizerState"]

Say = Callable[..., None]


class OptimizerState:
    """The technique: see memscale.techniques.technique.Technique.

    Once on, it stays on until ``detach``: a state that was rounded cannot be made
    exact again.
    """

    name = "optimizer_state"

    def __init__(
        self,
        model: nn.Module,
        optimizer: weakref.ref[torch.optim.Optimizer] | None,
        say: weakref.WeakMethod[Say],
    ) -> None:
        self._model = weakref.ref(model)
        self._optimizer = optimizer
        self._say = say
        self._state: EightBitState | None = None

    def attach(self, plan: Plan | None, otherwise: Choice | None) -> None:
        choice = otherwise if plan is None else plan.find_choice(self.name)
        model = self._model()
        if choice is None or self._state is not None or model is None:
            return
        self._state = EightBitState(model, self._say)
        known = None if self._optimizer is None else self._optimizer()
        if known is not None:
            self._state.convert(known)

    def detach(self) -> None:
        state, self._state = self._state, None
        if state is not None:
            state.detach()

    def around_call(self) -> AbstractContextManager[object]:
        return nullcontext()

    @property
    def hears_of_layers(self) -> bool:
        return False

    def plain_optimizer(
        self, optimizer: torch.optim.Optimizer
    ) -> torch.optim.Optimizer:
        return optimizer if self._state is None else self._state.before(optimizer)

    def record(self, recorder: Recorder | None) -> None:
        pass  # it acts between steps

    def stats(self) -> dict[str, int]:
        converted = 0 if self._state is None else len(self._state.converted)
        return {"optimizers_in_8_bits": converted}

    def describe(self) -> str | None:
        return None if self._state is None else "optimizer state in 8 bits"


# How many wrapped models have converted an optimizer; the last gives it back.
_holders: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = (
    weakref.WeakKeyDictionary()
)


class EightBitState:
    """Of one model. Holds neither the model nor its optimizers alive."""

    def __init__(self, model: nn.Module, say: weakref.WeakMethod[Say]) -> None:
        self._model = weakref.ref(model)
        self._say_ref = say
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.converted: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        watch(self)

    def _say(self, text: str, level: int) -> None:
        say = self._say_ref()
        if say is not None:
            say(text, level)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        model = self._model()
        if (
            model is not None
            and optimizer not in self._seen
            and holds_parameters(optimizer, model)
        ):
            self.convert(optimizer)

    def convert(self, optimizer: torch.optim.Optimizer) -> None:
        """Make it 8-bit, if it can be. Says what was done, or why nothing was."""
        optimizer = innermost_optimizer(optimizer)
        if optimizer in self._seen:
            return
        holders = _holders.get(optimizer, 0)
        if is_8bit(optimizer) and holders == 0:
            self._seen.add(optimizer)  # the user's own
            return
        name = type(optimizer).__name__
        mine, others = self._parted(optimizer)
        if isinstance(optimizer, EightBit):  # another model's: now of this one too
            why_not = None
            optimizer.forget_bits(mine)
        else:
            why_not = to_8bit(optimizer, keep_32=others)
        self._seen.add(optimizer)  # not if that raised: then the next step tries again
        if why_not is not None:
            self._say(f"use_8bit_optimizer: {why_not}", logging.WARNING)
            return
        _holders[optimizer] = holders + 1
        self.converted.add(optimizer)
        text = f"the state of {name} is held in 8 bits"
        if others and holders == 0:
            text += (
                f", but for {len(others)} of its parameters, which are not of this "
                "model: theirs stays in 32"
            )
        level = logging.INFO
        devices = {p.device.type for p in mine}
        slow = [kind for kind in sorted(devices) if steps_in_pieces(kind)]
        if slow:
            level = logging.WARNING
            text += (
                f"; there is no kernel for {slow[0]} here, and a step takes many times "
                "as long as torch's: on CUDA, install bitsandbytes or build memscale "
                "with CUDA kernels"
            )
        self._say(text, level)

    def _parted(
        self, optimizer: torch.optim.Optimizer
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Its parameters: the model's, and others."""
        model = self._model()
        known = set() if model is None else set(model.parameters())
        every = [p for group in optimizer.param_groups for p in group["params"]]
        return (
            [p for p in every if p in known],
            [p for p in every if p not in known],
        )

    def before(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """What it was before it was converted, to predict the plain step with."""
        if optimizer not in self.converted:
            return optimizer
        is_adamw = isinstance(optimizer, torch.optim.AdamW)
        plain = object.__new__(torch.optim.AdamW if is_adamw else torch.optim.Adam)
        plain.__dict__.update(optimizer.__dict__)
        plain.param_groups = [
            {name: value for name, value in group.items() if name not in OPTIONS}
            for group in optimizer.param_groups
        ]
        plain.state = defaultdict(dict)
        return plain

    def detach(self) -> None:
        """Give every optimizer that was converted its own state back."""
        stop_watching(self)
        with ExitStack() as all_of_them:  # also if one of them fails
            for optimizer in list(self.converted):
                all_of_them.callback(_give_back, optimizer)
            self.converted.clear()
            self._seen.clear()


def _give_back(optimizer: torch.optim.Optimizer) -> None:
    holders = _holders.pop(optimizer, 1) - 1
    if holders > 0:
        _holders[optimizer] = holders
    elif is_8bit(optimizer):
        from_8bit(optimizer)
