"""The step and the state_dict of the 8-bit optimizers."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._guards import TracingContext
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memscale._C import MIN_8BIT_ELEMENTS, InputError
from memscale.optim import bitsandbytes
from memscale.optim import state as states

__all__ = [
    "EXACT",
    "OPTIONS",
    "OVERRIDES",
    "EightBit",
    "Group",
    "check_group",
    "is_ours",
    "pop_exact",
]

Group = dict[str, Any]

# What a group has beside torch's options.
OPTIONS = {
    "bits": 8,
    "min_8bit_size": MIN_8BIT_ELEMENTS,
    "stochastic_rounding": False,
}
# Flags that only torch's own step knows.
_TORCHS_OWN = ("amsgrad", "capturable", "differentiable")
# In a saved group, by place in the group: bits; see states.exact_of.
OVERRIDES = "bits_of_params"
EXACT = "exact_state_of_params"


def check_group(group: Group) -> None:
    if group["bits"] not in (8, 32):
        raise InputError(f"bits must be 8 or 32, got {group['bits']!r}")
    if group["min_8bit_size"] < 0:
        raise InputError(
            f"min_8bit_size must be at least 0, got {group['min_8bit_size']!r}"
        )
    for flag in _TORCHS_OWN:
        if group["bits"] == 8 and group.get(flag, False):
            raise InputError(f"{flag} must be False with bits=8, got True")


def is_ours(p: Tensor, group: Group) -> bool:
    """Whether our kernels step ``p``; if not, torch does, with a state of its own."""
    return (
        p.dtype in states.FLOATS
        and not is_traceable_wrapper_subclass(p)  # DTensor and the like
        and not any(group.get(flag, False) for flag in _TORCHS_OWN)
    )


def pop_exact(group: Group) -> dict[Tensor, Any]:
    """What a loaded group has of EXACT, by parameter."""
    exact, params = group.pop(EXACT, {}), group["params"]
    return {params[i]: value for i, value in exact.items() if i < len(params)}


class _Held:
    """A saved state on its way through torch's load_state_dict, which would cast
    the tensors that it finds."""

    def __init__(self, state: Any) -> None:
        self.state = state


def _hold(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    held = {key: _Held(value) for key, value in state_dict["state"].items()}
    return {**state_dict, "state": held}


def _save(optimizer: torch.optim.Optimizer, packed: dict[str, Any]) -> None:
    """What torch's state_dict collected, references to the live state, as saved."""
    assert isinstance(optimizer, EightBit)
    overrides = optimizer._bits_of
    state = packed["state"]
    for group, saved in zip(
        optimizer.param_groups, packed["param_groups"], strict=True
    ):
        exact = {}
        for i, (p, key) in enumerate(
            zip(group["params"], saved["params"], strict=True)
        ):
            live = state.get(key)
            if not live:
                continue
            state[key] = states.as_saved(live)
            if is_ours(p, group):
                exact[i] = states.exact_of(p, live, state[key])
        saved.pop(EXACT, None)
        exact = {i: value for i, value in exact.items() if value is not None}
        if exact:
            saved[EXACT] = exact
        places = enumerate(group["params"])
        saved[OVERRIDES] = {i: overrides[p] for i, p in places if p in overrides}


# _save is a hook for the length of a call, and hooks must not change while they run.
_SAVING = threading.RLock()


