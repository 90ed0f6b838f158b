"""What ``wrap`` takes: a model, or something that trains one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from memscale._C import InputError, has_other_classes
from memscale.calls.way_in import is_compiled

__all__ = ["ShardingCheck", "check_model", "find_model", "innermost", "is_compiled"]

# Classes by name, so that their libraries need not be imported: what to do instead.
_REFUSED = {
    "DataParallel": (
        "copies the model to several devices at every call; use "
        "DistributedDataParallel, or wrap the model inside of it for one device"
    ),
    "FullyShardedDataParallel": "moves parameters itself; wrap the model or shard it",
    "FSDPModule": "moves parameters itself; wrap the model or shard it",
    "DeepSpeedEngine": (
        "moves parameters and activations itself; wrap the model or use the engine"
    ),
}


def find_model(target: Any) -> nn.Module:
    """The model of ``target``: itself, or that of a Trainer.

    Raises TypeError for what is neither.
    """
    if isinstance(target, type):
        raise TypeError(
            f"target must be a model, got the class {target.__name__}: make one first"
        )
    model: Any = target
    if not isinstance(target, nn.Module):
        model = getattr(target, "model", None)
        if not isinstance(model, nn.Module) or not callable(
            getattr(target, "train", None)
        ):
            raise TypeError(
                "target must be a torch.nn.Module or a Trainer (with .model and "
                f".train), got {type(target).__name__}"
            )
    found: nn.Module = model
    return found


def innermost(model: nn.Module) -> nn.Module:
    """The model that does the work: without DistributedDataParallel around it."""
    inner = getattr(model, "module", None)
    if type(model).__name__ == "DistributedDataParallel" and inner is not None:
        return innermost(inner)
    return model


def check_model(model: nn.Module) -> None:
    """Raises InputError for a model that cannot be wrapped, saying why."""
    _check_kind(model)
    _check_shapes(model)
    _check_devices(model)


def _check_shapes(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise InputError(
                f"target must have its weights, got {name} without a shape: run the "
                "lazy module once"
            )


def _check_kind(model: nn.Module) -> None:
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError(
            "target must be a module in Python, got a scripted one: wrap the original"
        )
    _check_sharding(model)


def _check_sharding(model: nn.Module) -> None:
    for module in model.modules():
        for cls in type(module).__mro__:
            if cls.__name__ in _REFUSED and not cls.__module__.startswith("memscale"):
                raise InputError(
                    f"target must not contain a {cls.__name__}, which "
                    f"{_REFUSED[cls.__name__]}"
                )
        # Set by the library on what it has inside.
        if getattr(module, "_is_fsdp_managed_module", False):
            raise InputError(
                "target must not be inside of a FullyShardedDataParallel, which "
                f"{_REFUSED['FullyShardedDataParallel']}"
            )


class ShardingCheck:
    """Whether others have begun to move the parameters of a model or a part of it.

    Asked at each call in training. ``fully_shard`` changes the class of modules that
    exist, so all of them are looked at, but only classes that are new are checked.
    """

    def __init__(self) -> None:
        self._known: set[type] = set()

    def __call__(self, model: nn.Module) -> None:
        """Raises InputError, saying who does."""
        if (
            has_other_classes(model, self._known)
            # Others who shard from outside set this on all modules.
            or "_is_fsdp_managed_module" in vars(model)
        ):
            _check_sharding(model)
            self._known = {type(module) for module in model.modules()}


def _check_devices(model: nn.Module) -> None:
    tensors = [*model.parameters(), *model.buffers()]
    # A few small buffers on the host do not matter; parameters do.
    devices = {p.device for p in model.parameters() if p.device.type != "meta"}
    if any(t.is_meta for t in tensors):
        raise InputError(
            "target must have its weights, got some on the meta device: load them "
            "first (memscale.estimate needs none)"
        )
    if len(devices) > 1:
        raise InputError(
            "target must be on one device, got "
            + " and ".join(sorted(map(str, devices)))
        )
