"""Runs samples of torch's operator database plainly and under replay.

The operator stands in the middle of a layer: what it reads was computed in the
layer from the layer's inputs, and what it returns is saved by a further op. So its
inputs and its outputs are both values that policy "block" drops and replays, also
of operators that have no gradient themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from memscale import replay
from op_db_on_sim import NOT_COMPARABLE, op_id, same_bits
from op_db_on_sim import _to as copied

# Operators left out, each with the reason that the test prints.
SKIPPED = NOT_COMPARABLE
# Samples left out of operators that are compared.
_LSTSQ = "driver gelsy does not repeat: plain runs differ from each other"
SKIPPED_SAMPLES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    name: (_LSTSQ, lambda sample: sample.kwargs.get("driver") == "gelsy")
    for name in ("linalg.lstsq", "linalg.lstsq.grad_oriented")
}
# Operators whose second derivative torch itself refuses.
NO_SECOND_DERIVATIVE: dict[str, str] = {
    "nn.functional.ctc_loss": "its backward has no derivative",
    "nn.functional.linear_cross_entropy.chunked_none": "its backward writes to out=",
    "sparse.sampled_addmm": "sparse gradients cannot be summed",
}

# What a comparison says of a sample that both refuse with the same exception.
REFUSED = "both refuse it"


@dataclass
class Outcome:
    """All that can be seen of a call and its backward."""

    outputs: list[Any] = field(default_factory=list)
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    random_state: torch.Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass
class Comparison:
    """``found``: what differs, None or REFUSED."""

    found: str | None
    saves_dropped: int = 0
    ops_replayed: int = 0
    kept_because: dict[str, int] = field(default_factory=dict)


class _Layer(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        # Gives a gradient to what has none.
        self.carrier = nn.Parameter(torch.tensor(0.5, device=device))

    def forward(self, call: Callable[..., Any], inputs: Any) -> Any:
        output = call(_map(_computed, inputs))
        read = _map(lambda t: _read(t, self.carrier), output)
        # A copy: what leaves the layer itself may be kept for the next one.
        return _map(_copy, output), read


class _Model(nn.Module):
    """A model of one layer, which is not its root."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.layer = _Layer(device)
        self.device = device

    def forward(self, call: Callable[..., Any], inputs: Any) -> Any:
        return self.layer(call, inputs)


def functions(op: Any) -> dict[str, Callable[..., Any]]:
    """The operator, and its in-place variant if that has a gradient."""
    found: dict[str, Callable[..., Any]] = {"": op}
    in_place = op.get_inplace()
    if in_place is not None and op.supports_inplace_autograd:
        found["_"] = in_place
    return found


def compare(
    op: Any,
    sample: Any,
    variant: str = "",
    second_order: bool = False,
    device: str = "cpu",
) -> Comparison:
    """One sample of an operator, plainly and under replay, both on ``device``."""
    function = functions(op)[variant]
    plain, model = _Model(device), _Model(device)
    handle = replay.attach(model, "block", min_bytes=0)
    try:
        try:
            expected = _run(function, sample, plain, second_order)
        except Exception as error:  # torch refuses the sample: so must ours
            return Comparison(_refusal(function, sample, model, second_order, error))
        got = _run(function, sample, model, second_order)
        stats = handle.stats()
    finally:
        handle.detach()
    return Comparison(
        _difference(expected, got),
        stats.saves_dropped,
        stats.ops_replayed,
        dict(stats.kept_because),
    )


def samples(op: Any, variant: str, limit: int | None) -> Iterator[Any]:
    """In place, an input cannot grow to the shape of the result."""
    torch.manual_seed(0)
    made = op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)
    _, skip = SKIPPED_SAMPLES.get(op_id(op), ("", lambda sample: False))
    useful = (s for s in made if not skip(s) and not (variant and s.broadcasts_input))
    return itertools.islice(useful, limit)


