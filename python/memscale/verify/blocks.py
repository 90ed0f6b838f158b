"""Layer by layer, where a whole plain step does not fit: see memscale.verify.

The wrapped model runs forward once, and what each layer is called with is copied
to the host. Then one layer after the other runs forward and backward on that, plain
and wrapped.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from memscale.model.randomness import same_randomness
from memscale.trace.shell import DeepCopies
from memscale.verify.compare import named_tensors, on_host
from memscale.verify.differing_layer import innermost_layers
from memscale.verify.report import Difference
from memscale.verify.state import State, random_states, unchanged
from memscale.verify.step import (
    Result,
    Step,
    compare,
    fresh,
    gradient_of,
    no_autocast,
    said,
)

__all__ = ["BlockFindings", "verify_layers"]

_SEED = 0  # of the gradients that layers are given


@dataclass
class BlockFindings:
    """What came of the layers, in the order in which they were called."""

    differing: list[Difference] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)  # that differ
    trained: set[str] = field(default_factory=set)
    compared: set[str] = field(default_factory=set)  # layers
    unchecked: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # of the wrapped layer only
    num_compared: int = 0


@dataclass
class _Captured:
    layer: str
    title: str  # with the number of the call, if there are several
    arguments: Any  # (args, kwargs); tensors on the host. None: not to be copied
    why_not: str = ""


def verify_layers(
    step: Step, state: State, tolerance: float, names: list[str] | None = None
) -> BlockFindings:
    """Compare the innermost layers (or those of ``names``), each by itself."""
    if names is None:
        names = innermost_layers(step.model)
    findings = BlockFindings()
    for captured in _capture(step, state, names):
        _verify_one(step, captured, tolerance, findings)
    findings.missing = list(dict.fromkeys(findings.missing))
    return findings


# ---- what layers are called with ----


def _capture(step: Step, state: State, names: list[str]) -> list[_Captured]:
    model = step.model
    modules = {name: model.get_submodule(name) for name in names}
    captured: list[_Captured] = []
    calls: Counter[str] = Counter()
    copier = _HostCopies(model)

    def capture(name: str, args: Any, kwargs: Any) -> None:
        calls[name] += 1
        title = name if calls[name] == 1 else f"{name} (call {calls[name]})"
        entry = _Captured(name, title, None)
        captured.append(entry)
        try:
            entry.arguments = copier.copy((args, kwargs))
        except Exception as error:
            entry.why_not = said(error)

    try:
        with ExitStack() as stack:
            stack.enter_context(same_randomness())
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            if not model.training:
                model.train()
            for name, module in modules.items():
                handle = module.register_forward_pre_hook(
                    lambda _, args, kwargs, name=name: capture(name, args, kwargs),
                    with_kwargs=True,
                )
                stack.callback(handle.remove)
            fresh(step.call, step.device).run(model)
    finally:
        torch.clear_autocast_cache()
        state.reset()
    return captured


def _deep_copy(
    value: Any, model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]
) -> Any:
    """A copy, whatever holds the tensors (a cache of keys, say); the model is not."""
    parts = [*model.modules(), *model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {id(part): part for part in parts}
    with DeepCopies(change):
        return copy.deepcopy(value, memo)


class _HostCopies:
    """Copies on the host; of a tensor that many layers are given, one."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._made: dict[int, tuple[Any, int, torch.Tensor]] = {}

    def copy(self, value: Any) -> Any:
        return _deep_copy(value, self._model, self._host)

    def _host(self, tensor: torch.Tensor) -> torch.Tensor:
        alive, version, made = self._made.get(id(tensor), (lambda: None, 0, None))
        if alive() is not tensor or version != tensor._version or made is None:
            made = on_host(tensor).requires_grad_(tensor.requires_grad)
            self._made[id(tensor)] = (weakref.ref(tensor), tensor._version, made)
        return made


# ---- one layer ----


