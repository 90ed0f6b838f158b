"""A shell of a model: the same modules and code, over fake tensors.

Nothing of the original is shared that a forward could write to: modules and their
attributes are deep copies, and every tensor is a fake one on the target device.
"""

from __future__ import annotations

import copy
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from memscale._C import TraceError
from memscale._fake import KnownIntegersMode

__all__ = ["DeepCopies", "Faker", "make_shell", "without_hooks_of_users"]


class Faker:
    """Makes fakes of tensors on ``device``, keeping apart or together as there."""

    def __init__(self, mode: KnownIntegersMode, device: torch.device) -> None:
        self.mode = mode
        self.device = device
        self._made: dict[int, torch.Tensor] = {}
        self._storages: dict[int, torch.Tensor] = {}
        self._alive: list[torch.Tensor] = []  # ids stay theirs

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake of ``tensor``: the same one each time."""
        fake = self._made.get(id(tensor))
        if fake is None:
            fake = self._make(tensor)
            self._made[id(tensor)] = fake
            self._alive.append(tensor)
        return fake

    def _make(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            raise TraceError(f"tensors of layout {tensor.layout} cannot be traced")
        fake = self._strided(tensor)
        # What nn.Parameter(fake) comes to, without its op.
        fake.requires_grad_(tensor.requires_grad)
        vars(fake).update(vars(tensor), _is_param=isinstance(tensor, nn.Parameter))
        return fake

    def _strided(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        moves = tensor.device != self.device
        whole = storage.nbytes() == tensor.numel() * tensor.itemsize
        base = None if moves else self._storages.get(storage._cdata)
        if base is None and (moves or whole):  # bytes of its own
            stride = tensor.stride()
            if not tensor.is_contiguous():
                # As Module.to moves it: dense strides stay, others become dense.
                stride = torch.empty_like(tensor, device="meta").stride()
            base = self.mode.empty(tensor.shape, stride, tensor.dtype, self.device)
            if not moves:
                self._storages[storage._cdata] = base
            return base
        if base is None:
            numel = storage.nbytes() // tensor.itemsize
            base = self.mode.empty((numel,), (1,), tensor.dtype, self.device)
            self._storages[storage._cdata] = base
        with torch.no_grad(), self.mode:
            return base.as_strided(
                tensor.shape, tensor.stride(), tensor.storage_offset()
            ).detach()


class DeepCopies(TorchFunctionMode):
    """While on, the deep copy of a tensor is what ``change`` makes of it."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.change = change

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            with self:  # nothing in here is a deep copy
                made = self.change(tensor)
            memo[id(tensor)] = made
            return made
        return func(*args, **(kwargs or {}))


def make_shell(model: nn.Module, faker: Faker) -> nn.Module:
    """A copy of ``model`` whose tensors are fakes. Raises TraceError if it cannot."""
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        memo[id(tensor)] = faker.tensor(tensor)
    try:
        with DeepCopies(faker.tensor):
            return _copy_modules(model, memo)
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(
            f"{type(model).__name__} cannot be copied: {type(error).__name__}: {error}"
        ) from error


# Shared, not copied: nothing can write to them, or they are code.
_ATOMS = (
    *(bool, int, float, complex, str, bytes, type(None), type),
    *(types.FunctionType, types.BuiltinFunctionType, torch.dtype, torch.device),
)


# Libraries whose hooks are part of how a model computes (weights made from others,
# adapters), not of what somebody wants to know about it.
_LIBRARIES = {"torch", "transformers", "peft", "accelerate", "diffusers", "timm"}

_of_thread = threading.local()


@contextmanager
def without_hooks_of_users() -> Iterator[None]:
    """Shells that this thread makes within it have hooks of libraries only.

    For traces that nobody asked for: a user's hook must not meet fakes, nor run once
    more than the user's batches.
    """
    _of_thread.without_hooks = True
    try:
        yield
    finally:
        _of_thread.without_hooks = False


def _is_copied(hook: Any) -> bool:
    if not getattr(_of_thread, "without_hooks", False):
        return True
    code = getattr(hook, "func", hook)  # of a partial
    module = getattr(code, "__module__", None) or type(code).__module__
    return module.partition(".")[0] in _LIBRARIES


def _same_hook(hook: Any, memo: dict[int, Any]) -> Any:
    """The user's own hook, which is code; a method of a module goes to its shell."""
    owner = getattr(hook, "__self__", None)
    if isinstance(hook, types.MethodType) and id(owner) in memo:
        return types.MethodType(hook.__func__, memo[id(owner)])
    return hook


def _copy_modules(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """What copy.deepcopy would make, several times faster.

    Modules are the bulk of a model and mostly hold atoms, empty hooks and one
    another; only the rest goes through deepcopy.
    """
    shells: list[tuple[nn.Module, nn.Module]] = []
    for module in model.modules():
        if hasattr(type(module), "__deepcopy__"):
            memo[id(module)] = copy.deepcopy(module, memo)
        else:
            shell = object.__new__(type(module))
            memo[id(module)] = shell
            shells.append((module, shell))
    for module, shell in shells:
        copied = shell.__dict__
        for name, value in vars(module).items():
            if isinstance(value, _ATOMS):
                copied[name] = value
            elif isinstance(value, dict | list | set) and not value:
                copied[name] = type(value)()
            elif name in ("_parameters", "_buffers", "_modules"):
                copied[name] = {
                    key: None if part is None else memo[id(part)]
                    for key, part in value.items()
                }
            elif name.endswith("_hooks") and isinstance(value, dict):
                copied[name] = type(value)(
                    (key, _same_hook(hook, memo))
                    for key, hook in value.items()
                    if _is_copied(hook)
                )
            else:
                copied[name] = copy.deepcopy(value, memo)
    shell_of_model: nn.Module = memo[id(model)]
    return shell_of_model
