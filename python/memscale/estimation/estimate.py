"""How many bytes a training step will need, and who needs them.

What ``memscale.estimate`` returns, and how a step that is known is traced or recorded
for it. Nothing is allocated and nothing of the model changes (memscale.trace.static).
"""

from __future__ import annotations

import functools
import json
import logging
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from memscale import hardware
from memscale._C import (
    Fit,
    HardwareError,
    InputError,
    Instant,
    Plan,
    Timeline,
    Trace,
    granularity_of,
    plain_step,
)
from memscale._C import fit as fit_bytes
from memscale.config import Config
from memscale.estimation.text import estimate_text
from memscale.model.inputs import Call, DescribedCall
from memscale.trace.optimizer_step import describe_optimizer
from memscale.trace.recording import record_step
from memscale.trace.static import CannotTrace, TracedStep, trace_step
from memscale.trace.training_step import TrainingStep

__all__ = ["Estimate", "LayerShare", "estimate_step"]

_log = logging.getLogger("memscale")


@dataclass(frozen=True)
class LayerShare:
    """What one layer holds at an instant. ``name`` None: outside of all layers."""

    name: str | None
    bytes: int
    by_category: dict[str, int]


class Estimate:
    """The predicted memory of one training step on one device. Immutable.

    A step is ``loss = …model(batch)…; loss.backward(); optimizer.step();
    optimizer.zero_grad()`` once the optimizer has its state. The output is let go
    before backward: a loop that keeps it in a variable holds that much more.

    ``plan`` is the plan that the step follows, None for the plain step. All bytes, ops
    and layers are of the step under the plan; only ``plain_peak_bytes`` is not.
    """

    def __init__(
        self, step: TracedStep, call: Call | DescribedCall, optimizer: str, target: str
    ):
        self.plan: Plan | None = None
        self._step = step
        self._trace = step.trace
        self.inputs = call.source
        self.call = str(call)
        self.optimizer = optimizer
        self.target = target

    def under(self, plan: Plan, trace: Trace) -> Estimate:
        """The same step as it runs under ``plan``; ``trace`` is what it then does."""
        call = DescribedCall(self.call, self.inputs)
        made = Estimate(self._step, call, self.optimizer, self.target)
        made.plan = plan
        made._trace = trace
        return made

    # ---- how it was made ----

    @property
    def trace(self) -> Trace:
        """Every op of the step."""
        return self._trace

    @property
    def device(self) -> torch.device:
        """Whose tensors were traced."""
        return self._step.device

    @property
    def loss(self) -> str:
        """Where the loss came from: the model, ``loss_fn``, or a stand-in."""
        return self._step.loss

    @property
    def method(self) -> str:
        """``"static"`` (fake tensors) or ``"recorded"`` (a real step)."""
        return self._step.method

    @property
    def notes(self) -> list[str]:
        """What is unknown or approximated."""
        return list(self._step.trace.notes)

    @property
    def uncounted_ops(self) -> list[str]:
        """Expensive ops whose flops nobody knows. ``notes`` and the log say so."""
        return self._step.trace.uncounted_ops

    # ---- bytes ----

    @property
    def granularity(self) -> int:
        """The device's allocator hands out multiples of this many bytes."""
        return granularity_of(self.device.type)

    @cached_property
    def timeline(self) -> Timeline:
        """Bytes on the device, op by op."""
        return Timeline(self.trace, "device", self.granularity)

    @property
    def peak_bytes(self) -> int:
        """The most that is held on the device at once."""
        return _peak_of(self.timeline)

    @property
    def plain_peak_bytes(self) -> int:
        """The same of the plain step, without any plan; ``plan`` names the same."""
        plain = plain_step(self._step.trace)
        return _peak_of(Timeline(plain, "device", self.granularity))

    @cached_property
    def host_peak_bytes(self) -> int:
        """The most that is held on the host beside the device; 0 for the CPU."""
        return _peak_of(Timeline(self.trace, "host", 1))

    @cached_property
    def breakdown(self) -> dict[str, int]:
        """Bytes by category at the peak; they sum to ``peak_bytes``."""
        return dict(self._peak.by_category) if self._peak is not None else {}

    @cached_property
    def phases(self) -> dict[str, int]:
        """The peak of each phase that the step has."""
        peaks = {
            phase: self.timeline.peak(phase)
            for phase in ("forward", "backward", "optimizer")
        }
        return {phase: peak.bytes for phase, peak in peaks.items() if peak is not None}

    @property
    def peak_op(self) -> str | None:
        """The op during which the peak is reached: "aten::mm"."""
        return None if self._peak is None else self.trace[self._peak.op].name

    @property
    def peak_phase(self) -> str | None:
        return None if self._peak is None else self.trace[self._peak.op].phase

    @property
    def peak_layer(self) -> str | None:
        """The layer whose op that is; None: outside of all layers."""
        return None if self._peak is None else self.trace[self._peak.op].layer

    @cached_property
    def layers(self) -> list[LayerShare]:
        """Who holds the peak, most bytes first."""
        if self._peak is None:
            return []
        shares = self.timeline.by_layer(self._peak.op)
        return [LayerShare(name, size, parts) for name, size, parts in shares]

    @cached_property
    def _peak(self) -> Instant | None:
        return self.timeline.peak()

    # ---- use ----

    def fits(self, device: str | hardware.DeviceSpec) -> Fit:
        """Whether the step fits a card, with room for what the card itself takes."""
        spec = hardware.find(device) if isinstance(device, str) else device
        if spec.memory is None:
            raise HardwareError(f"the memory of {spec.name} is unknown")
        return fit_bytes(self.peak_bytes, spec.memory)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and texts, as ``--json`` prints them."""
        return {
            "peak_bytes": self.peak_bytes,
            "plain_peak_bytes": self.plain_peak_bytes,
            "host_peak_bytes": self.host_peak_bytes,
            "breakdown": self.breakdown,
            "phases": self.phases,
            "peak": {
                "phase": self.peak_phase,
                "op": self.peak_op,
                "layer": self.peak_layer,
            },
            "layers": [
                {"name": s.name, "bytes": s.bytes, "by_category": s.by_category}
                for s in self.layers
            ],
            "target": self.target,
            "device": str(self.device),
            "optimizer": self.optimizer,
            "inputs": self.inputs,
            "call": self.call,
            "loss": self.loss,
            "method": self.method,
            "notes": self.notes,
            "plan": None if self.plan is None else json.loads(self.plan.to_json()),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        return estimate_text(self)

    def __repr__(self) -> str:
        return f"<Estimate peak_bytes={self.peak_bytes} target={self.target!r}>"


def estimate_step(
    step: TrainingStep, config: Config, *, fallback: bool = True
) -> Estimate:
    """Of the plain step; ``fallback`` False: never run the model.

    Of the config only the ways to see a step count, not the plan that it asks for.
    """
    fallback = fallback and config.use_empirical_fallback
    traced: TracedStep | None = None
    why = "use_static_profiling is off"
    if config.use_static_profiling:
        try:
            traced = trace_step(
                step.model,
                step.call,
                step.device,
                loss_fn=step.loss_fn,
                optimizer=step.optimizer,
            )
        except CannotTrace as error:
            if not fallback:
                raise
            why = str(error)
            _log_once(
                f"{type(step.model).__name__} is recorded for real, because {why}"
            )
    elif not fallback:
        raise InputError(
            "one of use_static_profiling and use_empirical_fallback must be on"
        )
    if traced is None:
        traced = record_step(
            step.model,
            step.call,
            step.device,
            loss_fn=step.loss_fn,
            optimizer=step.optimizer,
            why=why,
        )
    return Estimate(traced, step.call, describe_optimizer(step.optimizer), step.target)


def _peak_of(timeline: Timeline) -> int:
    peak = timeline.peak()
    return peak.bytes if peak is not None else timeline.resident


@functools.cache
def _log_once(text: str) -> None:
    _log.warning(text)
