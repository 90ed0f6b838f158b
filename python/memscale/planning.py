"""What each layer of a wrapped model does, and what that is predicted to save."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from memscale._optimizer_step import OptimizerLike
from memscale.config import Config, EffectiveConfig, OptimizationMode
from memscale.estimator import estimate_call
from memscale.inputs import Call

__all__ = ["LayerPlan", "Plan", "plan_step", "policies"]


@dataclass(frozen=True)
class LayerPlan:
    """One layer: its policy, and the activations that it holds for backward."""

    name: str
    policy: str
    plain_bytes: int
    held_bytes: int


@dataclass(frozen=True)
class Plan:
    """A plan for one kind of batch, and what it is predicted to come to."""

    model: str
    mode: str
    call: str
    device: str
    optimizer: str
    layers: tuple[LayerPlan, ...]
    plain_peak_bytes: int
    peak_bytes: int
    notes: tuple[str, ...]

    @property
    def saved_bytes(self) -> int:
        """Of activations, between forward and backward."""
        return sum(layer.plain_bytes - layer.held_bytes for layer in self.layers)


def policies(effective: EffectiveConfig, compiled: bool) -> str:
    """What the mode makes the layers do."""
    if compiled or not effective.enable_checkpointing:
        return "keep"
    return "block" if effective.mode == OptimizationMode.AGGRESSIVE else "cheap"


def plan_step(
    model: nn.Module, call: Call, optimizer: OptimizerLike | None, config: Config
) -> Plan:
    """Trace a step, without running it, and say what the policies do to it.

    Raises TraceError if that cannot be done, and what the model raises.
    """
    plain = estimate_call(
        model, call, optimizer or "adamw", config, None, fallback=False
    )
    policy = policies(config.resolve(), hasattr(model, "_orig_mod"))
    shares = {share.name: share for share in plain.layers}
    layers = []
    for name in plain.trace.layers:
        share = shares.get(name)
        held = share.by_category["activations"] if share is not None else 0
        layers.append(LayerPlan(name, policy, held, held))
    return Plan(
        type(model).__name__,
        config.mode.value,
        plain.call,
        plain.target,
        plain.optimizer,
        tuple(layers),
        plain.peak_bytes,
        plain.peak_bytes,
        tuple(plain.notes),
    )
