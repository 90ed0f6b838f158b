"""What a recorder is told beside the ops it sees, in traced steps and in real ones."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memscale._C import Recorder, SaveHandle, Trace
from memscale.model.inputs import tensors_in
from memscale.model.layers import Layers

__all__ = [
    "add_residents",
    "mark_gradients",
    "mark_returned",
    "tell_uncounted_ops",
    "unpack",
]

_log = logging.getLogger("memscale")

# The unpack hook of what Recorder.save packs.
unpack = SaveHandle.unpack


def add_residents(
    model: nn.Module, layers: Layers, recorder: Recorder
) -> dict[str, int]:
    """Tell the recorder of layers and their parameters; the layers' numbers."""
    ids = {name: recorder.add_layer(name) for name in layers.modules}
    for name, module in layers.modules.items():
        # A block's member owns all that is in it, others only what is their own.
        recurse = name in layers.blocks
        for parameter in module.parameters(recurse=recurse):
            for tensor in _inner_tensors(parameter):
                recorder.add_resident(tensor, "parameters", ids[name])
        for buffer in module.buffers(recurse=recurse):
            recorder.add_resident(buffer, "buffers", ids[name])
    return ids


def _inner_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that hold the bytes: of a weight that wraps others, those inside."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from _inner_tensors(getattr(tensor, name))


def mark_gradients(recorder: Recorder, parameters: Iterable[torch.Tensor]) -> None:
    for parameter in parameters:
        if parameter.grad is None:
            continue
        recorder.set_category(parameter.grad, "gradients")
        if parameter.grad.layout is not torch.strided:
            recorder.add_note("sparse gradients are not counted")


def mark_returned(recorder: Recorder, output: Any) -> None:
    """Tell the recorder what the model, which is the first layer, returns."""
    for tensor in tensors_in(output):
        recorder.set_returned(tensor)


def tell_uncounted_ops(trace: Trace) -> Trace:
    """Log the expensive ops whose flops nobody knows, each once; the trace."""
    for name in trace.uncounted_ops:
        _tell_uncounted(name)
    return trace


@functools.cache
def _tell_uncounted(name: str) -> None:
    _log.warning(
        "nobody knows how many flops %s takes: it is counted as one for each element, "
        "so that predicted times and what a plan recomputes may be off",
        name,
    )
