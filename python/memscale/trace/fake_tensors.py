"""Fake tensors that know their integers.

A fake tensor has a shape and a device but no values, so code that looks at
values cannot be traced with it. Most such code looks at small integers: is this
mask all ones, how long is the longest sequence. Here integer and boolean tensors
(and floats that are made from nothing else, such as a mask of ones) carry their
values along, computed beside the fake ones on the CPU. What depends on activations
or parameters is unknown and raises torch's own error.

One assumption: a single uniform random number is taken to be 0.5. Models draw one
to skip a layer now and then (layer drop); the trace is of the step that skips none,
and ``skips_by_chance`` says that it was so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils import _pytree as pytree

from memscale._C import TraceError

__all__ = ["DATA_DEPENDENT_ERRORS", "CannotTrace", "KnownIntegersMode"]

_aten = torch.ops.aten

# Values are for masks, ids and positions; a larger tensor goes on without.
_MAX_INTEGERS = 1 << 22
_MAX_FLOATS = 1 << 16

_INTEGRAL = frozenset(
    {torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8}
)

# Their integers are whatever memory held.
_UNINITIALISED = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.empty_strided.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
        _aten.resize_.default,
        _aten.set_.source_Storage_storage_offset,
    }
)

_CONVOLUTIONS = frozenset(
    {_aten.convolution.default, _aten.convolution_backward.default}
)

# torch's cache of fake results makes two tensors of one that is returned twice, so
# that a first trace would differ from a second.
_RETURNS_ONE_TENSOR_TWICE = frozenset({_aten.mkldnn_rnn_layer_backward.default})

# The CPU's kernels for batches that are normalised lay out their first result as this
# argument suggests, dense; their fakes keep its strides. The sim runs the CPU's.
_LAID_OUT_AS = {
    _aten.native_batch_norm.default: 0,
    _aten._native_batch_norm_legit.default: 0,
    _aten._native_batch_norm_legit.no_stats: 0,
    _aten._native_batch_norm_legit_functional.default: 0,
    _aten._batch_norm_with_update.default: 0,
    _aten.native_batch_norm_backward.default: 1,
    _aten.batch_norm_backward.default: 1,
}

_COMPARISONS = frozenset(
    getattr(getattr(_aten, name), overload)
    for name in ("lt", "le", "gt", "ge")
    for overload in ("Scalar", "Tensor")
)

# What torch raises when a value decides and there is none.
DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)


class CannotTrace(TraceError):
    """Fake tensors do not suffice for this model: it must be recorded for real."""


class KnownIntegersMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A FakeTensorMode in which integer tensors may have known values."""

    def __init__(self) -> None:
        # Real tensors come from caches of libraries: they are read as what they are,
        # there before the step. What is written into one goes into a fake.
        super().__init__(allow_non_fake_inputs=True)  # type: ignore[no-untyped-call]
        # An error, where torch would give 0: a kernel in C would write there.
        self._allow_unsafe_data_ptr_access = False

    def know(self, fake: FakeTensor, value: torch.Tensor) -> FakeTensor:
        """Give ``fake`` the values of ``value`` (a CPU tensor that nobody writes)."""
        if _is_followed(value):
            fake._memscale_value = value  # type: ignore[attr-defined]
        return fake

    def empty(
        self,
        shape: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> FakeTensor:
        """torch.empty_strided in this mode, without the way through it."""
        with unset_fake_temporarily():
            meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            return FakeTensor(self, meta, device)

    # Whether .item() of an unknown value is 1 (False for a bool) rather than an
    # error. On while an optimizer steps: it may read a norm to scale by or a
    # tolerance to stop at; what it allocates does not depend on them.
    assume_values = False

    # Whether a random number was compared that would have decided otherwise, had it
    # not been taken to be 0.5.
    skips_by_chance = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default:
            value = _value_of(args[0])
            if value is not None:
                return value.item()
            if self.assume_values:
                return False if args[0].dtype is torch.bool else 1
        if func in _CONVOLUTIONS and args[0].device.type == "sim":
            return self._convolution_on_sim(func, types, args, kwargs)
        if func is _aten._grouped_mm.default:
            with self:
                return _grouped_mm(*args, **kwargs)
        if func is _aten.index.Tensor:
            args = (args[0], [self._as_positions(index) for index in args[1]])
            args = (args[0], [index for some in args[1] for index in some])
        try:
            with self._cache_unless(func in _RETURNS_ONE_TENSOR_TWICE):
                result = super().__torch_dispatch__(func, types, args, kwargs)
        except DATA_DEPENDENT_ERRORS:
            known = _compute(func, args, kwargs)
            if known is None:
                raise
            device = next(a.device for a in args if isinstance(a, FakeTensor))
            return pytree.tree_map_only(
                torch.Tensor, lambda value: self._fake_of(value, device), known
            )
        if func in _LAID_OUT_AS:
            result = self._laid_out(result, args[_LAID_OUT_AS[func]])
        if func in _COMPARISONS and not self.skips_by_chance:
            self.skips_by_chance = _is_chance(func, args)
        if func._schema.is_mutable:
            _follow_writes(func, args, kwargs)
        else:
            self.know_results(result, func, args, kwargs)
        return result

    def _convolution_on_sim(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """As on the CPU, whose kernels it runs: they choose the results' layout."""

        def moved(tree: Any, device: torch.device) -> Any:
            return pytree.tree_map_only(
                FakeTensor,
                lambda t: self.empty(t.shape, t.stride(), t.dtype, device),
                tree,
            )

        device = args[0].device
        host_args, host_kwargs = moved((args, kwargs), torch.device("cpu"))
        result = super().__torch_dispatch__(func, types, host_args, host_kwargs)
        return moved(result, device)

    def _laid_out(self, results: Any, like: torch.Tensor) -> Any:
        first = results[0]
        if first is None or like.device.type not in ("cpu", "sim"):
            return results
        # Where sides of 1 leave it open, batch norm takes it for contiguous.
        layout = (
            torch.contiguous_format
            if like.is_contiguous()
            else suggest_memory_format(like)
        )
        with unset_fake_temporarily():
            stride = torch.empty(
                first.shape, device="meta", memory_format=layout
            ).stride()
        dense = self.empty(first.shape, stride, first.dtype, first.device)
        return (dense, *results[1:])

    def know_results(self, result: Any, func: Any, args: Any, kwargs: Any) -> None:
        """Give results of ``func`` their values, if its arguments have theirs."""
        several = isinstance(result, tuple | list)
        results = result if several else [result]
        followed = [isinstance(r, FakeTensor) and _is_followed(r) for r in results]
        if not any(followed):
            return
        known = _compute(func, args, kwargs)
        if known is None:
            return
        for fake, value, follow in zip(
            results, known if several else [known], followed, strict=True
        ):
            if follow:
                self.know(fake, value)

    @contextmanager
    def _cache_unless(self, condition: bool) -> Iterator[None]:
        enabled = self.cache_enabled
        self.cache_enabled = enabled and not condition
        try:
            yield
        finally:
            self.cache_enabled = enabled

    def _fake_of(self, value: torch.Tensor, device: torch.device) -> FakeTensor:
        return self.know(
            self.empty(value.shape, value.stride(), value.dtype, device), value
        )

    def _as_positions(self, index: Any) -> list[Any]:
        """A boolean index of known values, as the integer indices it stands for."""
        if not isinstance(index, FakeTensor) or index.dtype is not torch.bool:
            return [index]
        value = _value_of(index)
        if value is None:
            return [index]
        with unset_fake_temporarily():
            positions = value.nonzero(as_tuple=True)
        return [self._fake_of(each, index.device) for each in positions]


def _is_followed(tensor: torch.Tensor) -> bool:
    if tensor.dtype in _INTEGRAL:
        return tensor.numel() <= _MAX_INTEGERS
    return tensor.dtype.is_floating_point and tensor.numel() <= _MAX_FLOATS


def _grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The shape of torch._grouped_mm, whose own fake kernel refuses all but bf16."""
    if a.dim() == 2 and b.dim() == 2:  # groups split the inner dimension
        assert offs is not None
        shape = [offs.numel(), a.shape[0], b.shape[1]]
    elif a.dim() == 2:
        shape = [a.shape[0], b.shape[2]]
    elif b.dim() == 2:
        shape = [a.shape[1], b.shape[1]]
    else:
        shape = [a.shape[0], a.shape[1], b.shape[2]]
    return torch.empty(shape, dtype=out_dtype or a.dtype, device=a.device)


def _value_of(tensor: torch.Tensor) -> torch.Tensor | None:
    if not isinstance(tensor, FakeTensor):  # torch.tensor(3), on its way in
        return tensor if tensor.device.type == "cpu" else None
    value: torch.Tensor | None = getattr(tensor, "_memscale_value", None)
    # A write that we could not follow leaves the storage, and with it all of its
    # views, without values.
    if value is not None and getattr(value.untyped_storage(), "_memscale_stale", False):
        return None
    return value


def _is_chance(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a number between 0 and 1, in place of a drawn 0.5, compares otherwise."""
    values = [_value_of(a) if isinstance(a, torch.Tensor) else a for a in args]
    drawn = any(hasattr(value, "_memscale_drawn") for value in values)
    if not drawn or any(value is None for value in values):
        return False
    with unset_fake_temporarily():
        answers = {
            bool(
                func(
                    *(
                        torch.tensor(number) if hasattr(v, "_memscale_drawn") else v
                        for v in values
                    )
                )
            )
            for number in (0.0, 0.5, 1.0 - 2**-24)
        }
    return len(answers) > 1


def _forget(tensor: Any) -> None:
    if isinstance(tensor, FakeTensor):
        value = _value_of(tensor)
        if value is not None:
            value.untyped_storage()._memscale_stale = True  # type: ignore[attr-defined]


def _follow_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Do the same writes on the values, or give up those that were written."""
    if _compute(func, args, kwargs) is not None:
        return
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for leaf in pytree.tree_leaves(value):
                _forget(leaf)
    for value in kwargs.values():  # out=
        _forget(value)


def _compute(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``func`` on the known values; None if one is missing or they mean nothing."""
    if func is _aten.rand.default and list(args[0]) == []:
        with unset_fake_temporarily():
            drawn = torch.tensor(0.5)
            drawn._memscale_drawn = True  # type: ignore[attr-defined]
            return drawn
    random = torch.Tag.nondeterministic_seeded in func.tags  # type: ignore[attr-defined]
    if random or func in _UNINITIALISED:
        return None
    leaves, spec = pytree.tree_flatten((args, kwargs))
    values: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            value = _value_of(leaf)
            if value is None:
                return None
            values.append(value)
        elif isinstance(leaf, torch.device):
            values.append(torch.device("cpu"))
        else:
            values.append(leaf)
    args, kwargs = pytree.tree_unflatten(values, spec)
    with unset_fake_temporarily():
        try:
            return func(*args, **kwargs)
        except (RuntimeError, IndexError, NotImplementedError):
            return None  # the CPU has no such kernel: go on without values
