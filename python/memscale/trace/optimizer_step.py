"""An optimizer's step, traced on fake parameters.

Parameters of the same shape are stepped alike, so one of each kind is stepped and
stands for the others: a model of many layers costs no more than one of few.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.optim.optimizer as torch_optimizer
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from memscale._C import InputError, Recorder
from memscale.model.optimizers import innermost_optimizer
from memscale.optim.adam import EXACT, EightBit
from memscale.trace.repeated_layers import has_gradient

__all__ = [
    "OptimizerLike",
    "describe_optimizer",
    "optimizer_names",
    "trace_step",
]

OptimizerLike = (
    str
    | torch.optim.Optimizer
    | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    | None
)


def optimizer_names() -> dict[str, type[torch.optim.Optimizer]]:
    """torch's optimizers by their names in lower case."""
    return {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
    }


def describe_optimizer(optimizer: OptimizerLike) -> str:
    if optimizer is None:
        return "none"
    if isinstance(optimizer, str):
        return _by_name(optimizer).__name__
    if isinstance(optimizer, torch.optim.Optimizer):
        return type(innermost_optimizer(optimizer)).__name__
    if not callable(optimizer):
        raise InputError(
            "optimizer must be a name, an optimizer, a function that makes one or "
            f"None, got {optimizer!r}"
        )
    return getattr(getattr(optimizer, "func", optimizer), "__name__", repr(optimizer))


def _by_name(name: str) -> type[torch.optim.Optimizer]:
    names = optimizer_names()
    if name.lower() not in names:
        raise InputError(
            f"optimizer must be one of {', '.join(sorted(names))}, an optimizer "
            f"or a function that makes one, got {name!r}"
        )
    return names[name.lower()]


def trace_step(
    recorder: Recorder,
    optimizer: OptimizerLike,
    fake_of: dict[nn.Parameter, torch.Tensor],
) -> None:
    """Record one step over the parameters that have a gradient.

    ``fake_of`` gives each parameter of the model its fake. The caller is in the
    fake mode and has set the phase.
    """
    if optimizer is None:
        return
    if isinstance(optimizer, torch.optim.Optimizer):
        stepped, copies = _fake_twin(innermost_optimizer(optimizer), fake_of)
    else:
        make: Callable[[Any], Any] = (
            _by_name(optimizer) if isinstance(optimizer, str) else optimizer
        )
        groups, copies = _representatives(
            [{"params": [fake for fake in fake_of.values() if fake.requires_grad]}], {}
        )
        if not copies:
            return
        stepped = make(groups[0]["params"])
        if not isinstance(stepped, torch.optim.Optimizer):
            raise InputError(
                "optimizer must make a torch.optim.Optimizer, "
                f"got {type(stepped).__name__}"
            )
        if not _steps_one_by_one(stepped):
            everything = [p for p in fake_of.values() if has_gradient(p)]
            _fill_gradients(everything)
            stepped, copies = make(everything), {p: [p] for p in everything}
    for parameter, alike in copies.items():
        recorder.set_stands_for(parameter, alike)
        if parameter.grad is not None:
            recorder.set_stands_for(parameter.grad, alike)
    closure = inspect.signature(stepped.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise InputError(
            f"optimizer must step without a closure, got {type(stepped).__name__}: "
            "what it keeps depends on how often it evaluates the loss"
        )
    with _fakes_count_as_parameters():
        _without_hooks(type(stepped).step)(stepped)
    for parameter, state in stepped.state.items():
        for leaf in pytree.tree_leaves(state):
            if isinstance(leaf, torch.Tensor):
                recorder.set_state(leaf, parameter)


def _without_hooks(step: Any) -> Any:
    """The step that torch has put its hooks around: those of the process too."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _fill_gradients(parameters: list[torch.Tensor]) -> None:
    """Tensors for gradients of repeated layers; their bytes are counted already."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)


def _steps_one_by_one(optimizer: torch.optim.Optimizer) -> bool:
    """Whether what happens to a parameter depends on that parameter alone."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim") or isinstance(optimizer, EightBit)


def _representatives(
    groups: list[dict[str, Any]], bits_of: dict[torch.Tensor, int]
) -> tuple[list[dict[str, Any]], dict[torch.Tensor, list[torch.Tensor]]]:
    """The groups with one parameter of each kind, and which it stands for.

    ``bits_of``: what an 8-bit optimizer was told of single parameters.
    """
    copies: dict[torch.Tensor, list[torch.Tensor]] = {}
    reduced = []
    for group in groups:
        first: dict[Any, torch.Tensor] = {}
        for parameter in group["params"]:
            if not has_gradient(parameter):
                continue
            kind = (
                parameter.shape,
                parameter.stride(),
                parameter.dtype,
                bits_of.get(parameter),
            )
            alike = copies.pop(first[kind], []) if kind in first else []
            alike.append(parameter)
            # Of a repeated layer the gradient is known, but there is no tensor.
            if parameter.grad is not None or kind not in first:
                first[kind] = parameter
            copies[first[kind]] = alike
        if first:
            reduced.append({**group, "params": list(first.values())})
    return reduced, copies


def _fake_twin(
    optimizer: torch.optim.Optimizer, fake_of: dict[nn.Parameter, torch.Tensor]
) -> tuple[torch.optim.Optimizer, dict[torch.Tensor, list[torch.Tensor]]]:
    """The same optimizer, its settings and code, over fakes and with no state."""
    for name in ("param_groups", "state"):
        # Setting it on a twin would set it on what is behind it.
        if isinstance(getattr(type(optimizer), name, None), property):
            raise InputError(
                f"optimizer must hold its {name} itself, got "
                f"{type(optimizer).__name__}, which passes on those of another"
            )
    missing = [
        list(p.shape)
        for group in optimizer.param_groups
        for p in group["params"]
        if p not in fake_of
    ]
    if missing:
        raise InputError(
            f"optimizer must be over the model's parameters, got {len(missing)} "
            f"others, the first of shape {missing[0]}"
        )
    groups = [
        {
            **copy.deepcopy(
                {k: v for k, v in group.items() if k not in ("params", EXACT)}
            ),
            "params": [fake_of[p] for p in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    bits_of: dict[torch.Tensor, int] = {}
    if isinstance(optimizer, EightBit):
        told = optimizer._bits_of
        bits_of = {fake: told[p] for p, fake in fake_of.items() if p in told}
    if _steps_one_by_one(optimizer):
        groups, copies = _representatives(groups, bits_of)
    else:
        copies = {p: [p] for group in groups for p in group["params"]}
        _fill_gradients([p for p in copies if has_gradient(p)])
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    # A scheduler's, which would step the optimizer itself.
    twin.__dict__.pop("step", None)
    twin.param_groups = groups
    twin.state = defaultdict(dict)
    if isinstance(twin, EightBit):
        twin._bits_of = bits_of
    for name, value in list(vars(twin).items()):
        if name.endswith("_hooks"):  # the user's are for the user's steps
            setattr(twin, name, type(value)())
    return twin, copies


@contextmanager
def _fakes_count_as_parameters() -> Iterator[None]:
    """torch steps lists of tensors at a time only if it knows their type."""
    types = torch_optimizer._foreach_supported_types
    types.append(FakeTensor)
    try:
        yield
    finally:
        types.remove(FakeTensor)
