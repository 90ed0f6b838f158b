"""Equal layers are traced a few times, not every time (see core/trace/repeat.h).

Of a row of equal layers the first two and the last two are run; a layer between
them is a stand-in that gives tensors of the right shape, and whose ops are copied.
That the copies are right is checked, not assumed: the two ends of a row must have
been traced alike, forward and backward. If not, ``NotRepeatable`` is raised and the
model is traced again without this.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from memscale._C import LayerCall, Recorder, TraceError
from memscale.calls import call_events
from memscale.model.equal_layers import PLAIN, equal_groups
from memscale.trace.fake_tensors import KnownIntegersMode

__all__ = ["SHORTEST_ROW", "NotRepeatable", "Row", "equal_groups", "has_gradient"]

# Two at each end are run: a shorter row has none to stand in for.
SHORTEST_ROW = 5


class NotRepeatable(Exception):
    """Layers that looked equal were not."""


def mark_gradient(parameter: torch.Tensor) -> None:
    """It has a gradient in the trace, though no tensor stands for it."""
    parameter._memscale_has_gradient = True  # type: ignore[attr-defined]


def has_gradient(parameter: torch.Tensor) -> bool:
    return parameter.grad is not None or hasattr(parameter, "_memscale_has_gradient")


class Row:
    """A row of equal layers, while a step is traced."""

    def __init__(
        self,
        recorder: Recorder,
        mode: KnownIntegersMode,
        layers: list[nn.Module],
        ids: list[int],
        places: list[int],
        hooks: Any,
    ) -> None:
        self.recorder = recorder
        self.mode = mode
        self.layers = layers
        self.ids = ids
        self.places = places  # in the list that the layers are in
        self.hooks = hooks  # our saved-tensor hooks, or None
        self.calls: dict[int, LayerCall] = {}
        self.signatures: dict[int, Any] = {}
        self.result: tuple[list[Any], Any] | None = None  # of the second layer
        self.cached: list[_CacheWrites] = []
        self.repeated: list[int] = []
        self.backward_model: LayerCall | None = None

    def _model_index(self) -> int:
        return len(self.layers) - 2

    def call(
        self,
        index: int,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The layer's forward: run, or stood in for."""
        if index in self.calls or index in self.repeated:
            raise NotRepeatable("a layer is called twice")
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        signature = self._signature(leaves, spec)
        if (
            1 < index < self._model_index()
            and self.result is not None
            and signature is not None
            and signature == self.signatures[1]
        ):
            return self._repeat(index, tensors)
        parameters = _tensors_of(self.layers[index])
        call = self.recorder.begin_call(self.ids[index], parameters, tensors)
        output = forward(*args, **kwargs)
        call_events.leave_layer()
        self.recorder.end_call(call)
        self.calls[index] = call
        self.signatures[index] = signature
        if index == 1 and signature is not None:
            self.result = self._describe_result(call, output, tensors)
            self.cached = [
                _CacheWrites(self, call, leaf) for leaf in leaves if _is_cache(leaf)
            ]
        return output

    def _signature(self, leaves: list[Any], spec: Any) -> Any:
        """What must agree for a call to be repeated; None: it cannot be."""
        if self.hooks is not None:
            top = torch._C._autograd._top_saved_tensors_default_hooks(True)
            if top is None or top[0] is not self.hooks[0]:
                return None  # inside a checkpoint: another regime
        parts: list[Any] = [spec, torch.is_grad_enabled(), *_autocast_state()]
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                parts.append(
                    (
                        leaf.shape,
                        leaf.stride(),
                        leaf.dtype,
                        leaf.device,
                        leaf.requires_grad,
                    )
                )
            elif isinstance(leaf, PLAIN):
                parts.append(leaf)
            elif _is_cache(leaf):
                parts.append(id(leaf))
            else:
                return None
        if sum(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves) != 1:
            return None
        return parts

    def _describe_result(
        self, call: LayerCall, output: Any, inputs: list[torch.Tensor]
    ) -> tuple[list[Any], Any] | None:
        leaves, spec = pytree.tree_flatten(output)
        described: list[Any] = []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                if not isinstance(leaf, PLAIN):
                    return None
                described.append(("plain", leaf))
                continue
            same = [i for i, tensor in enumerate(inputs) if tensor is leaf]
            place = self.recorder.place_of(call, leaf)
            if same:
                described.append(("input", same[0]))
            elif place is not None and leaf.storage_offset() == 0:
                described.append(
                    (
                        "made",
                        place,
                        (leaf.shape, leaf.stride(), leaf.dtype, leaf.device),
                        leaf.requires_grad,
                    )
                )
            else:
                return None
        made = [each for each in described if each[0] == "made"]
        if sum(each[3] for each in made) != 1 or len({e[1] for e in made}) != len(made):
            return None
        return described, spec

    def _repeat(self, index: int, tensors: list[torch.Tensor]) -> Any:
        assert self.result is not None
        described, spec = self.result
        recorder = self.recorder
        recorder.pause()
        try:
            call = recorder.repeat_forward(
                self.calls[1],
                self.ids[index],
                _tensors_of(self.layers[index]),
                tensors,
            )
            source = next(tensor for tensor in tensors if tensor.requires_grad)
            outputs = iter(_StandIn.apply(source, self, index, call))  # type: ignore[no-untyped-call]
            for cache in self.cached:
                cache.repeat(call, self.places[index] - self.places[1])
        finally:
            recorder.resume()
        self.repeated.append(index)
        leaves = []
        for each in described:
            if each[0] == "plain":
                leaves.append(each[1])
            elif each[0] == "input":
                leaves.append(tensors[each[1]])
            else:
                leaves.append(next(outputs))
        return pytree.tree_unflatten(leaves, spec)

    def make_outputs(self, call: LayerCall) -> list[tuple[torch.Tensor, bool]]:
        assert self.result is not None
        made: list[tuple[torch.Tensor, bool]] = []
        for each in self.result[0]:
            if each[0] == "made":
                _, place, (shape, stride, dtype, device), needs_grad = each
                tensor = self.mode.empty(shape, stride, dtype, device)
                self.recorder.bind_result(call, place, tensor)
                made.append((tensor, needs_grad))
        return made

    def backward(
        self, index: int, call: LayerCall, gradient: torch.Tensor, source: Any
    ) -> torch.Tensor:
        """Copy the backward of the last layer but one for this one."""
        recorder = self.recorder
        recorder.pause()
        try:
            if self.backward_model is None:
                self.backward_model = self._with_backward(self._model_index())
            recorder.repeat_backward(self.backward_model, call, gradient)
            onwards = self.mode.empty(*source)
            recorder.bind_gradient(call, onwards)
            model = self.layers[self._model_index()]
            for ours, theirs in zip(
                self.layers[index].parameters(), model.parameters(), strict=True
            ):
                if theirs.grad is not None:
                    mark_gradient(ours)
            self.calls[index] = call
        except TraceError as error:
            raise NotRepeatable(str(error)) from error
        finally:
            recorder.resume()
        return onwards

    def _with_backward(self, index: int) -> LayerCall:
        call = self.calls[index]
        gradients = [tensor.grad for tensor in _tensors_of(self.layers[index])]
        self.recorder.find_backward(call, gradients)
        return call

    def check(self) -> None:
        """After backward: raises NotRepeatable if the copies were not right."""
        if not self.repeated:
            return
        last = self._model_index()
        try:
            if self.backward_model is None:
                raise NotRepeatable("repeated layers got no gradient")
            second = self._with_backward(1)
        except TraceError as error:
            raise NotRepeatable(str(error)) from error
        different = self.recorder.difference(second, self.calls[last])
        if different is not None:
            raise NotRepeatable(different)
        for index in self.repeated:
            self.recorder.close_repeat(second, self.calls[index])


