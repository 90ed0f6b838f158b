"""Which calls of a model are alike: what was found out for one holds for the other."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.utils import _pytree as pytree

from memscale.inputs import Call

__all__ = ["Signatures"]

T = TypeVar("T")

# Of a call: all but sizes, and all sizes in a row.
_Kind = tuple[Any, ...]
_Sizes = tuple[int, ...]


class Signatures(Generic[T]):
    """Something for each kind of call.

    A call whose tensors are nowhere larger than those of a known one, and otherwise
    the same, needs no more memory: it is taken for that one. Texts of many lengths so
    end with the longest.
    """

    def __init__(self) -> None:
        self._known: dict[_Kind, list[tuple[_Sizes, T]]] = {}

    def find(self, call: Call, state: Hashable) -> T | None:
        """``state``: of the model, which has to be equal."""
        kind, sizes = _read(call, state)
        for known, value in self._known.get(kind, []):
            if all(size <= limit for size, limit in zip(sizes, known, strict=True)):
                return value
        return None

    def add(self, call: Call, state: Hashable, value: T) -> None:
        kind, sizes = _read(call, state)
        self._known.setdefault(kind, []).append((sizes, value))

    def __len__(self) -> int:
        return sum(map(len, self._known.values()))

    def values(self) -> Iterator[T]:
        for entries in self._known.values():
            for _, value in entries:
                yield value


def _read(call: Call, state: Hashable) -> tuple[_Kind, _Sizes]:
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
    kind: list[Any] = [
        state,
        str(spec),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled(_accelerator()),
    ]
    sizes: list[int] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            kind.append((leaf.dtype, leaf.layout, leaf.dim(), leaf.requires_grad))
            # A nested tensor has no shape.
            sizes += [leaf.numel()] if leaf.is_nested else leaf.shape
        elif leaf is None or isinstance(leaf, bool | str):
            kind.append(leaf)
        elif isinstance(leaf, int):
            kind.append(int)
            sizes.append(leaf)
        else:
            kind.append(type(leaf))
    return tuple(kind), tuple(sizes)


def _accelerator() -> str:
    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None else accelerator.type
