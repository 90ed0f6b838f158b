"""Layers: the parts of a model that plans and estimates talk about.

A layer is each member of a repeated block (``h.0`` … ``h.23``) and each module
outside of the blocks. Modules inside a block's member belong to that member.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

__all__ = ["Layers", "find_layers", "parameter_bytes"]


@dataclass
class Layers:
    """Layers by name, in the order of ``named_modules()``."""

    modules: dict[str, nn.Module] = field(default_factory=dict)
    # Members of one list that have the same class, in order: candidates for being
    # equal. Names of layers.
    rows: list[list[str]] = field(default_factory=list)
    # Layers that own all that is inside them.
    blocks: set[str] = field(default_factory=set)


def find_layers(model: nn.Module) -> Layers:
    """The layers of ``model``. A module that is used twice is one layer."""
    layers = Layers()
    _visit("", model, layers, set())
    return layers


def parameter_bytes(layers: Layers) -> list[int]:
    """Of each layer, in their order. A parameter that several share is the first's."""
    seen: set[int] = set()
    sums = []
    for name, module in layers.modules.items():
        own = {id(p): p for p in module.parameters(recurse=name in layers.blocks)}
        sums.append(
            sum(p.numel() * p.element_size() for i, p in own.items() if i not in seen)
        )
        seen |= own.keys()
    return sums


def _visit(name: str, module: nn.Module, layers: Layers, seen: set[int]) -> None:
    if id(module) in seen:
        return
    seen.add(id(module))
    layers.modules[name] = module
    members: dict[type, list[str]] = {}
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        if isinstance(module, nn.ModuleList | nn.Sequential) and _has_parts(child):
            if id(child) not in seen:
                seen.update(map(id, child.modules()))
                layers.modules[full] = child
                layers.blocks.add(full)
                members.setdefault(type(child), []).append(full)
        else:
            _visit(full, child, layers, seen)
    layers.rows.extend(row for row in members.values() if len(row) > 1)


def _has_parts(module: nn.Module) -> bool:
    """Whether it is made of others, as blocks are, and has something to train."""
    return _any(module.children()) and _any(module.parameters())


def _any(items: Iterable[object]) -> bool:
    return next(iter(items), None) is not None
