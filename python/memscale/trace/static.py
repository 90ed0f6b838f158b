"""A training step as a trace, without running it.

``trace_step`` runs a shell of the model, forward and backward and the optimizer's
step, once, on fake tensors of the target device. Nothing is allocated, and the
model, its buffers and gradients, the random state and its config stay as they are.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    FakeTensor,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memscale._C import Recorder, Trace, TraceError
from memscale.calls import call_events
from memscale.model.inputs import Call, LossFn, find_loss
from memscale.model.layers import find_layers
from memscale.model.randomness import same_randomness
from memscale.trace import leaks, repeated_layers
from memscale.trace.buckets import find_buckets
from memscale.trace.copies import CannotCopy, Copies
from memscale.trace.fake_tensors import (
    DATA_DEPENDENT_ERRORS,
    CannotTrace,
    KnownIntegersMode,
)
from memscale.trace.fakes_in_use import (
    fakes_are_numbers,
    fakes_are_pooled_as_real,
    fakes_pass_for_real,
    fakes_stay_where_they_are,
    quiet_fakes,
)
from memscale.trace.optimizer_step import OptimizerLike
from memscale.trace.optimizer_step import trace_step as trace_optimizer_step
from memscale.trace.shell import Faker, keeps_hook
from memscale.trace.told import (
    add_residents,
    mark_gradients,
    mark_returned,
    tell_uncounted_ops,
    unpack,
)
from memscale.trace.untouched import Untouched

__all__ = [
    "CannotCopy",
    "CannotTrace",
    "TracedStep",
    "trace_step",
]

_log = logging.getLogger("memscale")

# While a step is traced, a few attributes of torch and transformers are replaced.
_ONE_AT_A_TIME = threading.RLock()


@dataclass(frozen=True)
class TracedStep:
    """A trace, and what it is a trace of."""

    trace: Trace
    device: torch.device
    loss: str  # where it came from
    method: str  # "static" or "recorded"


def trace_step(
    model: nn.Module,
    call: Call,
    device: torch.device,
    *,
    loss_fn: LossFn | None = None,
    optimizer: OptimizerLike = "adamw",
) -> TracedStep:
    """Trace a training step of ``model`` as it would run on ``device``.

    Raises CannotTrace if values that fake tensors do not have decide what runs,
    CannotCopy if it would run on what is the user's, and the model's own error if the
    model does not accept the call.
    """
    tracer = _StaticTracer(model, call, device, loss_fn, optimizer)
    with _ONE_AT_A_TIME, leaks.only_new_objects():
        try:
            step = tracer.trace_once_or_twice()
        except BaseException:
            leaks.note_failure(tracer.modes)
            raise
        leaks.remove_fakes(tracer.modes)
        return step


class _StaticTracer:
    def __init__(
        self,
        model: nn.Module,
        call: Call,
        device: torch.device,
        loss_fn: LossFn | None,
        optimizer: OptimizerLike,
    ) -> None:
        self.model = model
        self.call = call
        self.device = device
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.modes: list[weakref.ref[KnownIntegersMode]] = []
        self.buckets = find_buckets(model)

    def trace_once_or_twice(self) -> TracedStep:
        # Gradients that move into buckets are followed one by one.
        repeat = self.buckets is None or not self.buckets.are_gradients
        try:
            return self.trace(repeat)
        except repeated_layers.NotRepeatable as why:
            _log.debug("layers that look equal are traced one by one: %s", why)
        return self.trace(repeat=False)

    def trace(self, repeat: bool, saves: bool = True) -> TracedStep:
        _check_traceable(self.model)
        mode = KnownIntegersMode()
        self.modes.append(weakref.ref(mode))
        faker = Faker(mode, self.device)
        untouched = Untouched()
        met: list[torch.Tensor] = []

        def make_fake(tensor: torch.Tensor) -> torch.Tensor:
            met.append(_know(mode, faker.tensor(tensor), tensor))
            return met[-1]

        copies = Copies(make_fake, untouched.met_code, keeps_hook)
        for tensor in [*self.model.parameters(), *self.model.buffers()]:
            copies.memo[id(tensor)] = faker.tensor(tensor)
        shell = copies.copy(self.model, type(self.model).__name__)
        if not (shell.training or self.call.is_made_now):
            shell.train()
        fake_of = {p: faker.tensor(p) for p in self.model.parameters()}
        for buffer in self.model.buffers():
            _know(mode, faker.tensor(buffer), buffer)
        met.clear()
        call = self.call.copied(copies.copy)
        recorder = Recorder(self.device, FakeTensor, fake_run=True)
        for tensor in [*call.tensors(), *met]:
            recorder.add_resident(tensor, "inputs")
        loss_fn = copies.copy(self.loss_fn, "loss_fn")
        untouched.met_code(
            type(self.optimizer)
            if isinstance(self.optimizer, torch.optim.Optimizer)
            else self.optimizer
        )
        try:
            with untouched.on(copies):
                return self._run(
                    mode, shell, fake_of, call, loss_fn, recorder, repeat, saves
                )
        except RuntimeError as error:
            if saves and "saved tensor hooks" in str(error):
                # torch.func refuses to work while somebody watches saved tensors.
                return self.trace(repeat, saves=False)
            raise
        finally:
            # Layers and their observed forwards know each other: without these
            # cycles the shell goes at once, with all that it has copied.
            for module in list(shell.modules()):
                vars(module).pop("forward", None)

    def _run(
        self,
        mode: KnownIntegersMode,
        shell: nn.Module,
        fake_of: dict[nn.Parameter, torch.Tensor],
        call: Call,
        loss_fn: LossFn | None,
        recorder: Recorder,
        repeat: bool,
        saves: bool,
    ) -> TracedStep:
        hooks = _Saves(recorder, mode).hooks() if saves else None
        rows = observe_layers(shell, recorder, mode if repeat else None, hooks)
        if self.buckets is not None:
            with mode:
                self.buckets.add_to(recorder, fake_of)
        if any(p._post_accumulate_grad_hooks for p in self.model.parameters()):
            recorder.add_note("hooks that run as gradients arrive are not traced")
        if not saves:
            recorder.set_saves_unknown()
            recorder.add_note("saved tensors are unknown: the model uses torch.func")
        with ExitStack() as stack:
            stack.enter_context(fakes_pass_for_real())
            stack.enter_context(fakes_stay_where_they_are())
            stack.enter_context(fakes_are_numbers())
            stack.enter_context(fakes_are_pooled_as_real(mode))
            stack.enter_context(quiet_fakes())
            stack.enter_context(same_randomness())
            stack.enter_context(call_events.telling(recorder))
            stack.enter_context(torch.inference_mode(False))
            # In this thread: autograd's device threads may have been started
            # before the device was loaded, and then there is none for it. After
            # inference_mode, which switches the threads on again.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(mode)
            recorder.start()
            stack.callback(recorder.stop)
            loss, source = _forward(shell, call, loss_fn, hooks)
            if loss is not None:
                stack.enter_context(_outside_autocast(self.device))
                recorder.set_phase("backward")
                with _explained(self.call):
                    loss.backward()
                for row in rows:
                    row.check()
                mark_gradients(recorder, fake_of.values())
                recorder.set_phase("optimizer")
                mode.assume_values = True
                trace_optimizer_step(recorder, self.optimizer, fake_of)
                loss = None  # a loop holds it until the next one is there
        if mode.skips_by_chance:
            recorder.add_note(
                "a random number decides whether a layer runs (layer drop): predicted "
                "is the step in which all of them do"
            )
        trace = tell_uncounted_ops(recorder.finish())
        return TracedStep(trace, self.device, source, "static")


class _Saves:
    """Saved-tensor hooks over fakes: nothing is held, another fake is given back.

    So the recorder sees when the program itself lets go of what it saved.
    """

    def __init__(self, recorder: Recorder, mode: KnownIntegersMode) -> None:
        self.recorder = recorder
        self.mode = mode

    def hooks(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return self.pack, self.unpack

    def pack(self, tensor: torch.Tensor) -> Any:
        if not isinstance(tensor, FakeTensor):
            return self.recorder.save(tensor), None
        metadata = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        value = getattr(tensor, "_memscale_value", None)
        return self.recorder.save(tensor, hold=False), (metadata, value)

    def unpack(self, packed: Any) -> torch.Tensor:
        save, kind = packed
        if kind is None:
            return unpack(save)
        metadata, value = kind
        self.recorder.pause()
        try:
            tensor = self.mode.empty(*metadata)
        finally:
            self.recorder.resume()
        save.bind(tensor)
        return tensor if value is None else self.mode.know(tensor, value)


def _check_traceable(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise TraceError(f"{name} has no shape yet: run the lazy module once")
        floating = parameter.is_floating_point() or parameter.is_complex()
        if is_traceable_wrapper_subclass(parameter) or not floating:
            raise CannotTrace(
                f"{name} is a {type(parameter).__name__} of {parameter.dtype}: "
                "what its kernels take shows only when they run"
            )


def _forward(
    shell: nn.Module, call: Call, loss_fn: LossFn | None, hooks: Any
) -> tuple[Any, str]:
    # A function of its own: nothing but the loss outlives the forward.
    with ExitStack() as stack:
        if hooks is not None:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*hooks))
        with _explained(call):
            return find_loss(call.run(shell), call, loss_fn)


def _know(
    mode: KnownIntegersMode, fake: torch.Tensor, real: torch.Tensor
) -> torch.Tensor:
    """Give an integer fake the values of the real tensor, if it has any."""
    if real.is_meta or real.dtype.is_floating_point or real.is_complex():
        return fake
    if isinstance(real, FakeTensor) or not isinstance(fake, FakeTensor):
        return fake
    return mode.know(fake, real.detach().cpu().clone())


# Errors that are of fake tensors, not of the model: what the text says.
_FAKE_LIMITS = (
    "no fake impl",
    "convert all Tensors to FakeTensors",
    "torch.compile/export",
    "Cannot access data pointer",
    "not supported for tensor subclasses",
    "TorchScript",
)


@contextmanager
def _explained(call: Call) -> Iterator[None]:
    """Errors of the model say what it was called with; errors of fakes, that."""
    try:
        yield
    except (repeated_layers.NotRepeatable, TraceError):
        raise
    except DATA_DEPENDENT_ERRORS as error:
        raise CannotTrace(
            f"values decide what the model does ({type(error).__name__}: {error})"
        ) from error
    except (UnsupportedFakeTensorException, UnsupportedOperatorException) as error:
        raise CannotTrace(f"fake tensors cannot run it ({error})") from error
    except Exception as error:
        if any(limit in str(error) for limit in _FAKE_LIMITS):
            text = str(error).splitlines()[0]
            raise CannotTrace(f"fake tensors cannot run it ({text})") from error
        error.add_note(f"memscale called the model with {call}")
        raise


@contextmanager
def _outside_autocast(device: torch.device) -> Iterator[None]:
    """Backward comes after ``with torch.autocast``, whose cast weights are gone."""
    enabled = torch.is_autocast_enabled(device.type)
    torch.set_autocast_enabled(device.type, False)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.set_autocast_enabled(device.type, enabled)


def observe_layers(
    model: nn.Module,
    recorder: Recorder,
    mode: KnownIntegersMode | None = None,
    hooks: Any = None,
) -> list[repeated_layers.Row]:
    """Tell the recorder of each layer's parameters, and when its forward runs.

    With a ``mode``, rows of equal layers are repeated.
    """
    layers = find_layers(model)
    ids = add_residents(model, layers, recorder)
    rows = []
    in_row: dict[str, tuple[repeated_layers.Row, int]] = {}
    for names in layers.rows:
        if mode is None:
            break
        members = [layers.modules[name] for name in names]
        for group in repeated_layers.equal_groups(members):
            if len(group) < repeated_layers.SHORTEST_ROW:
                continue
            row = repeated_layers.Row(
                recorder,
                mode,
                [members[i] for i in group],
                [ids[names[i]] for i in group],
                group,
                hooks,
            )
            rows.append(row)
            in_row.update((names[i], (row, place)) for place, i in enumerate(group))
    for name, module in layers.modules.items():
        _observe(module, recorder, ids[name], *in_row.get(name, (None, 0)))
    return rows


def _observe(
    module: nn.Module,
    recorder: Recorder,
    layer: int,
    row: repeated_layers.Row | None,
    place: int,
) -> None:
    forward = module.forward

    @functools.wraps(forward)
    def observed(*args: Any, **kwargs: Any) -> Any:
        recorder.enter_layer(layer)
        try:
            if row is not None:
                return row.call(place, forward, args, kwargs)
            output = forward(*args, **kwargs)
            if layer == 0:
                call_events.leave_call()
                mark_returned(recorder, output)
            else:
                call_events.leave_layer()
            return output
        finally:
            recorder.leave_layer()

    module.forward = observed  # type: ignore[method-assign]
