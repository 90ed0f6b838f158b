"""Which calls of a model are alike: what was found out for one holds for the other."""

from __future__ import annotations

from types import NoneType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from memscale._C import CallKind, trained_parameters
from memscale.model.inputs import Call

__all__ = ["call_kind", "has_gradients"]


def call_kind(
    model: nn.Module,
    call: Call,
    *,
    with_gradients: bool = True,
    as_trained: bool = False,
) -> CallKind:
    """What of a call, and of the model now, decides what its step needs.

    ``with_gradients``: whether its parameters have some now, is a part of it.
    ``as_trained``: describe a model in ``eval()`` as it will be after ``train()``.
    """
    leaves, structure = _flatten(call)
    facts = [
        *_state_of(model, with_gradients, as_trained and not model.training),
        structure,
        str(torch.is_autocast_enabled("cpu")),
        str(torch.is_autocast_enabled(_accelerator())),
    ]
    sizes: list[int] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            facts.append(
                f"{leaf.dtype} {leaf.layout} {leaf.dim()} {leaf.requires_grad}"
            )
            # A nested tensor has no shape.
            sizes += [leaf.numel()] if leaf.is_nested else leaf.shape
        elif leaf is None or isinstance(leaf, bool | str):
            facts.append(repr(leaf))
        elif isinstance(leaf, int):
            facts.append("int")
            # Larger ones (random seeds, say) are all taken for alike.
            sizes.append(max(min(leaf, _MOST), -_MOST))
        else:
            kind = type(leaf)
            facts.append(f"{kind.__module__}.{kind.__qualname__}")
    return CallKind(facts, sizes)


_MOST = (1 << 63) - 1

# What has nothing inside, to pytree. Not their subclasses, which may be registered.
_PLAIN = {torch.Tensor, bool, int, float, str, NoneType}


def _flatten(call: Call) -> tuple[list[Any], str]:
    """All that is passed, and how it is arranged.

    This runs in every step, and most calls pass tensors and numbers: for those,
    pytree would take half of the time that the kind of a call takes.
    """
    leaves = [*call.args, *call.kwargs.values()]
    if all(type(leaf) in _PLAIN for leaf in leaves):
        return leaves, f"{len(call.args)} {list(call.kwargs)}"
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
    return leaves, str(spec)


def has_gradients(model: nn.Module) -> bool:
    """Whether a parameter that is trained has a gradient now."""
    return "g" in trained_parameters(model)


def _state_of(model: nn.Module, with_gradients: bool, as_trained: bool) -> list[str]:
    """What of a model makes its steps differ, beside the batch."""
    first = next(model.parameters(), None)
    where = "" if first is None else f"{first.device} {first.dtype}"
    trained = trained_parameters(model)
    if as_trained:
        trained = trained.replace("e", "t")
    # Not which of them: in a mixture of experts that differs from step to step.
    has_some = str(with_gradients and "g" in trained)
    return [where, trained.replace("g", "1"), has_some]


def _accelerator() -> str:
    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None else accelerator.type
