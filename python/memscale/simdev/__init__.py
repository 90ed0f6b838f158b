"""The simulated accelerator: a real torch device backed by host memory.

``enable(memory="8GiB")`` loads it and returns ``torch.device("sim", 0)``. Tensors
and modules move there with ``.to("sim")``; kernels are the CPU's, memory is
limited to the capacity, and too large an allocation raises
``torch.OutOfMemoryError``. It shows how many bytes a training step holds on a
card, not how fast a card is.
"""

from __future__ import annotations

import atexit

import torch
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend

from memscale import _C

__all__ = ["enable"]


def enable(memory: int | str = "8GiB") -> torch.device:
    """Load the simulated device and return ``torch.device("sim", 0)``.

    ``memory`` is its capacity: a number of bytes or text such as ``"8GiB"``.
    Calling it again resizes the device, which must hold no tensor then; with the
    same size it does nothing. Once loaded, the device is torch's current
    accelerator until the process ends.
    """
    try:
        capacity = _C.parse_bytes(memory)
    except _C.ParseError as error:
        raise _C.ParseError(f"memory: {error}") from None
    # Loading is what registers the device: not before someone asks for it.
    from memscale import _simdev

    _simdev.set_capacity(capacity)
    if not hasattr(torch, "sim"):
        _simdev.register_device()
        from memscale.simdev import torch_module

        torch._register_device_module("sim", torch_module)  # type: ignore[no-untyped-call]
        generate_methods_for_privateuse1_backend(for_storage=True)
        # As if the seed set so far had been set with the device loaded.
        torch_module.manual_seed(torch.initial_seed())
        atexit.register(_simdev.wait_for_backward)
    return torch.device("sim", 0)
