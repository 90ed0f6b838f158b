"""Which layer is the first that computes something else: see memscale.verify."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from memscale.model.layers import find_layers
from memscale.verify.compare import difference, named_tensors, on_host, within

__all__ = ["LayerLog", "find_suspects", "innermost_layers", "watch_layers"]

LayerCall = tuple[str, int]  # a layer, and its how manieth call
Key = tuple[LayerCall, str, str]  # what of the call: _OUTPUT … ; which tensor of it

_OUTPUT = "output"
_OUTPUT_GRADIENT = "gradient of output"
_INPUT_GRADIENT = "gradient of input"


@dataclass
class LayerLog:
    """What each layer computed in a step, or where that differs from ``plain``."""

    plain: LayerLog | None = None
    tolerance: float = 0.0
    order: list[LayerCall] = field(default_factory=list)  # as they returned
    values: dict[Key, torch.Tensor] = field(default_factory=dict)
    seen: set[Key] = field(default_factory=set)
    different: set[tuple[LayerCall, str]] = field(default_factory=set)

    def note(self, call: LayerCall, kind: str, name: str, tensor: torch.Tensor) -> None:
        key = (call, kind, name)
        self.seen.add(key)
        if self.plain is None:
            self.values[key] = on_host(tensor)
            return
        before = self.plain.values.get(key)
        if before is None or not within(
            difference(before, tensor), before, self.tolerance
        ):
            self.different.add((call, kind))

    def finish(self) -> None:
        """What the plain step had and this one has not is different, too."""
        if self.plain is not None:
            for call, kind, _ in self.plain.seen - self.seen:
                self.different.add((call, kind))


@contextmanager
def watch_layers(model: nn.Module, log: LayerLog) -> Iterator[None]:
    """While on, ``log`` gets each layer's outputs and gradients."""
    calls: defaultdict[str, int] = defaultdict(int)
    running: list[LayerCall] = []

    def before(name: str, args: Any, kwargs: Any) -> None:
        call = (name, calls[name])
        calls[name] += 1
        running.append(call)
        watch_gradients(call, _INPUT_GRADIENT, (args, kwargs))

    def after(name: str, output: Any) -> None:
        call = running.pop()
        log.order.append(call)
        for which, tensor in named_tensors(output, ""):
            log.note(call, _OUTPUT, which, tensor)
        watch_gradients(call, _OUTPUT_GRADIENT, output)

    def watch_gradients(call: LayerCall, kind: str, value: Any) -> None:
        for which, tensor in named_tensors(value, ""):
            if tensor.requires_grad:
                # Taken away again: it may be a parameter.
                handle = tensor.register_hook(  # type: ignore[no-untyped-call]
                    lambda gradient, which=which: log.note(call, kind, which, gradient)
                )
                stack.callback(handle.remove)

    with ExitStack() as stack:
        for name, module in find_layers(model).modules.items():
            handle = module.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: before(name, args, kwargs),
                with_kwargs=True,
            )
            stack.callback(handle.remove)
            handle = module.register_forward_hook(
                lambda _, args, output, name=name: after(name, output)
            )
            stack.callback(handle.remove)
        yield
    log.finish()


def innermost_layers(model: nn.Module) -> list[str]:
    """Layers that have no other layer inside them."""
    layers = find_layers(model)
    inside = {id(m) for m in layers.modules.values()}
    return [
        name
        for name, module in layers.modules.items()
        if name in layers.blocks
        or not any(id(m) in inside for m in module.modules() if m is not module)
    ]


def find_suspects(
    model: nn.Module, log: LayerLog, parameters: set[nn.Parameter]
) -> list[str]:
    """The layers that may be the first to compute something else, likeliest first.

    ``log`` has been compared with the plain step's, ``parameters`` are those whose
    gradients differ. Forward: the first layer whose output differs. If none does,
    backward: the last layer that got the right gradient of its output, and made a
    wrong one of its input or of a parameter of its own. There may be several: what
    arrives at an input is the sum over all who use that tensor.
    """
    plain = log.plain
    assert plain is not None
    for call in plain.order:
        if (call, _OUTPUT) in log.different:
            return [call[0]]
    owned = _owned_parameters(model)
    innermost = set(innermost_layers(model))
    suspects: list[str] = []
    for call in reversed(plain.order):
        name = call[0]
        if name not in innermost:
            continue
        if (call, _OUTPUT_GRADIENT) in log.different:
            # Ops around the layers made it, unless a suspect did.
            if not suspects:
                return [_around(name, plain.order)]
        elif (call, _INPUT_GRADIENT) in log.different or owned[name] & parameters:
            suspects.append(name)
    return list(dict.fromkeys(suspects)) or _owners(model, parameters)


def _around(name: str, order: list[LayerCall]) -> str:
    """The layer that calls this one."""
    names = {call[0] for call in order}
    while name:
        name = name.rpartition(".")[0]
        if name in names:
            return name
    return ""


def _owned_parameters(model: nn.Module) -> dict[str, set[nn.Parameter]]:
    """Of each layer, what belongs to no other."""
    owners: defaultdict[nn.Parameter, set[str]] = defaultdict(set)
    for name, held in _held_parameters(model).items():
        for parameter in held:
            owners[parameter].add(name)
    owned: defaultdict[str, set[nn.Parameter]] = defaultdict(set)
    for parameter, names in owners.items():
        if len(names) == 1:
            owned[next(iter(names))].add(parameter)
    return owned


def _held_parameters(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    layers = find_layers(model)
    return {
        name: list(module.parameters(recurse=name in layers.blocks))
        for name, module in layers.modules.items()
    }


def _owners(model: nn.Module, parameters: set[nn.Parameter]) -> list[str]:
    """Any layer that has one of them: the last."""
    held = _held_parameters(model)
    names = [name for name, own in held.items() if parameters.intersection(own)]
    return names[-1:]
