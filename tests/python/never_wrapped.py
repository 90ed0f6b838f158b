"""Whether a model is as one that was never wrapped: all of it, recursively."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["assert_as_never_wrapped"]

_ATOMS = (
    *(bool, int, float, complex, str, bytes, type(None), type, range, slice),
    *(torch.dtype, torch.device, torch.Size, types.BuiltinFunctionType),
)


def assert_as_never_wrapped(model: Any, twin: Any) -> None:
    """Compare every attribute, hook, flag, class and value with the twin's."""
    _Comparison().compare("model", model, twin)


class _Comparison:
    def __init__(self) -> None:
        self._seen: set[tuple[int, int]] = set()
        self._alive: list[Any] = []  # ids stay theirs

    def compare(self, path: str, a: Any, b: Any) -> None:
        assert _same_class(type(a), type(b)), f"{path}: {type(a)} and {type(b)}"
        if a is b:
            return
        key = (id(a), id(b))
        if key in self._seen:
            return
        self._seen.add(key)
        self._alive += [a, b]
        if isinstance(a, torch.Tensor):
            self._tensors(path, a, b)
        elif isinstance(a, _ATOMS):
            assert a == b or a != a, f"{path}: {a!r} and {b!r}"
        elif isinstance(a, types.FunctionType):
            assert a.__code__ is b.__code__, f"{path}: {a} and {b}"
        elif isinstance(a, types.MethodType):
            self.compare(f"{path}.__func__", a.__func__, b.__func__)
            self.compare(f"{path}.__self__", a.__self__, b.__self__)
        elif isinstance(a, functools.partial):
            parts = (a.func, a.args, a.keywords)
            self.compare(path, parts, (b.func, b.args, b.keywords))
        elif isinstance(a, Mapping) and isinstance(a, dict):
            self._dicts(path, a, b)
        elif isinstance(a, list | tuple):
            assert len(a) == len(b), f"{path}: {a} and {b}"
            for i, (x, y) in enumerate(zip(a, b, strict=True)):
                self.compare(f"{path}[{i}]", x, y)
        elif isinstance(a, set | frozenset):
            assert len(a) == len(b), f"{path}: {a} and {b}"
        else:
            self._objects(path, a, b)

    def _objects(self, path: str, a: Any, b: Any) -> None:
        if not hasattr(a, "__dict__") or isinstance(a, RemovableHandle):
            return  # nothing that could have been attached to; a number of its own
        self._dicts(path, vars(a), vars(b))
        if isinstance(a, nn.Module):
            # Found by the class, not only in __dict__.
            self.compare(f"{path}.forward", a.forward, b.forward)
            assert list(a.state_dict()) == list(b.state_dict()), path

    def _dicts(self, path: str, a: dict[Any, Any], b: dict[Any, Any]) -> None:
        if path.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
            # Keys are numbers of handles: each registration has its own.
            self.compare(f"{path}.values()", list(a.values()), list(b.values()))
            return
        if all(isinstance(key, str | int | None) for key in a):
            assert list(a) == list(b), f"{path}: {list(a)} and {list(b)}"
            for key in a:
                self.compare(f"{path}.{key}", a[key], b[key])
        else:
            assert len(a) == len(b), path

    def _tensors(self, path: str, a: torch.Tensor, b: torch.Tensor) -> None:
        for what in ("dtype", "device", "shape", "requires_grad", "layout", "is_leaf"):
            assert getattr(a, what) == getattr(b, what), f"{path}.{what}"
        if a.layout is torch.strided and not a.is_meta:
            assert a.stride() == b.stride(), path
            assert torch.equal(a.detach(), b.detach()) or a.isnan().any(), path
        if a.is_leaf:
            self.compare(f"{path}.grad", a.grad, b.grad)
        for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            x, y = getattr(a, hooks, None), getattr(b, hooks, None)
            assert len(x or ()) == len(y or ()), f"{path}.{hooks}"
        self._dicts(f"{path}.__dict__", vars(a), vars(b))


def _same_class(a: type, b: type) -> bool:
    """Parametrisations of torch make a class for each module."""
    made = "torch.nn.utils.parametrize"
    if a.__module__ == b.__module__ == made and a.__name__.startswith("Parametrized"):
        return a.__name__ == b.__name__ and a.__bases__ == b.__bases__
    return a is b
