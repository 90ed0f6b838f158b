"""What DistributedDataParallel holds for gradients: its reducer's buckets."""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch
from torch import nn

from memscale._C import Recorder

__all__ = ["Buckets", "find_buckets"]


class Buckets:
    """The buckets of one DistributedDataParallel, which live as long as it does.

    They are as large as all gradients that it reduces. Each gradient is copied into
    its place there as it arrives. With ``gradient_as_bucket_view`` that place is then
    the parameter's gradient, and what autograd made is let go.
    """

    def __init__(self, parallel: Any) -> None:
        self.are_gradients: bool = parallel.gradient_as_bucket_view
        ignored = set(getattr(parallel, "parameters_to_ignore", ()))
        self._parameters = [
            parameter
            for name, parameter in parallel.module.named_parameters()
            if parameter.requires_grad and name not in ignored
        ]

    @property
    def num_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self._parameters)

    def add_to(
        self, recorder: Recorder, fake_of: dict[nn.Parameter, torch.Tensor]
    ) -> None:
        """Tell the recorder of them; ``fake_of`` has the parameters of the step."""
        for parameter in self._parameters:
            fake = fake_of.get(parameter)
            if fake is None:
                continue
            place = torch.empty_like(fake, requires_grad=False)
            recorder.add_resident(place, "buffers")
            if self.are_gradients:
                fake.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    _Moved(place)
                )
        recorder.add_note(
            "DistributedDataParallel's buckets, as large as all gradients, are held "
            "beside them"
            if not self.are_gradients
            else "the gradients are views of DistributedDataParallel's buckets, which "
            "are always held"
        )


class _Moved:
    """A hook: the gradient that has arrived is copied to where it stays."""

    def __init__(self, place: torch.Tensor) -> None:
        self.place = place

    def __call__(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self.place.copy_(parameter.grad)
        parameter.grad = self.place


def find_buckets(model: nn.Module) -> Buckets | None:
    """Those of ``model``, or of what it is the module of; None: it is not parallel."""
    module = sys.modules.get("torch.nn.parallel.distributed")
    distributed = torch.distributed  # without much in it where torch was built so
    if module is None or not distributed.is_available():
        return None
    if not distributed.is_initialized():
        return None
    kind = module.DistributedDataParallel
    if isinstance(model, kind):
        return Buckets(model)
    # It knows the model, but the model does not know it.
    for each in gc.get_objects():
        if issubclass(type(each), kind) and getattr(each, "module", None) is model:
            return Buckets(each)
    return None
