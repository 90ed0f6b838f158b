"""All techniques on one model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from memscale._C import Choice
from memscale.calls.before_call import BeforeCall
from memscale.techniques.optimizer_state import OptimizerState
from memscale.techniques.recompute import Recompute
from memscale.techniques.technique import Technique
from memscale.techniques.use_cache import UseCache

__all__ = ["Techniques", "make_techniques"]


@dataclass(frozen=True)
class Techniques:
    """In the order in which they are attached; they are detached the other way."""

    all: list[Technique]
    recompute: Recompute  # whose hooks see the model's calls


def make_techniques(
    model: nn.Module,
    layers: list[str],
    optimizer: weakref.ref[torch.optim.Optimizer] | None,
    fallback: dict[str, Choice],
    before: BeforeCall,
    say: weakref.WeakMethod[Callable[..., None]],
) -> Techniques:
    """Attaches what sees the model's calls; all else waits for ``attach``.

    ``layers``: the model's, by name. ``optimizer``: that steps the model, if it is
    known. ``fallback``: what is done where there is no plan.
    """
    others: list[Technique] = [
        UseCache(model, say),
        OptimizerState(model, optimizer, say),
    ]

    @contextmanager
    def around() -> Iterator[None]:
        with ExitStack() as stack:
            for technique in others:
                stack.enter_context(technique.around_call())
            yield

    recompute = Recompute(
        model, layers, fallback.get(Recompute.name), around, before, others[:1]
    )
    return Techniques([others[0], recompute, others[1]], recompute)
