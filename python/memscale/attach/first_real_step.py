"""A plan's trace from the first real step, for models that cannot be traced before it.

Values decide what such a model does, or its objects cannot be copied. So its own first
training step is recorded while it runs: forward, the loss in the user's loop, backward,
until the optimizer steps. Nothing is run twice. Meanwhile every layer keeps only its
inputs, because nobody knows yet whether more would fit; the trace is that of the plain
step all the same (Note [A replayed step, recorded] in runtime/record/recorder.h).
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from memscale._C import Recorder, TraceError
from memscale.calls.optimizer_steps import stop_watching, watch
from memscale.estimation.estimate import Estimate
from memscale.model.inputs import Call, DescribedCall
from memscale.model.layers import find_layers
from memscale.model.optimizers import holds_parameters
from memscale.techniques.technique import Technique
from memscale.trace.optimizer_step import OptimizerLike, describe_optimizer
from memscale.trace.recording import finish_recording
from memscale.trace.static import TracedStep
from memscale.trace.told import add_residents
from memscale.trace.training_step import find_target

__all__ = ["FirstRealStep"]

# A step may end without a backward: an exception, a forward for its own sake.
_MAX_ATTEMPTS = 3


class FirstRealStep:
    """Records one training step of a wrapped model. ``estimate`` is set at its end.

    ``begin`` and ``end`` belong to the thread that trains. A step that another
    thread ends, or that calls the model again before its backward, is dropped.
    """

    def __init__(
        self,
        model: nn.Module,
        techniques: Sequence[Technique],
        find_optimizer: weakref.WeakMethod[Callable[[], OptimizerLike]],
    ) -> None:
        self.estimate: Estimate | None = None
        self.failure = "no backward followed its first calls"
        self._model = weakref.ref(model)
        self._find_optimizer = find_optimizer
        self._techniques = techniques
        self._num_attempts = 0
        self._has_given_up = False
        self._recorder: Recorder | None = None
        self._call = DescribedCall("")
        self._thread = 0
        self._is_over = False  # nothing more is recorded
        self._num_states_before = 0
        self._end_if_dropped: weakref.finalize[Any, Any] | None = None

    @property
    def has_failed(self) -> bool:
        """Whether it is not worth another try."""
        return self._has_given_up or self._num_attempts >= _MAX_ATTEMPTS

    def begin(self, call: Call) -> None:
        """The model is about to be called, by this thread.

        Nothing is recorded, and no try counts, inside of a backward (of a reentrant
        checkpoint), under a profiler, and while another model's step is recorded.
        """
        _stop_abandoned()
        if _in_backward() or torch._C._autograd._profiler_enabled():
            return
        try:
            self._begin(call)
            self._num_attempts += 1
        except TraceError:  # another model's step is being recorded
            self._stop()
        except Exception as error:  # the user's step goes on without it
            self._stop()
            self._give_up(str(error))

    def _begin(self, call: Call) -> None:
        model = self._model()
        assert model is not None
        self._thread = threading.get_ident()
        self._num_states_before = self._num_states()
        self._call = DescribedCall(str(call), "the first batch")
        device, _ = find_target(model, None)
        recorder = Recorder(device, FakeTensor, fake_run=False)
        recorder.set_replayed()
        add_residents(model, find_layers(model), recorder)
        for tensor in call.tensors():
            recorder.add_resident(tensor, "inputs")
        recorder.start()
        self._recorder = recorder
        for technique in self._techniques:
            technique.record(recorder)
        self._end_if_dropped = weakref.finalize(self, _end, recorder, self._thread)
        self._end_if_dropped.atexit = False
        watch(self)

    def evaluates(self) -> None:
        """The model is called without gradients: a step that went backward is over.

        Nothing is done here but to look away: an evaluation runs no op of ours.
        """
        recorder = self._recorder
        if recorder is not None and recorder.phase != "forward" and not self._is_over:
            self._is_over = True
            recorder.pause()

    def end(self) -> None:
        """The step is over: the model is called again, or about to be."""
        stop_watching(self)
        recorder, model = self._recorder, self._model()
        if recorder is None or model is None:
            return
        if recorder.phase == "forward" and recorder.has_saves:
            self._give_up("it is called again before the backward of its first call")
            self._stop()
        else:
            self._finish()

    def _num_states(self) -> int:
        """How many parameters the model's optimizer has state for."""
        find_optimizer = self._find_optimizer()
        optimizer = None if find_optimizer is None else find_optimizer()
        return (
            len(optimizer.state) if isinstance(optimizer, torch.optim.Optimizer) else 0
        )

    def cancel(self) -> None:
        """Drop what was recorded so far."""
        stop_watching(self)
        self._stop()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step. See memscale.calls.optimizer_steps."""
        model = self._model()
        if self._recorder is None or model is None:
            return
        if holds_parameters(optimizer, model):
            self._finish()

    def _finish(self) -> None:
        recorder = self._stop()
        model, find_optimizer = self._model(), self._find_optimizer()
        if recorder is None or model is None or find_optimizer is None:
            return
        if recorder.phase == "forward":
            return
        # Then the optimizer's first step was recorded as a part of backward.
        if self._num_states() != self._num_states_before:
            return self._give_up("its optimizer's step calls it (a closure)")
        try:
            device, name = find_target(model, None)
            optimizer = find_optimizer()
            trace = finish_recording(recorder, model, device, optimizer)
            step = TracedStep(trace, device, "computed in your loop", "recorded")
            self.estimate = Estimate(
                step, self._call, describe_optimizer(optimizer), name
            )
        except Exception as error:  # the user's step goes on, whatever is wrong here
            self._give_up(str(error))

    def _stop(self) -> Recorder | None:
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return None
        if self._is_over:
            self._is_over = False
            recorder.resume()
        for technique in self._techniques:
            technique.record(None)
        if self._end_if_dropped is not None:
            self._end_if_dropped.detach()
        if _end(recorder, self._thread):
            return recorder
        self._give_up(
            "its first step was ended by another thread than began it, inside of its "
            "backward, or inside of a profiler that began after it"
        )
        return None

    def _give_up(self, why: str) -> None:
        if not self._has_given_up:
            self.failure = why
        self._has_given_up = True


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


# Recorders that could not be stopped where their step ended, with their threads. Empty
# of tensors, but a thread that is observed pays for it with each op.
_abandoned: list[tuple[int, Recorder]] = []


def _end(recorder: Recorder, thread: int) -> bool:
    """Stop recording; False if that cannot be done here, and it is abandoned.

    Not from inside of a backward: torch then puts back what observed its thread.
    """
    try:
        if threading.get_ident() == thread and not _in_backward():
            recorder.stop()
            return True
    except RuntimeError:  # a profiler began meanwhile, and has not ended
        pass
    recorder.abandon()
    _abandoned.append((thread, recorder))
    return False


def _stop_abandoned() -> None:
    here = threading.get_ident()
    if not _abandoned or _in_backward():
        return
    for entry in [entry for entry in _abandoned if entry[0] == here]:
        _abandoned.remove(entry)
        with contextlib.suppress(RuntimeError):  # a profiler is in its way for good
            entry[1].stop()
