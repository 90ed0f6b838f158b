"""Layers keep less, and backward computes it again: memscale.replay under a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from memscale import replay
from memscale._C import Choice, Plan, Recorder
from memscale.calls.before_call import BeforeCall
from memscale.techniques.technique import Technique

__all__ = ["Recompute"]


class Recompute:
    """The technique: see memscale.techniques.technique.Technique.

    ``layers``: the model's, by name. ``otherwise``: what they do until there is a plan.
    ``others``: techniques that are attached before this one, and may have to hear of
    layers.
    """

    name = "recompute"

    def __init__(
        self,
        model: nn.Module,
        layers: list[str],
        otherwise: Choice | None,
        around: Callable[[], AbstractContextManager[object]],
        before: BeforeCall,
        others: Sequence[Technique] = (),
    ) -> None:
        self._layers = layers
        self._others = others
        # What layers do that a plan does not know.
        self._policy = "keep" if otherwise is None else otherwise.choice
        self.replay = replay.attach(model, self._policy, around=around, before=before)

    @property
    def can_record(self) -> bool:
        """Whether layers are observed at all."""
        return self._policy != "keep"

    def attach(self, plan: Plan | None, otherwise: Choice | None) -> None:
        # By name: layers may have come and gone since the model was wrapped.
        chosen: dict[str, replay.Policy] = {}
        after_difference = "cheap"
        if plan is not None:
            chosen = {each.layer: each.keep_set or each.policy for each in plan.layers}
            after_difference = plan.policy_after_difference
        self.replay.set_policies(
            [chosen.get(name, self._policy) for name in self._layers],
            after_difference,
            tell=any(each.hears_of_layers for each in self._others),
        )

    def hold_least(self) -> None:
        """Every layer keeps only its inputs, whatever the plan says."""
        self.replay.set_policies(["block"] * len(self._layers))

    def detach(self) -> None:
        self.replay.detach()

    def around_call(self) -> AbstractContextManager[object]:
        return nullcontext()

    @property
    def hears_of_layers(self) -> bool:
        return False

    def plain_optimizer(
        self, optimizer: torch.optim.Optimizer
    ) -> torch.optim.Optimizer:
        return optimizer

    def record(self, recorder: Recorder | None) -> None:
        self.replay.record(recorder)

    def stats(self) -> dict[str, int]:
        counts = self.replay.stats()
        return {
            "saves_dropped": counts.saves_dropped,
            "bytes_dropped": counts.bytes_dropped,
            "ops_replayed": counts.ops_replayed,
        }

    def describe(self) -> str | None:
        return f"layers that no plan names: {self._policy}"
