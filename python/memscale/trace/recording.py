"""A training step as a trace, recorded while it really runs.

For models that fake tensors cannot run, and for what only the user's loop knows.
What is recorded is the step as it would be without MemScale: layers that are
recomputed here, to fit into memory, appear as if they had been kept.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from memscale._C import LayerCall, Recorder, Trace, TraceError
from memscale.calls import call_events
from memscale.model.inputs import Call, LossFn, find_loss
from memscale.model.layers import find_layers
from memscale.model.randomness import same_randomness
from memscale.trace.fake_tensors import KnownIntegersMode
from memscale.trace.optimizer_step import OptimizerLike
from memscale.trace.optimizer_step import trace_step as trace_optimizer_step
from memscale.trace.shell import Faker
from memscale.trace.static import TracedStep
from memscale.trace.told import (
    add_residents,
    mark_gradients,
    mark_returned,
    tell_uncounted_ops,
    unpack,
)

__all__ = ["finish_recording", "observe_real_layers", "record_step"]

_log = logging.getLogger("memscale")


def record_step(
    model: nn.Module,
    call: Call,
    device: torch.device,
    *,
    loss_fn: LossFn | None = None,
    optimizer: OptimizerLike = "adamw",
    why: str = "it was asked for",
) -> TracedStep:
    """Run forward and backward once, on the model's own device, and record them.

    If that runs out of memory, once more with repeated blocks keeping only their
    inputs; the trace is the same. Afterwards parameters, buffers, gradients,
    training modes and random states are as before; what the model's code does
    beyond them (a counter, a file) is done.
    """
    _check_can_record(model, device, why)
    call = call.map_tensors(lambda tensor: tensor.to(device))
    try:
        return _record(model, call, device, loss_fn, optimizer, checkpointed=False)
    except torch.OutOfMemoryError:
        _log.info("out of memory: recording again, blocks keep only their inputs")
    with call_events.layers_run_twice(model):
        return _record(model, call, device, loss_fn, optimizer, checkpointed=True)


def _record(
    model: nn.Module,
    call: Call,
    device: torch.device,
    loss_fn: LossFn | None,
    optimizer: OptimizerLike,
    *,
    checkpointed: bool,
) -> TracedStep:
    recorder = Recorder(device, FakeTensor, fake_run=False)
    with ExitStack() as stack:
        stack.enter_context(_restored(model))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if not model.training:
            model.train()
        stack.enter_context(
            observe_real_layers(model, recorder, checkpointed=checkpointed)
        )
        for tensor in call.tensors():
            recorder.add_resident(tensor, "inputs")
        stack.enter_context(call_events.telling(recorder))
        recorder.start()
        try:
            loss, source = _loss(model, call, loss_fn, recorder)
            if loss is not None:
                recorder.set_phase("backward")
                loss.backward()
        finally:
            recorder.stop()
        trace = finish_recording(recorder, model, device, optimizer)
        del loss  # a loop holds it until the next one is there
    return TracedStep(trace, device, source, "recorded")


def _loss(
    model: nn.Module, call: Call, loss_fn: LossFn | None, recorder: Recorder
) -> tuple[Any, str]:
    # A function of its own: nothing but the loss outlives the forward.
    with saved_tensors_hooks(recorder.save, unpack):
        try:
            output = call.run(model)
        except Exception as error:
            error.add_note(f"memscale called the model with {call}")
            raise
        return find_loss(output, call, loss_fn)


def _check_can_record(model: nn.Module, device: torch.device, why: str) -> None:
    kind = type(model).__name__
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device != device:
            raise TraceError(
                f"{kind} can only be recorded where it is: {name} is on "
                f"{tensor.device}, not on {device} (recorded, because {why})"
            )
    if any(p._post_accumulate_grad_hooks for p in model.parameters()):
        raise TraceError(
            f"{kind} has hooks that run as gradients arrive and may change its "
            f"weights: it cannot be recorded (recorded, because {why})"
        )


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Leave the model and the random states as they were."""
    modes = {module: module.training for module in model.modules()}
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    buffers = {module: dict(module._buffers) for module in model.modules()}
    written = [*model.buffers(), *_renormalised_weights(model)]
    values = [(tensor, tensor.detach().clone()) for tensor in written]
    with same_randomness():
        for parameter in gradients:
            parameter.grad = None
        try:
            yield
        finally:
            for module, training in modes.items():
                module.training = training
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
            for module, held in buffers.items():
                module._buffers.update(held)
            with torch.no_grad():
                for tensor, value in values:
                    if not torch.equal(tensor, value):
                        tensor.copy_(value)


