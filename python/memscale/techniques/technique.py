"""What the executor of a wrapped model asks of a technique."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from memscale._C import Choice, Plan, Recorder

__all__ = ["Technique"]


class Technique(Protocol):
    """One technique on one model. Holds neither the model nor its optimizer alive."""

    @property
    def name(self) -> str:
        """The technique's name in plans, as core/techniques has it."""

    def attach(self, plan: Plan | None, otherwise: Choice | None) -> None:
        """From now on do what ``plan`` says.

        Called again with each plan that comes to be followed. Without a plan,
        ``otherwise`` is what to do; None: nothing.
        """

    def detach(self) -> None:
        """Take all of it back: the model and its optimizer are as never wrapped."""

    def around_call(self) -> AbstractContextManager[object]:
        """Entered around each call of the model in training."""

    @property
    def hears_of_layers(self) -> bool:
        """Whether it acts when a layer returns: see memscale.calls.call_events."""

    def plain_optimizer(
        self, optimizer: torch.optim.Optimizer
    ) -> torch.optim.Optimizer:
        """The optimizer as it would be without this technique, to predict with."""

    def record(self, recorder: Recorder | None) -> None:
        """From the next call on, tell ``recorder`` what a recording has to know."""

    def stats(self) -> dict[str, int]:
        """Counts since it was attached."""

    def describe(self) -> str | None:
        """What it does now, in a few words; None: nothing."""
