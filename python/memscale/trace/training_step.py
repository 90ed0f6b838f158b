"""One training step: what is estimated, planned, explained and verified."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memscale import hardware, simdev
from memscale._C import HardwareError, InputError, TraceError
from memscale.model.inputs import Call, LossFn, build_call, read_call
from memscale.trace.optimizer_step import OptimizerLike, describe_optimizer

__all__ = ["DEFAULT_BATCH", "DEFAULT_LENGTH", "Device", "TrainingStep", "find_target"]

Device = torch.device | str | hardware.DeviceSpec | None

# Used where no sample is given and the model says what it takes.
DEFAULT_BATCH = 1
DEFAULT_LENGTH = 128


@dataclass(frozen=True)
class TrainingStep:
    """A model, what it is called with, its loss, its optimizer, and where it runs."""

    model: nn.Module
    call: Call
    optimizer: OptimizerLike
    loss_fn: LossFn | None
    device: torch.device  # whose tensors are traced
    target: str  # what to call that: "cuda:0", "RTX 3090"
    # The card to plan for, if it was named; None: what ``device`` is.
    card: hardware.DeviceSpec | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        sample_input: Any = None,
        optimizer: OptimizerLike = "adamw",
        loss_fn: LossFn | None = None,
        device: Device = None,
        *,
        batch: int = DEFAULT_BATCH,
        length: int = DEFAULT_LENGTH,
    ) -> TrainingStep:
        """From what users pass: see memscale.estimate. Checks all of it."""
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"model must be a torch.nn.Module, got {type(model).__name__}"
            )
        if isinstance(model, torch.jit.ScriptModule):
            raise TraceError("a scripted module cannot be traced: pass the original")
        # What torch.compile made of it (asking for its class would import dynamo):
        # the module inside is traced; what compiling saves beyond that is not known.
        model = getattr(model, "_orig_mod", model)
        if loss_fn is not None and not callable(loss_fn):
            raise InputError(f"loss_fn must be callable, got {loss_fn!r}")
        for name, value in (("batch", batch), ("length", length)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name} must be a positive integer, got {value!r}")
        describe_optimizer(optimizer)  # a bad name is the first error
        where, name = find_target(model, device)
        if sample_input is None:
            call = build_call(model, batch, length)
        else:
            call = read_call(sample_input, loss_fn)
        return cls(model, call, optimizer, loss_fn, where, name, _card(device))

    @classmethod
    def of_call(
        cls,
        model: nn.Module,
        call: Call,
        optimizer: OptimizerLike,
        loss_fn: LossFn | None = None,
    ) -> TrainingStep:
        """Of a call that is about to be made, where the model is."""
        where, name = find_target(model, None)
        return cls(model, call, optimizer, loss_fn, where, name)


def find_target(model: nn.Module, device: Device) -> tuple[torch.device, str]:
    """The device whose tensors to trace, and what to call it."""
    if device is None:
        found = _device_of(model)
        return found, str(found)
    if isinstance(device, hardware.DeviceSpec):
        return _stand_in_device(), device.name
    try:
        found = torch.device(device)
    except RuntimeError:
        if device == "sim":
            return simdev.enable(), "sim"
        return _stand_in_device(), hardware.find(str(device)).name
    if found.type == "meta":
        raise InputError("device must be one that computes, got meta")
    if found.type == "cpu":
        return found, str(device)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != found.type:
        raise HardwareError(
            f"device must be one that torch has here, got {found}; a card that is "
            'not here goes by its name, "RTX 3090"'
        )
    return torch.device(found.type, found.index or 0), str(device)


def _device_of(model: nn.Module) -> torch.device:
    devices = {p.device for p in model.parameters()} or {
        b.device for b in model.buffers()
    }
    real = {device for device in devices if device.type != "meta"}
    if len(real) > 1:
        raise TraceError(
            "the model must be on one device, got "
            + " and ".join(sorted(map(str, real)))
            + "; pass device= to estimate it on one"
        )
    if real:
        return real.pop()
    accelerator = torch.accelerator.current_accelerator()
    if devices and accelerator is not None:
        return torch.device(accelerator.type, 0)
    return torch.device("cpu")


def _stand_in_device() -> torch.device:
    """For cards: real CUDA tensors where there are any, else the simulated device."""
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if hasattr(torch, "sim"):
        return torch.device("sim", 0)
    return simdev.enable()


def _card(device: Device) -> hardware.DeviceSpec | None:
    """The card that was named; None: what the trace is made for is here."""
    if isinstance(device, hardware.DeviceSpec):
        return device
    if isinstance(device, str):
        try:
            torch.device(device)
        except RuntimeError:
            return None if device == "sim" else hardware.find(device)
    return None