def _renormalised_weights(model: nn.Module) -> list[torch.Tensor]:
    """Embeddings with max_norm write into their weights in forward."""
    return [
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        and module.max_norm is not None
    ]


@contextmanager
def observe_real_layers(
    model: nn.Module, recorder: Recorder, *, checkpointed: bool
) -> Iterator[None]:
    """While on, the recorder is told when a layer's forward runs.

    ``checkpointed``: members of repeated blocks keep only their inputs.
    """
    layers = find_layers(model)
    ids = add_residents(model, layers, recorder)
    replaced: list[tuple[nn.Module, Any]] = []
    try:
        for name, module in layers.modules.items():
            forward = _observed(
                module.forward,
                recorder,
                ids[name],
                checkpointed and name in layers.blocks,
            )
            replaced.append((module, vars(module).get("forward")))
            module.forward = forward  # type: ignore[method-assign]
        yield
    finally:
        for module, before in replaced:
            if before is None:
                del module.forward
            else:
                module.forward = before


def _observed(
    forward: Callable[..., Any], recorder: Recorder, layer: int, checkpointed: bool
) -> Callable[..., Any]:
    @functools.wraps(forward)
    def observed(*args: Any, **kwargs: Any) -> Any:
        recorder.enter_layer(layer)
        try:
            if checkpointed and torch.is_grad_enabled():
                return _Checkpointed(recorder, layer)(forward, args, kwargs)
            output = forward(*args, **kwargs)
            if layer == 0:
                call_events.leave_call()
                mark_returned(recorder, output)
            else:
                call_events.leave_layer()
            return output
        finally:
            recorder.leave_layer()

    return observed


class _Checkpointed:
    """One call of a block under torch's checkpoint, recorded as if it were not."""

    def __init__(self, recorder: Recorder, layer: int) -> None:
        self.recorder = recorder
        self.layer = layer
        self.call: LayerCall | None = None

    def __call__(
        self, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        # The checkpoint's own bookkeeping is not the model's.
        self.recorder.pause()
        try:
            with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                return checkpoint(
                    forward,
                    *args,
                    use_reentrant=False,
                    early_stop=False,  # it would end inside an op, unseen
                    context_fn=lambda: (self._forward(), self._recompute()),
                    **kwargs,
                )
        finally:
            self.recorder.resume()

    @contextmanager
    def _forward(self) -> Iterator[None]:
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        assert top is not None  # the checkpoint's
        drop, recompute = top
        self.call = self.recorder.begin_call(self.layer, [], [])

        def pack(tensor: torch.Tensor) -> Any:
            return self.recorder.save(tensor, hold=False), drop(tensor)

        self.recorder.resume()
        try:
            with saved_tensors_hooks(pack, lambda packed: recompute(packed[1])):
                yield
        finally:
            self.recorder.pause()
            self.recorder.end_call(self.call)

    @contextmanager
    def _recompute(self) -> Iterator[None]:
        assert self.call is not None
        self.recorder.begin_recompute(self.call)
        try:
            yield
        finally:
            self.recorder.end_recompute()


def finish_recording(
    recorder: Recorder,
    model: nn.Module,
    device: torch.device,
    optimizer: OptimizerLike,
) -> Trace:
    """The trace, with the optimizer's step added on fake tensors."""
    mode = KnownIntegersMode()
    mode.assume_values = True
    faker = Faker(mode, device)
    fake_of: dict[nn.Parameter, torch.Tensor] = {}
    mark_gradients(recorder, model.parameters())
    for parameter in model.parameters():  # frozen ones too: optimizers may hold them
        fake = faker.tensor(parameter)
        recorder.bind_same(fake, parameter)
        fake_of[parameter] = fake
        if parameter.grad is not None and parameter.grad.layout is torch.strided:
            fake.grad = mode.empty(
                parameter.grad.shape,
                parameter.grad.stride(),
                parameter.grad.dtype,
                device,
            )
            recorder.bind_same(fake.grad, parameter.grad)
    recorder.set_phase("optimizer")
    with mode:
        recorder.start()
        try:
            trace_optimizer_step(recorder, optimizer, fake_of)
        finally:
            recorder.stop()
    return tell_uncounted_ops(recorder.finish())