class _StandIn(torch.autograd.Function):
    """In the place of a layer: gives its outputs' shapes, and its gradient's."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, source: torch.Tensor, row: Row, index: int, call: LayerCall
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.row, ctx.index, ctx.call = row, index, call
        ctx.source = (source.shape, source.stride(), source.dtype, source.device)
        outputs = row.make_outputs(call)
        ctx.mark_non_differentiable(*(t for t, needs in outputs if not needs))
        return tuple(tensor for tensor, _ in outputs)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, *gradients: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, None, None]:
        given = [gradient for gradient in gradients if gradient is not None]
        if len(given) != 1:
            raise NotRepeatable("a repeated layer gets several gradients")
        onwards = ctx.row.backward(ctx.index, ctx.call, given[0], ctx.source)
        return onwards, None, None, None


def _is_cache(value: Any) -> bool:
    """A key-value cache of Hugging Face's models: an entry for each layer."""
    return type(value).__name__.endswith("Cache") and isinstance(
        getattr(value, "layers", None), list
    )


class _CacheWrites:
    """What a layer put into a cache, to be put there for the layers after it."""

    def __init__(self, row: Row, call: LayerCall, cache: Any) -> None:
        self.row = row
        self.cache = weakref.ref(cache)  # it dies with the model's output
        # Of each entry that was written: its number, and its tensors by attribute.
        self.entries: list[tuple[int, dict[str, tuple[int, Any]]]] = []
        for number, entry in enumerate(cache.layers):
            written = {}
            for name, value in vars(entry).items():
                if isinstance(value, torch.Tensor) and value.numel():
                    place = row.recorder.place_of(call, value)
                    if place is not None:
                        metadata = (value.shape, value.stride(), value.dtype)
                        written[name] = (place, (*metadata, value.device))
            if written:
                self.entries.append((number, written))

    def repeat(self, call: LayerCall, distance: int) -> None:
        cache = self.cache()
        assert cache is not None  # an argument of the call
        layers = cache.layers
        for number, written in self.entries:
            entry = copy.copy(layers[number])
            for name, (place, metadata) in written.items():
                tensor = self.row.mode.empty(*metadata)
                self.row.recorder.bind_result(call, place, tensor)
                setattr(entry, name, tensor)
            while len(layers) <= number + distance:
                layers.append(entry)
            layers[number + distance] = entry


def _tensors_of(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _autocast_state() -> tuple[Any, ...]:
    return (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled())
