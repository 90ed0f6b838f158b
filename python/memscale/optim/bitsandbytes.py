"""bitsandbytes' CUDA kernel in place of ours, on CUDA, where it is installed.

Its blockwise 8-bit update takes the maps as arguments, sorted as ours are, and one
absmax for 256 elements: so it steps our state as it is, and one may take over from
the other at any step. It has no maximize, no L2 decay in the gradient (its ``adam``
decays as AdamW does) and no stochastic rounding: those steps are ours.

Tested with a stand-in, tried with its code for the CPU; not run on CUDA.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

import torch
from torch import Tensor

from memscale._C import has_cuda_step
from memscale.optim.state import State

__all__ = ["DEVICES", "find", "serves", "step", "steps_in_pieces"]

DEVICES = frozenset({"cuda"})

# The arguments as we pass them: older versions have others in the same places.
_POSITIONAL = [
    "optimizer_name", "g", "p", "state1", "state2", "beta1", "beta2", "beta3", "alpha",
    "eps", "step", "lr", "qmap1", "qmap2", "absmax1", "absmax2",
]  # fmt: skip
_NAMED = {"weight_decay", "gnorm_scale"}


@functools.cache
def find() -> Any | None:
    """``bitsandbytes.functional``, if it is there and has what we call."""
    try:
        functional = importlib.import_module("bitsandbytes.functional")
    except Exception:  # it loads a CUDA library, and raises what that raises
        return None
    update = getattr(functional, "optimizer_update_8bit_blockwise", None)
    try:
        names = list(inspect.signature(update).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # not there, or without a signature
        return None
    is_known = names[: len(_POSITIONAL)] == _POSITIONAL and {*names} >= _NAMED
    return functional if is_known else None


def steps_in_pieces(device_type: str) -> bool:
    """Whether a step there has no kernel, and goes through torch's operators."""
    if device_type == "cpu":
        return False
    if device_type != "cuda":
        return True
    return find() is None and not has_cuda_step()


def serves(p: Tensor, group: dict[str, Any]) -> bool:
    """Whether an 8-bit step of ``p`` is bitsandbytes' to make."""
    return (
        p.device.type in DEVICES
        and not group["maximize"]
        and (group["decoupled_weight_decay"] or group["weight_decay"] == 0)
        and not group["stochastic_rounding"]
        and p.is_contiguous()
        and find() is not None
    )


def step(
    params: list[Tensor],
    states: list[State],
    group: dict[str, Any],
    grad_multiplier: float,
) -> None:
    functional = find()
    assert functional is not None
    beta1, beta2 = map(float, group["betas"])
    for p, state in zip(params, states, strict=True):
        assert p.grad is not None
        state["step"] += 1
        functional.optimizer_update_8bit_blockwise(
            "adam",
            p.grad.contiguous(),
            p,
            state["exp_avg_codes"],
            state["exp_avg_sq_codes"],
            beta1,
            beta2,
            0.0,  # beta3 and alpha: AdEMAMix's
            0.0,
            float(group["eps"]),
            int(state["step"]),
            float(group["lr"]),
            _map(True, p.device),
            _map(False, p.device),
            state["exp_avg_absmax"],
            state["exp_avg_sq_absmax"],
            weight_decay=float(group["weight_decay"]),
            gnorm_scale=grad_multiplier,
        )


@functools.cache
def _map(is_signed: bool, device: torch.device) -> Tensor:
    """The 256 values: each code, dequantised with an absmax of 1."""
    values = torch.empty(256)
    codes = torch.arange(256, dtype=torch.uint8)
    torch.ops.memscale.dequantise_(values, codes, torch.ones(1), is_signed)
    return values.to(device)