def _verify_one(
    step: Step, captured: _Captured, tolerance: float, findings: BlockFindings
) -> None:
    name, title = captured.layer, captured.title
    if captured.arguments is None:
        findings.unchecked.append(f"{title}: its arguments: {captured.why_not}")
        return
    layer = step.model.get_submodule(name)
    with unchanged(layer) as state:
        plain = _try_layer(step, captured, state, plain=True)
        if isinstance(plain, str):
            findings.unchecked.append(f"{title}: alone it raised {plain}")
            return
        wrapped = _try_layer(step, captured, state, plain=False)
    findings.compared.add(name)
    findings.trained.update(plain.trained)
    if isinstance(wrapped, str):
        findings.errors.append(f"{wrapped} in {title}")
        findings.layers.append(name)
        return
    found = compare(plain, wrapped, tolerance)
    findings.num_compared += found.num_compared
    findings.differing += found.differing
    findings.missing += found.missing
    if not found.equal:
        findings.layers.append(name)


def _try_layer(
    step: Step, captured: _Captured, state: State, *, plain: bool
) -> Result | str:
    try:
        return _run_layer(step, captured, state, plain=plain)
    except Exception as error:
        message = said(error)
    gc.collect()  # the error's traceback held tensors
    return message


def _run_layer(step: Step, captured: _Captured, state: State, *, plain: bool) -> Result:
    layer = step.model.get_submodule(captured.layer)
    leaves: list[torch.Tensor] = []

    def on_device(tensor: torch.Tensor) -> torch.Tensor:
        there = tensor.detach().to(step.device or tensor.device, copy=True)
        if not tensor.requires_grad:
            return there
        leaves.append(there.requires_grad_())
        return there.clone()  # a layer may write into what it is given

    result = Result()
    try:
        with ExitStack() as stack:
            stack.enter_context(same_randomness())
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            args, kwargs = _deep_copy(captured.arguments, step.model, on_device)
            if plain:
                stack.enter_context(step.executor.paused())
            torch.clear_autocast_cache()
            with _only(step.model, layer):
                output = step.model(*args, **kwargs)
            del args, kwargs
            _backward(output, captured.title, result)
            del output
            for index, leaf in enumerate(leaves):
                if leaf.grad is not None:
                    name = f"gradient of input {index} of {captured.title}"
                    result.add(name, leaf.grad)
            _collect(step, layer, result)
    finally:
        torch.clear_autocast_cache()
        state.reset()
    return result


@contextmanager
def _only(model: nn.Module, layer: nn.Module) -> Iterator[None]:
    """The model's forward is that layer's: what wraps the model works as ever."""
    if layer is model:
        yield
        return
    before = vars(model).get("forward")
    model.forward = lambda *args, **kwargs: layer(*args, **kwargs)  # type: ignore[method-assign]
    try:
        yield
    finally:
        if before is None:
            del model.forward
        else:
            model.forward = before


def _backward(output: Any, title: str, result: Result) -> None:
    generator = torch.Generator().manual_seed(_SEED)
    ends: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    for name, tensor in named_tensors(output, f"output of {title}"):
        result.add(name, tensor)
        if tensor.requires_grad:
            gradient = torch.randn(
                tensor.shape, generator=generator, dtype=torch.float32
            )
            ends.append(tensor)
            gradients.append(gradient.to(tensor.device, tensor.dtype))
    if ends:
        with no_autocast():
            torch.autograd.backward(ends, gradients)


def _collect(step: Step, layer: nn.Module, result: Result) -> None:
    held = {id(tensor) for tensor in (*layer.parameters(), *layer.buffers())}
    for name, buffer in step.buffers():
        if id(buffer) in held:
            result.add(f"buffer {name}", buffer)
    for name, parameter in step.parameters():
        if id(parameter) in held and parameter.grad is not None:
            result.add(gradient_of(name), parameter.grad)
            result.trained.append(name)
    result.tensors.update(random_states())