class EightBit(torch.optim.Adam):
    """What both classes share: see memscale.optim.

    Note [Why _init_group]: torch's ``Adam.step`` asks ``_init_group`` for the tensors
    of a group and steps them. Here that call steps those that are ours and hands the
    others on. So ``step`` itself stays torch's: schedulers and Trainers that have
    bound it before ``to_8bit`` changed the object's class keep working.
    """

    _bits_of: dict[Tensor, int]  # of single parameters: set_bits
    # Which of OPTIONS each group had before to_8bit.
    _own_options: tuple[frozenset[str], ...] = ()

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,  # torch's: Adam's and AdamW's differ
        amsgrad: bool = False,
        *,
        bits: int = 8,
        min_8bit_size: int = MIN_8BIT_ELEMENTS,
        stochastic_rounding: bool = False,
        **flags: Any,
    ) -> None:
        if weight_decay is not None:
            flags["weight_decay"] = weight_decay
        self._bits_of = {}
        self._options = {
            "bits": bits,
            "min_8bit_size": min_8bit_size,
            "stochastic_rounding": stochastic_rounding,
        }
        super().__init__(params, lr, betas, eps, amsgrad=amsgrad, **flags)
        self.defaults.update(self._options)
        del self._options

    def add_param_group(self, param_group: Group) -> None:
        if isinstance(param_group, dict):
            # torch's constructor calls this before ``defaults`` can have them.
            for name, value in getattr(self, "_options", self.defaults).items():
                if name in OPTIONS:
                    param_group.setdefault(name, value)
            check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def bits_of(self, param: Tensor) -> int:
        """8 or 32: how ``param``'s state is kept, or will be."""
        for group in self.param_groups:
            if any(param is p for p in group["params"]):
                return self._bits(param, group, self._bits_of)
        raise InputError(
            f"param must be one of the optimizer's, got one of shape {[*param.shape]}"
        )

    @torch.no_grad()
    def set_bits(self, param: Tensor, bits: int) -> None:
        """Keep ``param``'s state in 8 or 32 bits, whatever its group and size say.

        A state that is there is converted.
        """
        if bits not in (8, 32):
            raise InputError(f"bits must be 8 or 32, got {bits!r}")
        self.bits_of(param)
        self._convert(param, bits)
        self._bits_of[param] = bits

    @torch.no_grad()
    def forget_bits(self, params: Iterable[Tensor]) -> None:
        """Undo ``set_bits`` for these; states that are there are converted."""
        for group in self.param_groups:
            for p in {*group["params"]} & {*params} & self._bits_of.keys():
                if is_ours(p, group):
                    self._convert(p, self._bits(p, group, {}))
                del self._bits_of[p]

    def _convert(self, param: Tensor, bits: int) -> None:
        state = self.state.get(param)
        if state and bits == 8 and not states.is_8bit(state):
            self.state[param] = states.to_8bit(param, state)
        elif state and bits == 32 and states.is_8bit(state):
            self.state[param] = states.to_float32(param, state)

    @staticmethod
    def _bits(p: Tensor, group: Group, overrides: dict[Tensor, int]) -> int:
        small = p.numel() < group["min_8bit_size"]
        return overrides.get(p, 32 if small else group["bits"])

    # Note [Compiled steps]: torch.compile calls _init_group once, while it traces, and
    # would never again; on CUDA it would also set capturable. So step is not traced.
    # One that a scheduler has bound before the class changed is, up to here, where
    # tracing is given up.
    step = _disable_dynamo(torch.optim.Adam.step)

    @_disable_dynamo
    def _init_group(  # type: ignore[no-untyped-def]
        self, group, params_with_grad, grads, *lists
    ) -> bool:
        if TracingContext.try_get() is not None:
            from torch._dynamo.variables.optimizer import ArgMappingException

            raise ArgMappingException  # "trace normally", which breaks the graph
        check_group(group)
        ours: list[Tensor] = []
        theirs: list[Tensor] = []
        for p in group["params"]:
            if p.grad is None:
                continue
            if p.grad.layout != torch.strided:
                raise InputError(
                    f"grad must be dense, got {p.grad.layout} of a parameter "
                    f"of shape {[*p.shape]}"
                )
            (ours if is_ours(p, group) else theirs).append(p)
        if ours:
            self._step(group, ours)
        if not theirs:
            return False
        rest = {**group, "params": theirs}
        return bool(super()._init_group(rest, params_with_grad, grads, *lists))  # type: ignore[no-untyped-call]

    def _step(self, group: Group, params: list[Tensor]) -> None:
        alike: dict[tuple[torch.device, str], list[Tensor]] = defaultdict(list)
        for p in params:
            state = self.state[p]
            if not state:
                state.update(states.new_state(p, self._bits(p, group, self._bits_of)))
            laid = states.laid_as(p, state)
            if laid is not state:
                self.state[p] = state = laid
            kind = "8" if states.is_8bit(state) else "32"
            if kind == "8" and bitsandbytes.serves(p, group):
                kind = "bitsandbytes"
            alike[p.device, kind].append(p)
        scale = getattr(self, "grad_scale", None)
        found_inf = getattr(self, "found_inf", None)
        for (_, kind), some in alike.items():
            if kind != "bitsandbytes":
                self._step_alike(group, some, kind == "8", scale, found_inf)
            elif found_inf is None or not found_inf.item():
                multiplier = 1.0 if scale is None else 1.0 / scale.item()
                bitsandbytes.step(
                    some, [self.state[p] for p in some], group, multiplier
                )

    def _step_alike(
        self,
        group: Group,
        params: list[Tensor],
        is_8bit: bool,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        keys = [name for name, _ in states.MOMENTS]
        if is_8bit:
            ends = ("codes", "absmax")
            keys = [f"{name}_{end}" for end in ends for name in keys]
        of = [self.state[p] for p in params]
        operator = torch.ops.memscale.adam8_ if is_8bit else torch.ops.memscale.adam_
        beta1, beta2 = group["betas"]
        stochastic = group["stochastic_rounding"]
        operator(
            params,
            [p.grad for p in params],
            *([state[key] for state in of] for key in keys),
            [state["step"] for state in of],
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=group["decoupled_weight_decay"],
            maximize=group["maximize"],
            grad_scale=grad_scale,
            found_inf=found_inf,
            stochastic_rounding=stochastic,
            seeds=self._seeds(params) if stochastic else [],
        )

    def _seeds(self, params: Iterable[Tensor]) -> list[int]:
        """A parameter's place in the optimizer, to which the step is added: the same
        after saving and loading, and no draw from torch's generators."""
        place: dict[Tensor, int] = {}
        for group in self.param_groups:
            for p in group["params"]:
                place.setdefault(p, len(place))
        return [place[p] for p in params]

    @_disable_dynamo
    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """In torch's format, a snapshot on the host; torch's Adam can load it.

        Moments are float32, with the absmax of their blocks beside them, from which
        ``load_state_dict`` has the same bytes again.
        """
        with _SAVING:
            handle = self.register_state_dict_post_hook(_save, prepend=True)
            try:
                return super().state_dict()
            finally:
                handle.remove()

    @_disable_dynamo
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """A state_dict of ours or of torch's Adam. ``step`` stays on the CPU."""
        handle = self.register_load_state_dict_pre_hook(_hold)  # after the user's
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        ours = {"_bits_of": self._bits_of, "_own_options": self._own_options}
        return {**super().__getstate__(), **ours}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "defaults" not in state:  # of load_state_dict, not of a pickle
            state = self._receive(state)
        super().__setstate__(state)  # type: ignore[no-untyped-call]

    def _receive(self, loaded: dict[str, Any]) -> dict[str, Any]:
        """What load_state_dict collected, as ours; nothing of self is changed."""
        overrides = dict(self._bits_of)
        group_of = {}
        exact: dict[Tensor, Any] = {}
        for group, new in zip(self.param_groups, loaded["param_groups"], strict=True):
            saved = new.pop(OVERRIDES, {})
            exact |= pop_exact(new)
            if "bits" in new:  # ours, not torch's
                for i, p in enumerate(new["params"]):
                    overrides.pop(p, None)
                    with suppress(KeyError):
                        overrides[p] = saved[i]
            for name in OPTIONS:
                new.setdefault(name, group[name])
            check_group(new)
            group_of.update(dict.fromkeys(new["params"], new))
        received: defaultdict[Any, Any] = defaultdict(dict)
        for p, held in loaded["state"].items():
            value = held.state if isinstance(held, _Held) else held
            if p in group_of and value and is_ours(p, group_of[p]):
                bits = self._bits(p, group_of[p], overrides)
                value = states.from_saved(p, value, bits, exact.get(p))
            elif p in group_of and value:
                value = states.cast_as_torch(p, value, group_of[p])
            received[p] = value
        return {**loaded, "state": received, "_bits_of": overrides}
