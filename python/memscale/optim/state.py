"""Adam's moments as bytes and as floats, one parameter at a time.

A parameter's state is plain tensors. At 8 bits: ``step`` (a float on the CPU, as
torch has it), ``exp_avg_codes`` and ``exp_avg_sq_codes`` of the parameter's shape and
layout, ``exp_avg_absmax`` and ``exp_avg_sq_absmax``, a number for every block of codes
as they lie in memory. At 32 bits: ``step``, ``exp_avg`` and ``exp_avg_sq``, float32, of
the parameter's layout. A parameter with gaps has the layout of its contiguous copy.

The layout is that of when the state was made: see ``laid_as``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false as is_dense

# And with it the operators. Pieces are converted at a time: temporaries of 1 MiB.
from memscale._C import STATE_BLOCK, STATE_PIECE, InputError

__all__ = [
    "FLOATS",
    "MOMENTS",
    "as_saved",
    "as_torch",
    "cast_as_torch",
    "exact_of",
    "from_exact",
    "from_saved",
    "is_8bit",
    "laid_as",
    "new_state",
    "to_8bit",
    "to_8bit_again",
    "to_float32",
]

State = dict[str, Any]

# Name, and whether its map is signed.
MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))
# Of which types parameters are stepped by our kernels.
FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})

_SIGNED_ZERO = 127  # the code of 0

_ops = torch.ops.memscale


def is_8bit(state: State) -> bool:
    return "exp_avg_codes" in state


def new_state(p: Tensor, bits: int) -> State:
    """The state before the first step."""
    state: State = {"step": torch.tensor(0.0, dtype=torch.float32, device="cpu")}
    for name, is_signed in MOMENTS:
        if bits == 8:
            zero = _SIGNED_ZERO if is_signed else 0
            state[f"{name}_codes"] = _like(p, torch.uint8).fill_(zero)
            state[f"{name}_absmax"] = torch.zeros(
                _num_blocks(p), dtype=torch.float32, device=p.device
            )
        else:
            state[name] = _like(p, torch.float32).zero_()
    return state


def laid_as(p: Tensor, state: State) -> State:
    """The same state in the order in which ``p`` lies in memory now.

    That changes with, for example, ``model.to(memory_format=torch.channels_last)``.
    Codes are then made anew, as blocks are of other elements.
    """
    held = state["exp_avg_codes" if is_8bit(state) else "exp_avg"]
    if held.shape != p.shape:
        raise InputError(
            f"param must keep its shape, {[*held.shape]}, got {[*p.shape]}"
        )
    if held.stride() == p.stride() or held.stride() == _strides(p):
        return state
    if not is_8bit(state):
        return to_float32(p, state)
    result = _without_moments(state)
    for name, is_signed in MOMENTS:
        codes, absmax = state[f"{name}_codes"], state[f"{name}_absmax"]
        if _order(codes.shape, codes.stride()) != _order(p.shape, _strides(p)):
            floats = _floats_of(state, name, is_signed, torch.float32, p.device)
            floats = _in_order(floats, p)
            codes, absmax = _quantise(floats, is_signed)
        result[f"{name}_codes"] = _shaped(_flat(codes), p)
        result[f"{name}_absmax"] = absmax
    return result


def to_8bit(p: Tensor, state: State) -> State:
    """The same state at 8 bits; ``state`` is as torch's or ours at 32 bits.

    Codes are made where the floats are, so that only bytes go to a device. An absmax
    that came along from a state_dict of ours is used where it gives the same floats
    back: then these are the very bytes that were saved. It does not if someone else has
    stepped since, as torch's Adam keeps keys that it does not know.
    """
    result = _without_moments(state)
    for name, is_signed in MOMENTS:
        values = _in_order(state[name].detach(), p)
        absmax = state.get(f"{name}_absmax")
        codes = _codes_of(values, absmax, is_signed)
        if codes is None:
            codes, absmax = _quantise(values, is_signed)
        assert absmax is not None
        result[f"{name}_codes"] = _shaped(codes.to(p.device), p)
        result[f"{name}_absmax"] = absmax.to(p.device, copy=True)
    return result


def to_8bit_again(state: State, absmax: dict[str, Tensor]) -> State:
    """The 8-bit state that ``state`` was made of, from the absmax of then."""
    result = _without_moments(state)
    for name, is_signed in MOMENTS:
        codes = _encode(_flat(state[name]), absmax[name], is_signed)
        result[f"{name}_codes"] = _shaped(codes, state[name])
        result[f"{name}_absmax"] = absmax[name]
    return result


def to_float32(p: Tensor, state: State) -> State:
    """The same state at 32 bits, on the parameter's device."""
    result = _without_moments(state)
    for name, is_signed in MOMENTS:
        if is_8bit(state):
            result[name] = _floats_of(state, name, is_signed, torch.float32, p.device)
        else:
            result[name] = _like(p, torch.float32).copy_(state[name])
    return result


