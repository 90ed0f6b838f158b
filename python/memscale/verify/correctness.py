"""Is the training still the same? One step plain, one wrapped, compared bit by bit.

::

    report = memscale.verify_correctness(model, batch)
    print(report)
    report.raise_if_failed()

Both steps start from the same weights, buffers and random states. Loss, outputs,
gradients, buffers and the random states after it are compared. The model, its
gradients and all random states are left as they were.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from memscale import replay
from memscale._C import InputError
from memscale.attach.wrapping import EXECUTOR, attach, detach, effective
from memscale.calls.way_in import Hook
from memscale.config import Config
from memscale.model.inputs import Call, LossFn, build_call, read_call
from memscale.verify.fit import sole_device
from memscale.verify.report import Difference, VerifyError, VerifyReport
from memscale.verify.search import verify_step
from memscale.verify.step import Executor, Step

__all__ = [
    "Difference",
    "FirstBatchCheck",
    "VerifyError",
    "VerifyReport",
    "verify_at_wrap",
    "verify_correctness",
]

_log = logging.getLogger("memscale")

# Of a sample that is built: batch norm wants more than one.
_BATCH = 2
_LENGTH = 128


def verify_correctness(
    model: nn.Module,
    sample_input: Any = None,
    *,
    loss_fn: LossFn | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    config: Config | None = None,
    policy: Any = None,
    min_bytes: int | None = None,
    tolerance: float = 0.0,
) -> VerifyReport:
    """Compare a training step of the plain model with one of the wrapped model.

    A wrapped model is verified as it is wrapped. Any other is wrapped for this call:
    by ``config``, or by a replay ``policy`` (and ``min_bytes``; see memscale.replay).
    ``sample_input`` and ``loss_fn``: as for memscale.estimate. ``optimizer``: not
    stepped; parameters that it does not hold are reported as untrained.
    ``tolerance``: how far a number may be off, as a part of the largest number of its
    tensor; 0, which exact techniques promise, means every bit.

    If the plain step is predicted not to fit into the device's free memory, a smaller
    batch is compared, else a shorter sequence, else each layer by itself:
    ``VerifyReport.how``. Raises what the plain model raises; an error of the wrapped
    one is a finding, and in the report.
    """
    _check_arguments(model, config, policy, min_bytes, tolerance)
    if sample_input is None:
        call = build_call(model, _BATCH, _length(model))
    else:
        call = read_call(sample_input, loss_fn)
    with _wrapped(model, config, policy, min_bytes) as executor:
        device = sole_device(model)
        step = Step(model, call, loss_fn, executor, device, config or Config())
        report = verify_step(step, tolerance)
    if optimizer is not None:
        _note_not_held(model, optimizer, report)
    if sample_input is None:
        report.notes.append(f"the sample was built: {call.source}")
    return report


def _check_arguments(
    model: nn.Module,
    config: Config | None,
    policy: Any,
    min_bytes: int | None,
    tolerance: float,
) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"config must be a Config, got {type(config).__name__}")
    if config is not None and policy is not None:
        raise InputError("config or policy: one of them says how to wrap the model")
    if min_bytes is not None and policy is None:
        raise InputError("min_bytes goes with a policy")
    wrapped = getattr(model, EXECUTOR, None) is not None
    if wrapped and (config is not None or policy is not None):
        raise InputError(
            "the model is wrapped already and verified as it is: leave config and "
            "policy away, or detach it first"
        )
    if not 0.0 <= tolerance < float("inf"):
        raise InputError(f"tolerance must be 0 or more, got {tolerance!r}")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise InputError(f"{name} has no shape yet: run the lazy module once")
        if parameter.is_meta:
            raise InputError(f"{name} is on the meta device: there is nothing to run")


def _length(model: nn.Module) -> int:
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return min(_LENGTH, limit) if isinstance(limit, int) and limit > 0 else _LENGTH


@contextmanager
def _wrapped(
    model: nn.Module, config: Config | None, policy: Any, min_bytes: int | None
) -> Iterator[Executor]:
    """What wraps the model; if nothing does, something does for the time being."""
    executor: Executor | None = getattr(model, EXECUTOR, None)
    if executor is not None:
        yield executor
        return
    if policy is not None:
        smallest = replay.DEFAULT_MIN_BYTES if min_bytes is None else min_bytes
        handle = replay.attach(model, policy, min_bytes=smallest)
        try:
            yield handle
        finally:
            handle.detach()
    else:
        # Verified here, not by wrap.
        executor = attach(
            model, effective(config).replace(verify_correctness=False), None
        )
        if executor is None:
            raise InputError("wrap left the model as it is: nothing to verify")
        try:
            yield executor
        finally:
            detach(model)


def _note_not_held(
    model: nn.Module, optimizer: torch.optim.Optimizer, report: VerifyReport
) -> None:
    held = {p for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in held:
            report.untrained.setdefault(name, "in no group of the optimizer")


# ---- Config(verify_correctness=True) ----


def verify_at_wrap(
    model: nn.Module,
    executor: Executor,
    sample_input: Any = None,
    config: Config | None = None,
) -> FirstBatchCheck | None:
    """Verify a model that has just been wrapped; raise VerifyError if it fails.

    For ``Config(verify_correctness=True)``. Without a sample the first batch is waited
    for: the check that is returned does it, inside the model's first call in training,
    and raises there. ``config`` is the one that wrapped it.
    """
    if sample_input is None:
        return FirstBatchCheck(model, executor, config or Config())
    _check_arguments(model, None, None, None, 0.0)
    _verify_now(model, executor, read_call(sample_input), config or Config())
    return None


def _verify_now(
    model: nn.Module, executor: Executor, call: Call, config: Config
) -> VerifyReport:
    step = Step(model, call, None, executor, sole_device(model), config)
    report = verify_step(step)
    reset = getattr(executor, "reset_stats", None)
    if reset is not None:
        reset()  # the user's training has not begun
    report.raise_if_failed()
    if config.enable_logging:
        level = logging.WARNING if report.untrained else logging.INFO
        _log.log(level, "%s", report)
    return report


class FirstBatchCheck(Hook):
    """Verifies a wrapped model at its first call in training, before it runs.

    ``report`` is None until then. ``cancel()`` takes the hook away.
    """

    def __init__(self, model: nn.Module, executor: Executor, config: Config) -> None:
        self.report: VerifyReport | None = None
        self._config = config
        self._model = weakref.ref(model)
        self._executor = executor
        # Before what wraps the model sees the call begin, which would see it twice.
        self._cancel: Callable[[], object] | None
        wraps = getattr(executor, "wraps", None)
        if wraps is not None and wraps(model):
            executor.first_checks.append(self)  # type: ignore[attr-defined]
            self._cancel = functools.partial(
                executor.first_checks.remove,  # type: ignore[attr-defined]
                self,
            )
        else:  # what is around the model, say
            self._cancel = model.register_forward_pre_hook(
                self, with_kwargs=True, prepend=True
            ).remove

    @property
    def done(self) -> bool:
        return self._cancel is None

    def cancel(self) -> None:
        cancel, self._cancel = self._cancel, None
        if cancel is not None:
            cancel()

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        # A copy that is traced has the hooks of its original.
        if model is not self._model() or self.done:
            return
        if not (model.training and torch.is_grad_enabled()):
            return
        self.cancel()  # the steps below are calls, too
        if getattr(model, EXECUTOR, None) is not self._executor:
            return  # detached before it was trained
        call = Call(args, dict(kwargs), source="the first batch")
        self.report = _verify_now(model, self._executor, call, self._config)
