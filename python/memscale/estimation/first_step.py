"""An estimate from the first real step, without a sample and without a loss.

::

    first = memscale.estimate_at_first_step(model, optimizer="adamw")
    for batch in loader:            # your loop, unchanged
        ...
    print(first.estimate)

At the model's first forward its arguments are seen, and the step is estimated
before it runs. If the loss is computed in your loop, where no model can tell, that
first step is recorded as it goes, and the estimate refined from it.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memscale._C import Recorder
from memscale.config import Config
from memscale.estimation.estimate import Estimate, estimate_step
from memscale.model.inputs import STAND_IN, Call
from memscale.trace.optimizer_step import OptimizerLike, describe_optimizer
from memscale.trace.recording import finish_recording, observe_real_layers
from memscale.trace.static import TracedStep
from memscale.trace.told import unpack
from memscale.trace.training_step import TrainingStep, find_target

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

__all__ = ["FirstStepEstimate", "estimate_at_first_step"]

_log = logging.getLogger("memscale")


def estimate_at_first_step(
    model: nn.Module,
    optimizer: OptimizerLike = "adamw",
    config: Config | None = None,
) -> FirstStepEstimate:
    """Estimate the step of ``model`` when it is first trained, where it then is."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    describe_optimizer(optimizer)  # a bad name is an error now, not later
    return FirstStepEstimate(model, optimizer, config or Config())


class FirstStepEstimate:
    """Watches a model until its first training step is over; then lets it go.

    ``estimate`` is None before the first forward, then a prediction, then, if the
    step had to be recorded, what was seen. ``cancel()`` lets go at once.
    """

    def __init__(
        self, model: nn.Module, optimizer: OptimizerLike, config: Config
    ) -> None:
        self.estimate: Estimate | None = None
        self._model = model
        self._optimizer = optimizer
        self._config = config
        self._recorder: Recorder | None = None
        self._call: Call | None = None
        self._layers = ExitStack()
        self._saves = ExitStack()
        self._handles: list[RemovableHandle] = []
        self._watch_forward()

    @property
    def done(self) -> bool:
        """Whether the estimate is final, and nothing is watched any more."""
        return not self._handles

    def cancel(self) -> None:
        """Take every hook away. An unfinished recording is dropped."""
        self._remove_hooks()
        self._stop()
        self._recorder = None

    # ---- hooks ----

    def _watch_forward(self) -> None:
        self._handles.append(
            self._model.register_forward_pre_hook(
                self._before_forward, with_kwargs=True, prepend=True
            )
        )

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before_forward(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._recorder is not None:
            # Another forward of the same step, or, after a backward, of the next:
            # then the first was without an optimizer.
            if self._recorder.phase != "forward":
                self._finish()
            return
        if not (model.training and torch.is_grad_enabled()):
            return
        self._remove_hooks()  # the model is traced as it is without us
        self._call = Call(args, dict(kwargs), source="the first batch")
        try:
            step = TrainingStep.of_call(model, self._call, self._optimizer)
            self.estimate = estimate_step(step, self._config, fallback=False)
        except Exception as error:
            # The user's step goes on, whatever is wrong with the prediction of it.
            _log.info("the first step is recorded, because %s", str(error))
            self.estimate = None
        if self.estimate is None or self.estimate.loss == STAND_IN:
            # Torch's profiler and a recorder must end in the order of a stack.
            if torch._C._autograd._profiler_enabled():
                _log.info("the first step is not recorded: a profiler is on")
            else:
                self._start(model)

    def _after_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        self._saves.close()

    def _before_optimizer(
        self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> None:
        if self._recorder is None:
            return
        ours = set(self._model.parameters())
        if any(p in ours for group in optimizer.param_groups for p in group["params"]):
            self._finish()

    # ---- recording ----

    def _start(self, model: nn.Module) -> None:
        assert self._call is not None
        self._watch_forward()
        self._handles += [
            model.register_forward_hook(self._after_forward, always_call=True),
            register_optimizer_step_pre_hook(self._before_optimizer),
        ]
        device, _ = find_target(model, None)
        self._recorder = Recorder(device, FakeTensor, fake_run=False)
        self._layers.enter_context(
            observe_real_layers(model, self._recorder, checkpointed=False)
        )
        for tensor in self._call.tensors():
            self._recorder.add_resident(tensor, "inputs")
        self._saves.enter_context(saved_tensors_hooks(self._recorder.save, unpack))
        self._recorder.start()

    def _stop(self) -> None:
        self._saves.close()
        self._layers.close()
        if self._recorder is not None:
            self._recorder.stop()

    def _finish(self) -> None:
        recorder, call = self._recorder, self._call
        assert recorder is not None
        assert call is not None
        self._stop()
        device, name = find_target(self._model, None)
        trace = finish_recording(recorder, self._model, device, self._optimizer)
        step = TracedStep(trace, device, "computed in your loop", "recorded")
        self.estimate = Estimate(step, call, describe_optimizer(self._optimizer), name)
        self.cancel()
        _log.info("first step recorded: peak %d bytes", self.estimate.peak_bytes)