def as_torch(p: Tensor, state: State) -> State:
    """The same state as torch's Adam keeps it: in the parameter's type."""
    result = _without_moments(state)
    for name, is_signed in MOMENTS:
        if is_8bit(state):
            result[name] = _floats_of(state, name, is_signed, p.dtype, p.device)
        else:
            result[name] = state[name].to(p.dtype)
    return result


def as_saved(state: State) -> State:
    """What a state_dict holds: torch's keys as floats on the host, and the absmax."""
    host = torch.device("cpu")
    saved = {
        key: value.to(host, copy=True) if isinstance(value, Tensor) else value
        for key, value in state.items()
        if not key.endswith("_codes")
    }
    if is_8bit(state):
        for name, is_signed in MOMENTS:
            saved[name] = _floats_of(state, name, is_signed, torch.float32, host)
    return saved


def from_saved(p: Tensor, saved: State, bits: int, exact: Any = None) -> State:
    """The state of a state_dict, of ours or of torch's Adam; see also ``exact_of``."""
    step = torch.tensor(float(saved["step"]), dtype=torch.float32, device="cpu")
    saved = {**saved, "step": step}
    for name, _ in MOMENTS:
        if saved[name].shape != p.shape:
            raise InputError(
                f"{name} must be of the parameter's shape, {[*p.shape]}, "
                f"got {[*saved[name].shape]}"
            )
    state = from_exact(p, saved, bits, exact)
    if state is not None:
        return state
    return to_8bit(p, saved) if bits == 8 else to_float32(p, saved)


def exact_of(p: Tensor, state: State, saved: State) -> State | None:
    """What a group of a state_dict holds beside the state of a 16-bit parameter.

    Note [Through torch's load_state_dict]: it casts every tensor of a state, also those
    that it does not know, to the type of the parameter. A float32 one stays what it
    was, but in 16 bits neither absmax nor moments come back. What is in a group it
    leaves alone, and on the host. So a torch optimizer that has loaded a state_dict of
    ours, and is made 8-bit later, goes on with the very same bytes. What is float32
    already is the tensor of ``saved``: a file has it once.
    """
    if p.dtype == torch.float32:
        return None
    if not is_8bit(state):
        return {key: saved[key] for key in ("step", *dict(MOMENTS))}
    exact = {
        key: value.to("cpu", copy=True)
        for key, value in state.items()
        if key.endswith("_codes")
    }
    return exact | {key: saved[key] for key in ("step", *_absmax_names())}


def from_exact(p: Tensor, state: State, bits: int, exact: Any) -> State | None:
    """The state that ``exact_of`` wrote down, unless ``state`` is no longer that one.

    Both moments and the step are compared: of float16 moments many are 0.
    """
    ends = ("_codes", "_absmax") if bits == 8 else ("",)
    keys = [f"{name}{end}" for name, _ in MOMENTS for end in ends]
    if not isinstance(exact, dict) or any(
        not isinstance(exact.get(key), Tensor) for key in ("step", *keys)
    ):
        return None
    if float(exact["step"]) != float(state["step"]):
        return None
    result = _without_moments(state)
    for name, is_signed in MOMENTS:
        if bits != 8:
            floats = exact[name]
            if floats.dtype != torch.float32 or floats.shape != p.shape:
                return None
            if not _is_same(floats.to(state[name]), state[name]):
                return None
            result[name] = _like(p, torch.float32).copy_(floats)
            continue
        codes, absmax = exact[f"{name}_codes"], exact[f"{name}_absmax"]
        if (
            codes.dtype != torch.uint8
            or codes.shape != p.shape
            or _order(codes.shape, codes.stride()) != _order(p.shape, _strides(p))
            or absmax.dtype != torch.float32
            or absmax.shape != (_num_blocks(p),)
        ):
            return None
        values = _in_order(state[name].detach(), p)
        flat, absmax = _flat(codes).to(values.device), absmax.to(values.device)
        if not _gives(flat, absmax, is_signed, values):
            return None
        result[f"{name}_codes"] = _shaped(flat.to(p.device, copy=True), p)
        result[f"{name}_absmax"] = absmax.to(p.device, copy=True)
    return result


def cast_as_torch(p: Tensor, saved: State, group: dict[str, Any]) -> State:
    """A saved state of a parameter that torch steps, as torch would load it, copied."""
    cast = torch.optim.Optimizer._process_value_according_to_param_policy
    groups = [{**group, "params": [0]}]
    return {
        key: cast(p, value.clone(), 0, groups, key)
        if isinstance(value, Tensor)
        else value
        for key, value in saved.items()
    }