def _refusal(
    function: Callable[..., Any],
    sample: Any,
    model: _Model,
    second_order: bool,
    error: Exception,
) -> str:
    try:
        _run(function, sample, model, second_order)
    except Exception as same:
        if type(same) is type(error) and str(same) == str(error):
            return REFUSED
        return f"plainly {error!r}, under replay {same!r}"
    return f"plainly {error!r}, under replay nothing"


def _run(
    function: Callable[..., Any], sample: Any, model: _Model, second_order: bool
) -> Outcome:
    inputs = copied((sample.input, sample.args, sample.kwargs), model.device)
    leaves = [*model.parameters(), *(t for t in _tensors(inputs) if t.requires_grad)]
    torch.manual_seed(1)

    def call(before: Any) -> Any:
        input_, args, kwargs = before
        return sample.output_process_fn_grad(function(input_, *args, **kwargs))

    outputs, after = model(call, inputs)
    outcome = Outcome([*pytree.tree_leaves(outputs), *_tensors(inputs)])
    roots = [t for t in _tensors(after) if t.requires_grad]
    if roots:
        outcome.gradients = _gradients(roots, leaves, second_order)
    states = [torch.get_rng_state()]
    if model.device == "sim":
        states.append(torch.get_device_module("sim").get_rng_state())
    outcome.random_state = torch.cat(states)
    return outcome


def _gradients(
    roots: list[torch.Tensor], leaves: list[torch.Tensor], second_order: bool
) -> list[torch.Tensor | None]:
    """First derivatives, and those of their sum if second ones are asked for."""
    torch.manual_seed(2)
    seeds = [torch.rand_like(t) for t in roots]
    first = torch.autograd.grad(
        roots, leaves, seeds, allow_unused=True, create_graph=second_order
    )
    if not second_order:
        return list(first)
    again = [g for g in first if g is not None and g.requires_grad]
    if not again:
        return list(first)
    second = torch.autograd.grad(
        again, leaves, [torch.ones_like(g) for g in again], allow_unused=True
    )
    return [*first, *second]


def _difference(expected: Outcome, got: Outcome) -> str | None:
    pairs = zip(expected.outputs, got.outputs, strict=True)
    for i, (a, b) in enumerate(pairs):
        if not _same(a, b):
            return f"output or input {i} differs"
    for i, (x, y) in enumerate(zip(expected.gradients, got.gradients, strict=True)):
        if (x is None) != (y is None) or (x is not None and not _same(x, y)):
            return f"gradient {i} differs"
    if not torch.equal(expected.random_state, got.random_state):
        return "random state differs"
    return None


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return same_bits(a, b)
    if a.layout != b.layout:
        return False
    if a.layout != torch.strided:
        return same_bits(a.to_dense(), b.to_dense())
    # Views that go to the CPU lose their strides.
    return a.stride() == b.stride() and same_bits(a.cpu(), b.cpu())


def _map(change: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    return pytree.tree_map(
        lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree
    )


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def _copy(t: torch.Tensor) -> Any:
    """With its strides, which a copy may not have."""
    if t.layout != torch.strided:
        return t
    return t.stride(), t.detach().clone()


def _computed(t: torch.Tensor) -> torch.Tensor:
    """The same values, made by an op of the layer."""
    if t.layout != torch.strided:
        return t
    return t.mul(1.0) if t.requires_grad else t.clone()


def _read(t: torch.Tensor, carrier: torch.Tensor) -> torch.Tensor:
    """Something whose backward needs ``t``, and which torch has for its kind."""
    t = t if t.layout == torch.strided else t.to_dense()
    t = t.to(torch.complex64) if t.dtype == torch.complex32 else t
    return t.sin() if t.requires_grad else t * carrier


__all__ = [
    "NO_SECOND_DERIVATIVE",
    "REFUSED",
    "SKIPPED",
    "SKIPPED_SAMPLES",
    "Comparison",
    "compare",
    "functions",
    "op_id",
    "samples",
]
