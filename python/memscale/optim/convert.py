"""A live torch.optim.Adam or AdamW made 8-bit in place, and back.

The object stays, so that schedulers and Trainers keep their reference; its class
changes, and its state one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _get_scalar_dtype

from memscale._C import MIN_8BIT_ELEMENTS, InputError
from memscale.optim import state as states
from memscale.optim.adam import (
    EXACT,
    OPTIONS,
    OVERRIDES,
    EightBit,
    Group,
    check_group,
    is_ours,
    pop_exact,
)
from memscale.optim.classes import Adam8bit, AdamW8bit

__all__ = ["from_8bit", "is_8bit", "to_8bit", "why_not_8bit"]


# torch's, and ours that it becomes.
_CLASSES: dict[type[torch.optim.Adam], type[EightBit]] = {
    torch.optim.Adam: Adam8bit,
    torch.optim.AdamW: AdamW8bit,
}


def is_8bit(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is an Adam8bit or AdamW8bit, made so or converted."""
    return isinstance(optimizer, EightBit)


def why_not_8bit(
    optimizer: torch.optim.Optimizer, options: dict[str, Any] = OPTIONS
) -> str | None:
    """None if ``to_8bit`` can convert it, else the reason."""
    name = type(optimizer).__name__
    if type(optimizer) not in _CLASSES:
        return f"{name} is not torch.optim.Adam or AdamW; its state stays as it is"
    for group in optimizer.param_groups:
        try:
            check_group({**options, **group})
        except InputError as error:
            return f"{name} cannot be 8-bit: {error}"
    return None


def is_plain_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is torch's own Adam or AdamW, with options that 8-bit state has."""
    return why_not_8bit(optimizer) is None


@torch.no_grad()
def to_8bit(
    optimizer: torch.optim.Optimizer,
    *,
    min_8bit_size: int = MIN_8BIT_ELEMENTS,
    stochastic_rounding: bool = False,
    keep_32: Iterable[Tensor] = (),
) -> str | None:
    """Make ``optimizer`` the 8-bit one of its kind; None, or why it was left alone.

    ``keep_32``: parameters whose state stays in 32 bits, as by ``set_bits``.

    Exactly torch.optim.Adam and AdamW are converted: what a subclass does with its
    state is not known. A group that has ``bits=32`` of its own keeps 32. An error
    leaves the optimizer unconverted: see Note [Never half converted].
    """
    if is_8bit(optimizer):
        return None
    options = {
        **OPTIONS,
        "min_8bit_size": min_8bit_size,
        "stochastic_rounding": stochastic_rounding,
    }
    why_not = why_not_8bit(optimizer, options)
    if why_not is not None:
        return why_not
    new_class = _CLASSES[type(optimizer)]  # type: ignore[index]
    # Of a state_dict of ours that torch's optimizer has loaded.
    overrides = {
        group["params"][i]: bits
        for group in optimizer.param_groups
        for i, bits in group.get(OVERRIDES, {}).items()
    } | dict.fromkeys(keep_32, 32)
    exact = {
        p: value
        for group in optimizer.param_groups
        for p, value in pop_exact({**group}).items()
    }

    def convert(p: Tensor, group: Group) -> states.State:
        state = optimizer.state[p]
        settings = {**options, **group}
        if not is_ours(p, settings):
            return state  # type: ignore[no-any-return]
        # torch has it on the device for its fused kernel, and as a number once.
        step = torch.tensor(float(state["step"]), dtype=torch.float32)
        state = {**state, "step": step}
        bits = EightBit._bits(p, settings, overrides)
        saved = states.from_exact(p, state, bits, exact.get(p))
        if saved is not None:
            return saved
        return states.to_8bit(p, state) if bits == 8 else states.to_float32(p, state)

    def keep(p: Tensor) -> states.State:
        state = optimizer.state[p]
        return {key: state[key] for key in state if key.endswith("_absmax")}

    def undo(p: Tensor, group: Group, absmax: states.State) -> states.State:
        return _torch_state(p, group, optimizer.state[p]) | absmax

    _convert_all(optimizer, convert, keep, undo, largest_first=True)
    own = tuple(frozenset(OPTIONS.keys() & g) for g in optimizer.param_groups)
    for group in optimizer.param_groups:
        group.pop(OVERRIDES, None)
        group.pop(EXACT, None)
        for name, value in options.items():
            group.setdefault(name, value)
    optimizer.defaults.update(options)
    _become(optimizer, new_class)
    assert isinstance(optimizer, EightBit)
    optimizer._bits_of = overrides
    optimizer._own_options = own
    return None