def _without_moments(state: State) -> State:
    ours = {f"{name}{end}" for name, _ in MOMENTS for end in ("", "_codes", "_absmax")}
    return {key: value for key, value in state.items() if key not in ours}


def _absmax_names() -> list[str]:
    return [f"{name}_absmax" for name, _ in MOMENTS]


def _num_blocks(p: Tensor) -> int:
    return -(-p.numel() // STATE_BLOCK)


def _strides(p: Tensor) -> tuple[int, ...]:
    """The parameter's, or those of its contiguous copy if it has gaps."""
    return p.stride() if is_dense(p) else torch.empty(p.shape, device="meta").stride()


def _order(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The strides that say where elements are: a dimension of 1 may have any."""
    return [stride for size, stride in zip(shape, strides, strict=True) if size != 1]


def _like(p: Tensor, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """An uninitialised tensor of the parameter's layout; dense if that has gaps."""
    device = p.device if device is None else device
    return torch.empty_strided(p.shape, _strides(p), dtype=dtype, device=device)


def _shaped(flat: Tensor, p: Tensor) -> Tensor:
    return flat.as_strided(p.shape, _strides(p))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _in_order(values: Tensor, p: Tensor) -> Tensor:
    """``values`` flat, in the order of the parameter's 8-bit state."""
    if not is_dense(p):
        return values.contiguous().view(-1)
    if values.stride() == p.stride():
        return _flat(values)
    return _flat(_like(p, values.dtype, values.device).copy_(values))


def _pieces(values: Tensor) -> Iterator[tuple[slice, slice]]:
    """Slices of elements and of their blocks: all, where no temporary is made."""
    count = values.numel()
    size = count if values.dtype == torch.float32 else STATE_PIECE
    for first in range(0, count, max(size, 1)):
        end = min(first + size, count)
        yield slice(first, end), slice(first // STATE_BLOCK, -(-end // STATE_BLOCK))


def _floats_of(
    state: State, name: str, is_signed: bool, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """One moment of an 8-bit state as floats on ``device``, laid as its codes.

    The bytes travel, not the floats: nothing is allocated elsewhere.
    """
    codes = state[f"{name}_codes"].to(device)
    result = torch.empty_strided(
        codes.shape, codes.stride(), dtype=dtype, device=device
    )
    absmax = state[f"{name}_absmax"].to(device)
    _dequantise(_flat(codes), absmax, is_signed, _flat(result))
    return result


def _quantise(values: Tensor, is_signed: bool) -> tuple[Tensor, Tensor]:
    codes = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    absmax = torch.empty(_num_blocks(values), device=values.device, dtype=torch.float32)
    for part, blocks in _pieces(values):
        _ops.quantise_(codes[part], absmax[blocks], values[part].float(), is_signed)
    return codes, absmax


def _encode(values: Tensor, absmax: Tensor, is_signed: bool) -> Tensor:
    codes = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    for part, blocks in _pieces(values):
        _ops.encode_(codes[part], absmax[blocks], values[part].float(), is_signed)
    return codes


def _dequantise(codes: Tensor, absmax: Tensor, is_signed: bool, values: Tensor) -> None:
    for part, blocks in _pieces(values):
        piece = values[part]
        floats = piece if piece.dtype == torch.float32 else piece.float()
        _ops.dequantise_(floats, codes[part], absmax[blocks], is_signed)
        if floats is not piece:
            piece.copy_(floats)


def _codes_of(values: Tensor, absmax: Tensor | None, is_signed: bool) -> Tensor | None:
    """The codes that ``values`` are dequantised from, if they are."""
    if not (
        isinstance(absmax, Tensor)
        and absmax.shape == (_num_blocks(values),)
        and absmax.dtype == torch.float32
        and values.dtype == torch.float32
    ):
        return None
    absmax = absmax.to(values.device)
    codes = _encode(values, absmax, is_signed)
    return codes if _gives(codes, absmax, is_signed, values) else None


def _gives(codes: Tensor, absmax: Tensor, is_signed: bool, values: Tensor) -> bool:
    """Whether ``values``, of any type, are what the codes are dequantised to."""
    for first in range(0, values.numel(), STATE_PIECE):
        part = values[first : first + STATE_PIECE]
        block = first // STATE_BLOCK
        blocks = slice(block, block + STATE_PIECE // STATE_BLOCK)
        back = torch.empty(part.shape, dtype=torch.float32, device=part.device)
        _ops.dequantise_(
            back, codes[first : first + STATE_PIECE], absmax[blocks], is_signed
        )
        if not _is_same(back.to(part.dtype), part):
            return False
    return True


def _is_same(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
