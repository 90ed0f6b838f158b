"""What torch and Hugging Face do otherwise on seeing fakes, and must not in a trace."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils import _pytree as pytree

from memscale.trace.fake_tensors import CannotTrace, KnownIntegersMode

__all__ = [
    "fakes_are_numbers",
    "fakes_are_pooled_as_real",
    "fakes_pass_for_real",
    "fakes_stay_where_they_are",
    "quiet_fakes",
]


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """torch logs a traceback for each error that we raise anyway."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled


@contextmanager
def fakes_pass_for_real() -> Iterator[None]:
    """Hugging Face's models take another way when they see a fake tensor.

    They do so because a fake one has no values to look at; ours have.
    """
    try:
        from transformers.utils import import_utils
    except ImportError:
        yield
        return
    if not hasattr(import_utils, "is_fake_tensor"):
        yield
        return
    original = import_utils.is_fake_tensor
    import_utils.is_fake_tensor = lambda x: False
    try:
        yield
    finally:
        import_utils.is_fake_tensor = original


@contextmanager
def fakes_stay_where_they_are() -> Iterator[None]:
    """``module.to(dtype)`` in forward: torch cannot swap fakes that are in use.

    Mostly there is nothing to be done. Where there is, the step is unlike the next.
    """
    original = nn.Module._apply

    def apply(module: nn.Module, fn: Callable[..., Any], recurse: bool = True) -> Any:
        if not any(isinstance(p, FakeTensor) for p in module._parameters.values()):
            return original(module, fn, recurse)  # type: ignore[no-untyped-call]
        for child in module.children() if recurse else ():
            child._apply(fn)  # type: ignore[no-untyped-call]
        for name, tensor in module._parameters.items():
            if tensor is None:
                continue
            with torch.no_grad():
                made = fn(tensor)
            if (made.dtype, made.device) != (tensor.dtype, tensor.device):
                raise CannotTrace(
                    f"its forward makes parameter {name!r} {made.dtype} on "
                    f"{made.device}"
                )
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fn(buffer)
        return module

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


@contextmanager
def fakes_are_numbers() -> Iterator[None]:
    """``torch.tensor([a, b])`` of tensors: torch reads the memory that fakes lack."""
    original = torch.tensor

    def make(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(data, list | tuple):
            data = pytree.tree_map_only(FakeTensor, torch.Tensor.item, data)
        return original(data, *args, **kwargs)

    torch.tensor = make
    try:
        yield
    finally:
        torch.tensor = original


@contextmanager
def fakes_are_pooled_as_real(mode: KnownIntegersMode) -> Iterator[None]:
    """``torch.max_pool1d`` on the CPU fills new memory where no gradient is wanted.

    For tensors of subclasses it calls a pooling with indices, as for gradients.
    """
    original = torch.max_pool1d

    def pool(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if (
            not isinstance(input, FakeTensor)
            or input.device.type != "cpu"
            or (input.requires_grad and torch.is_grad_enabled())
        ):
            return original(input, *args, **kwargs)
        with unset_fake_temporarily():  # a recorder leaves meta tensors out
            meta = torch.empty(input.shape, dtype=input.dtype, device="meta")
            shape = original(meta, *args, **kwargs).shape
        result = torch.empty(shape, dtype=input.dtype, device=input.device)
        mode.know_results(
            result, torch.ops.aten.max_pool1d.default, (input, *args), kwargs
        )
        return result

    torch.max_pool1d = pool
    try:
        yield
    finally:
        torch.max_pool1d = original