@torch.no_grad()
def from_8bit(optimizer: torch.optim.Optimizer) -> None:
    """Make ``optimizer`` the torch.optim.Adam or AdamW again that it was, or is like.

    Class, attributes, options and state layout are those of one never converted;
    options of ours that a group had before ``to_8bit`` stay in it. The
    moments are what 8 bits kept of them: within half a step between two codes.
    """
    old_class = next(
        (old for old, new in _CLASSES.items() if type(optimizer) is new), None
    )
    if old_class is None:
        raise InputError(
            "optimizer must be an Adam8bit or AdamW8bit, "
            f"got {type(optimizer).__name__}"
        )

    def convert(p: Tensor, group: Group) -> states.State:
        return _torch_state(p, group, optimizer.state[p])

    def keep(p: Tensor) -> Any:
        state = optimizer.state[p]
        # Floats of 16 bits do not give the bytes back.
        if not states.is_8bit(state) or p.dtype != torch.float32:
            return state
        return {name: state[f"{name}_absmax"] for name, _ in states.MOMENTS}

    def undo(p: Tensor, group: Group, kept: Any) -> states.State:
        if "step" in kept:
            return kept  # type: ignore[no-any-return]
        state = optimizer.state[p]
        step = torch.tensor(float(state["step"]), dtype=torch.float32)
        return states.to_8bit_again({**state, "step": step}, kept)

    _convert_all(optimizer, convert, keep, undo, largest_first=False)
    assert isinstance(optimizer, EightBit)
    added = repeat(frozenset[str]())  # groups of later have none
    owned = chain(optimizer._own_options, added)
    for group, own in zip(optimizer.param_groups, owned, strict=False):
        for name in OPTIONS.keys() - own:
            group.pop(name, None)
    for name in OPTIONS:
        optimizer.defaults.pop(name, None)
    for name in ("_bits_of", "_own_options"):
        optimizer.__dict__.pop(name, None)
    _become(optimizer, old_class)


def _become(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Adam]) -> None:
    optimizer.__class__ = kind
    # What torch's constructor does for step hooks and the profiler, once a class.
    optimizer._patch_step_function()


def _torch_state(p: Tensor, group: Group, state: states.State) -> states.State:
    """A state of ours in torch's layout; one of torch's as it is."""
    if not is_ours(p, group):
        return state
    result = states.as_torch(p, state)
    on_device = group["capturable"] or group["fused"]
    result["step"] = state["step"].to(
        device=p.device if on_device else torch.device("cpu"),
        dtype=_get_scalar_dtype(is_fused=group["fused"]),  # type: ignore[no-untyped-call]
    )
    return result


def _with_state(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, Group]]:
    seen = set()
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p not in seen and optimizer.state.get(p):
                seen.add(p)
                yield p, group


def _convert_all(
    optimizer: torch.optim.Optimizer,
    convert: Callable[[Tensor, Group], states.State],
    keep: Callable[[Tensor], Any],
    undo: Callable[[Tensor, Group, Any], states.State],
    *,
    largest_first: bool,
) -> None:
    """Replace each parameter's state, or none.

    Note [Never half converted]: one parameter at a time, so that no more than one is
    held in both forms. To 8 bits the largest goes first: it needs most, and what it
    leaves is enough for each that follows, so that memory can only run out while
    nothing has been done. Should anything else fail later, or memory run out on the
    way back to floats, what was done is undone: back to the very bytes, from absmax or
    (16-bit parameters) from the bytes themselves, held until the end; but floats that
    were 8 bits for a moment come back as what those kept.
    """
    todo = sorted(
        _with_state(optimizer),
        key=lambda each: each[0].numel(),
        reverse=largest_first,
    )
    done: list[tuple[Tensor, Group, Any]] = []
    try:
        for p, group in todo:
            before = keep(p)
            optimizer.state[p] = convert(p, group)
            done.append((p, group, before))
    except BaseException:
        for p, group, before in reversed(done):
            optimizer.state[p] = undo(p, group, before)
        raise
