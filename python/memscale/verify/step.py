"""One training step, everything that it computed, and two of them compared."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from memscale.config import Config
from memscale.model.inputs import Call, LossFn, find_loss
from memscale.model.randomness import same_randomness
from memscale.trace.training_step import TrainingStep
from memscale.verify.compare import difference, named_tensors, on_host, within
from memscale.verify.report import Difference
from memscale.verify.state import State, random_states

__all__ = [
    "Comparison",
    "Executor",
    "Result",
    "Step",
    "compare",
    "fresh",
    "gradient_of",
    "no_autocast",
    "said",
    "without_noise",
]

# Of the plain step: how much more than two plain steps differ is still the same.
_NOISE = 10.0


class Executor(Protocol):
    """What wraps a model."""

    def paused(self) -> AbstractContextManager[Any]: ...


@dataclass
class Result:
    """What a step computed, by name, on the host."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    trained: list[str] = field(default_factory=list)  # parameters with a gradient
    loss_source: str = ""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self.tensors[name] = on_host(tensor)


@dataclass
class Step:
    """A step that can be run again and again from the same state."""

    model: nn.Module
    call: Call
    loss_fn: LossFn | None
    executor: Executor
    device: torch.device | None = None  # where the inputs go; None: they stay
    config: Config = field(default_factory=Config)

    def training(self) -> TrainingStep:
        """The step to estimate: forward and backward, no optimizer."""
        return TrainingStep.of_call(self.model, self.call, None, self.loss_fn)

    def roots(self) -> dict[str, nn.Module]:
        """Modules with parameters, by the prefix of their names."""
        roots = {"": self.model}
        if isinstance(self.loss_fn, nn.Module):
            roots["loss_fn."] = self.loss_fn
        return roots

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for prefix, root in self.roots().items():
            for name, parameter in root.named_parameters():
                yield prefix + name, parameter

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for prefix, root in self.roots().items():
            for name, buffer in root.named_buffers():
                yield prefix + name, buffer

    def run(self, state: State, *, plain: bool) -> Result:
        """Forward, loss and backward; ``state`` and random states are as before."""
        result = Result()
        try:
            with ExitStack() as stack:
                stack.enter_context(same_randomness())
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.enable_grad())
                if plain:
                    stack.enter_context(self.executor.paused())
                if not self.model.training:
                    self.model.train()
                inputs = fresh(self.call, self.device)
                self._forward_backward(inputs, result)
                self._collect(inputs, state, result)
        except Exception as error:
            which = "the plain" if plain else "the wrapped"
            error.add_note(f"memscale called {which} model with {self.call}")
            raise
        finally:
            state.reset()
        return result

    def _forward_backward(self, inputs: Call, result: Result) -> None:
        # Weights that autocast has cast are part of the step that cast them.
        torch.clear_autocast_cache()
        loss = self._forward(inputs, result)
        torch.clear_autocast_cache()
        if loss is not None:
            result.add("loss", loss)
            with no_autocast():
                loss.backward()

    def _forward(self, inputs: Call, result: Result) -> Any:
        # A function of its own: nothing but the loss outlives the forward.
        output = inputs.run(self.model)
        for name, tensor in named_tensors(output, "output"):
            result.add(name, tensor)
        loss, result.loss_source = find_loss(output, inputs, self.loss_fn)
        return loss

    def _collect(self, inputs: Call, state: State, result: Result) -> None:
        for name, tensor in _named_inputs(inputs):
            if tensor.grad is not None:
                result.add(gradient_of(name), tensor.grad)
        for name, buffer in self.buffers():
            result.add(f"buffer {name}", buffer)
        for name, parameter in self.parameters():
            # Few models write into their weights as they run.
            if difference(state.was(parameter), parameter) is not None:
                result.add(f"parameter {name}", parameter)
            if parameter.grad is not None:
                result.add(gradient_of(name), parameter.grad)
                result.trained.append(name)
        result.tensors.update(random_states())


def _named_inputs(call: Call) -> Iterator[tuple[str, torch.Tensor]]:
    yield from named_tensors(call.args, "input")
    yield from named_tensors(call.kwargs, "input")


def no_autocast() -> AbstractContextManager[Any]:
    """Backward comes after ``with torch.autocast``."""
    stack = ExitStack()
    accelerator = torch.accelerator.current_accelerator()
    for kind in {"cpu", accelerator.type if accelerator is not None else "cpu"}:
        if torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def fresh(call: Call, device: torch.device | None) -> Call:
    """The same call on tensors of its own: a model may write into its inputs."""
    made: dict[int, torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            there = tensor.detach().to(device or tensor.device, copy=True)
            made[id(tensor)] = there.requires_grad_(tensor.requires_grad)
        return made[id(tensor)]

    return call.map_tensors(copy)


def gradient_of(name: str) -> str:
    return f"gradient of {name}"


def said(error: Exception) -> str:
    """An error as one line."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


@dataclass
class Comparison:
    """Two results."""

    differing: list[Difference] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    num_compared: int = 0

    @property
    def equal(self) -> bool:
        return not (self.differing or self.missing)

    def names(self) -> set[str]:
        return {entry.name for entry in self.differing}


def compare(plain: Result, wrapped: Result, tolerance: float = 0.0) -> Comparison:
    """What the wrapped step has otherwise than the plain one."""
    gradients = set(plain.trained) - set(wrapped.trained)
    found = Comparison(missing=[name for name in plain.trained if name in gradients])
    missing = set(map(gradient_of, gradients))
    for name in {**plain.tensors, **wrapped.tensors}:
        if name in missing:
            continue
        found.num_compared += 1
        a, b = plain.tensors.get(name), wrapped.tensors.get(name)
        if a is None or b is None:
            found.differing.append(Difference(name, math.inf))
            continue
        max_abs = difference(a, b)
        if max_abs is not None and not within(max_abs, a, tolerance):
            found.differing.append(Difference(name, max_abs))
    return found


def without_noise(
    found: Comparison, noise: Comparison
) -> tuple[list[Difference], list[str]]:
    """What two plain steps do not explain, and what they do.

    A model whose own kernels do not give the same twice (atomic additions on a card)
    cannot be compared to the bit.
    """
    limits = {entry.name: _NOISE * entry.max_abs for entry in noise.differing}
    real = [d for d in found.differing if d.max_abs > limits.get(d.name, -1.0)]
    explained = found.names() - {entry.name for entry in real}
    return real, [name for name in limits if name in explained]
