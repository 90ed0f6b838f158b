"""What a shell of a model is made of: fake tensors, and such hooks as it keeps.

A shell has the same modules and code. Nothing of the original is shared that a forward
could write to: modules and their attributes are deep copies (see
memscale.trace.copies), and every tensor is a fake one on the target device.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from memscale._C import TraceError
from memscale.trace.copies import DeepCopies
from memscale.trace.fake_tensors import KnownIntegersMode

__all__ = ["DeepCopies", "Faker", "keeps_hook", "without_hooks_of_users"]


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


def keeps_hook(hook: Any) -> bool:
    """Whether a shell that this thread makes has this hook."""
    if not getattr(_of_thread, "without_hooks", False):
        return True
    code = getattr(hook, "func", hook)  # of a partial
    module = getattr(code, "__module__", None) or type(code).__module__
    return module.partition(".")[0] in _LIBRARIES
