"""A model that is as it was after it has run: see memscale.verify."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memscale.verify.compare import difference, on_host

__all__ = ["State", "random_states", "unchanged"]

# What nn.Module keeps in itself. Hooks are nobody's state: a step does not add any; an
# executor that detaches itself, because no plan fits, is gone.
_OWN = (frozenset(vars(nn.Module())) - {"training"}) | {"_memscale_executor"}
_REGISTERED = ("_parameters", "_buffers", "_modules")
_CONTAINERS = (list, dict, set, deque, OrderedDict)


@contextmanager
def unchanged(*roots: nn.Module) -> Iterator[State]:
    """Whatever runs inside, the modules are as before after it, to the bit.

    Parameters, buffers and other tensors in attributes, gradients, training modes,
    plain attributes, lists and dicts in them, generators. Random states of the
    process: see same_randomness. Inside, parameters have no gradient, and hooks that
    run when a gradient is ready (an optimizer's, perhaps) do not run.
    """
    state = State(roots)
    try:
        state.begin()
        yield state
    finally:
        state.end()


class State:
    """The values of modules at one time."""

    def __init__(self, roots: tuple[nn.Module, ...]) -> None:
        modules = {id(m): m for root in roots for m in root.modules()}.values()
        self._attributes = [_Attributes(module) for module in modules]
        self._tensors = [_Value(tensor) for tensor in _tensors_of(list(modules))]
        self._by_id = {id(value.tensor): value for value in self._tensors}
        self._generators = [
            (value, value.get_state())
            for module in modules
            for value in vars(module).values()
            if isinstance(value, torch.Generator)
        ]

    def begin(self) -> None:
        for value in self._tensors:
            value.begin()

    def reset(self) -> None:
        """As at first, and ready for another run."""
        for attributes in self._attributes:
            attributes.restore()
        for generator, state in self._generators:
            generator.set_state(state)
        for value in self._tensors:
            value.restore()

    def end(self) -> None:
        self.reset()
        for value in self._tensors:
            value.end()

    def was(self, tensor: torch.Tensor) -> torch.Tensor:
        """The value that ``tensor``, a parameter or a buffer, had; on the host."""
        return self._by_id[id(tensor)].before


class _Attributes:
    """What one module has beside its tensors."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._values = {k: v for k, v in vars(module).items() if k not in _OWN}
        self._registered = {k: dict(vars(module)[k]) for k in _REGISTERED}
        self._contents = [
            (value, copy.copy(value))
            for value in self._values.values()
            if type(value) in _CONTAINERS
        ]

    def restore(self) -> None:
        now = vars(self._module)
        for name in [k for k in now if k not in _OWN and k not in self._values]:
            del now[name]
        now.update(self._values)
        for name, held in self._registered.items():
            if not _same_items(now[name], held):
                now[name].clear()
                now[name].update(held)
        for container, held in self._contents:
            _refill(container, held)


def _same_items(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return list(a) == list(b) and all(a[name] is b[name] for name in a)


def _refill(container: Any, held: Any) -> None:
    """Its contents of before, in the same object."""
    container.clear()
    fill: Callable[[Any], None] = getattr(container, "update", None) or container.extend
    fill(held)


class _Value:
    """One tensor: its numbers, its gradient and the hooks of that."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.before = on_host(tensor)
        self._alias, self._place = tensor.data, _place_of(tensor)
        self._requires_grad = tensor.requires_grad
        self._gradient = tensor.grad if tensor.is_leaf else None
        self._hooks: dict[Any, Any] = dict(self._ready_hooks() or {})

    def begin(self) -> None:
        hooks = self._ready_hooks()
        if hooks:
            hooks.clear()
        if self.tensor.is_leaf:
            self.tensor.grad = None

    def restore(self) -> None:
        tensor, before = self.tensor, self.before
        if _place_of(tensor) != self._place:  # a model may say tensor.data = …
            tensor.data = self._alias
        if difference(before, tensor) is not None:
            with torch.no_grad():
                tensor.copy_(before)
        if tensor.is_leaf:
            tensor.requires_grad_(self._requires_grad)
            tensor.grad = None

    def end(self) -> None:
        if self.tensor.is_leaf:
            self.tensor.grad = self._gradient
        hooks = self._ready_hooks()
        if hooks is not None:
            hooks.update(self._hooks)

    def _ready_hooks(self) -> dict[Any, Any] | None:
        hooks: dict[Any, Any] | None = self.tensor._post_accumulate_grad_hooks
        return hooks


def _place_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Where its numbers are, and how they lie there."""
    if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
        return None
    place = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.dtype)
    return (*place, tensor.shape, tensor.stride())


def _tensors_of(modules: list[nn.Module]) -> list[torch.Tensor]:
    """Parameters, buffers and what is held in plain attributes, each once."""
    found: dict[int, torch.Tensor] = {}
    for module in modules:
        held = [*module._parameters.values(), *module._buffers.values()]
        held += vars(module).values()
        for tensor in held:
            if isinstance(tensor, torch.Tensor):
                found.setdefault(id(tensor), tensor)
    return list(found.values())


def random_states() -> dict[str, torch.Tensor]:
    """torch's random states, by device."""
    states = {"random state of cpu": torch.get_rng_state()}
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return states
    module = torch.get_device_module(accelerator)
    if module.is_initialized():
        for index in range(torch.accelerator.device_count()):
            device = torch.device(accelerator.type, index)
            states[f"random state of {device}"] = module.get_rng_state(device)
    return states
