"""Which layers of a list are equal: parts, shapes, settings and code."""

from __future__ import annotations

import dis
import functools
import types
import weakref
from typing import Any

import torch
from torch import nn

__all__ = ["PLAIN", "equal_groups"]

# Compared by value.
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)

# Compared part by part, or nothing of the forward's.
_STRUCTURE = {
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "forward",
}
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def equal_groups(layers: list[nn.Module]) -> list[list[int]]:
    """The layers, by index, grouped by equal parts, shapes and settings.

    Integers that count the layers (``layer_idx``) may differ. A layer with hooks, or
    one that shares a parameter with another, is in no group.
    """
    shared = _shared_tensors(layers)
    groups: list[tuple[Any, list[int]]] = []
    for index, layer in enumerate(layers):
        parts = _parts(layer)
        if parts is None or any(
            id(t) in shared for t in [*layer.parameters(), *layer.buffers()]
        ):
            continue
        for first, members in groups:
            if _alike(first, members[0], parts, index):
                members.append(index)
                break
        else:
            groups.append((parts, [index]))
    return [members for _, members in groups]


def _shared_tensors(layers: list[nn.Module]) -> set[int]:
    seen: set[int] = set()
    shared: set[int] = set()
    for layer in layers:
        ids = {id(tensor) for tensor in [*layer.parameters(), *layer.buffers()]}
        shared |= ids & seen
        seen |= ids
    return shared


def _parts(layer: nn.Module) -> Any:
    parts = []
    for name, module in layer.named_modules():
        if any(getattr(module, hooks, None) for hooks in _HOOKS):
            return None
        tensors = [
            (key, tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)
            for key, tensor in [*module._parameters.items(), *module._buffers.items()]
            if tensor is not None
        ]
        settings = {k: v for k, v in vars(module).items() if k not in _STRUCTURE}
        parts.append((name, type(module), tensors, settings))
    return parts


def _alike(a: Any, a_index: int, b: Any, b_index: int) -> bool:
    def same(code: tuple[Any, ...], key: str, x: Any, y: Any) -> bool:
        if x is y or (type(x) is type(y) and isinstance(x, PLAIN) and x == y):
            return True
        if type(x) is int and type(y) is int and (x, y) == (a_index, b_index):
            return not any(_decides(each, key) for each in code)
        if isinstance(x, nn.Module) and isinstance(y, nn.Module):
            return True
        is_known = isinstance(x, torch.Tensor | weakref.ref | tuple | list | set | dict)
        return is_known and _same_value(x, y)

    return len(a) == len(b) and all(
        x[:3] == y[:3]
        and x[3].keys() == y[3].keys()
        and all(same(_code(x), key, x[3][key], y[3][key]) for key in x[3])
        for x, y in zip(a, b, strict=True)
    )


def _same_value(x: Any, y: Any) -> bool:
    """Whether two settings are equal, tensors in them by their geometry alone."""
    if x is y:
        return True
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        return (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
    if type(x) is not type(y):
        return False
    if isinstance(x, weakref.ref):  # recurrent layers keep such of their weights
        return _same_value(x(), y())
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(_same_value(x[key], y[key]) for key in x)
    if isinstance(x, tuple | list):
        return len(x) == len(y) and all(map(_same_value, x, y))
    try:
        return bool(x == y)
    except Exception:  # arrays of numpy, objects of the user's own
        return False


def _code(part: Any) -> tuple[Any, ...]:
    """What a module runs: its class's forward, and functions that it holds."""
    _, kind, _, settings = part
    held = [v for v in settings.values() if isinstance(v, types.FunctionType)]
    return (getattr(kind, "forward", None), *held)


@functools.cache
def _decides(function: Any, key: str) -> bool:
    """Whether the function compares the attribute or computes with it.

    Read from its bytecode: an index that is only passed on (to a cache) does not
    make a layer differ from its neighbours; one that is tested may.
    """
    code = getattr(function, "__code__", None)
    if code is None:
        return True
    loaded = False
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if name.startswith("LOAD_") and instruction.argval == key:
            loaded = True
        elif loaded and name in _DECIDING:
            return True
        elif not name.startswith(("LOAD_", "CACHE")):
            loaded = False  # passed on, stored: no decision of this line
    return False


_DECIDING = {"COMPARE_OP", "CONTAINS_OP", "BINARY_OP", "IS_OP"}
