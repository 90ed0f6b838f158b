"""Runs samples of torch's operator database on the CPU and on the simulated device.

Both runs start from the same random state; outputs, gradients and the inputs
after the call must agree to the bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

# Operators that give nothing to compare, anywhere.
_CUDA_ONLY = "compiles CUDA code; the CPU refuses it too"
_UNINITIALISED = "returns uninitialised memory"
NOT_COMPARABLE: dict[str, str] = {
    "empty": _UNINITIALISED,
    "empty_like": _UNINITIALISED,
    "empty_permuted": _UNINITIALISED,
    "empty_strided": _UNINITIALISED,
    "new_empty": _UNINITIALISED,
    "new_empty_strided": _UNINITIALISED,
    "jiterator_2inputs_2outputs": _CUDA_ONLY,
    "jiterator_4inputs_with_extra_args": _CUDA_ONLY,
    "jiterator_binary": _CUDA_ONLY,
    "jiterator_binary_return_by_ref": _CUDA_ONLY,
    "jiterator_unary": _CUDA_ONLY,
}
# Operators left out, each with the reason that the test prints.
SKIPPED: dict[str, str] = {
    **NOT_COMPARABLE,
    "linalg.lstsq": "driver gelsy does not repeat on the CPU itself",
    "linalg.lstsq.grad_oriented": "driver gelsy does not repeat on the CPU itself",
    "native_dropout_backward": "rounds as dropout's own backward does, not as this op",
    "sparse.sampled_addmm": "sparse layouts are not supported on sim",
    "sparse.mm.reduce": "sparse layouts are not supported on sim",
    "tensor_split": "its index tensor must be on the CPU, on any device",
    "to_sparse": "sparse layouts are not supported on sim",
}

# What difference() says of a sample that both refuse with the same exception.
REFUSED = "both refuse it"

# Samples left out of operators that are compared.
_SKIPPED_SAMPLES = {
    # Dropout inside fused attention is the device's own: test_simdev_attention.
    "nn.functional.scaled_dot_product_attention": lambda sample: (
        sample.kwargs.get("dropout_p", 0.0) > 0
    ),
}


def operators() -> list[Any]:
    """Every OpInfo that takes float32, one per name and variant."""
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if torch.float32 in op.dtypes]


def op_id(op: Any) -> str:
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


def samples(op: Any, limit: int | None) -> Iterator[Any]:
    torch.manual_seed(0)
    made = op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)
    skip = _SKIPPED_SAMPLES.get(op_id(op), lambda sample: False)
    return itertools.islice((s for s in made if not skip(s)), limit)


def _to(tree: Any, device: str) -> Any:
    """A copy of every tensor in ``tree`` on ``device``, as a leaf."""

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            moved = value.detach().to(device, copy=True)
            return moved.requires_grad_(value.requires_grad)
        if isinstance(value, torch.device) or value == "cpu":
            return torch.device(device)
        return value

    return pytree.tree_map(move, tree)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def _run(op: Any, sample: Any, device: str) -> tuple[Any, list[torch.Tensor | None]]:
    """Output and inputs after the call, and the inputs' gradients."""
    input_, args, kwargs = _to((sample.input, sample.args, sample.kwargs), device)
    inputs = _tensors((input_, args, kwargs))
    torch.manual_seed(1)
    output = op(input_, *args, **kwargs)
    processed = sample.output_process_fn_grad(output)
    leaves = [t for t in inputs if t.requires_grad]
    roots = [t for t in _tensors(processed) if t.requires_grad]
    if not leaves or not roots:
        return (output, inputs), []
    torch.manual_seed(2)
    seeds = [torch.rand_like(t, device="cpu").to(device) for t in roots]
    gradients = torch.autograd.grad(roots, leaves, seeds, allow_unused=True)
    return (output, inputs), list(gradients)


def same_bits(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return bool(a == b) or (a != a and b != b)
    if a.shape != b.shape or a.dtype != b.dtype or a.stride() != b.stride():
        return False
    b = b.cpu()
    a, b = a.detach(), b.detach()
    if a.is_complex():
        a, b = (
            torch.view_as_real(a.resolve_conj()),
            torch.view_as_real(b.resolve_conj()),
        )
    if a.is_floating_point():
        return bool(torch.equal(a.isnan(), b.isnan())) and bool(
            torch.equal(a.nan_to_num(), b.nan_to_num())
        )
    return bool(torch.equal(a, b))


def difference(op: Any, sample: Any) -> str | None:
    """What differs between the CPU and the device, None, or REFUSED."""
    try:
        expected, expected_grads = _run(op, sample, "cpu")
    except Exception as error:  # the CPU refuses the sample: so must the device
        try:
            _run(op, sample, "sim")
        except Exception as same:
            if type(same) is type(error):
                return REFUSED
            return (
                f"CPU raised {type(error).__name__}, sim {type(same).__name__}: {same}"
            )
        return f"CPU raised {error!r}, sim did not"
    got, got_grads = _run(op, sample, "sim")
    for i, (a, b) in enumerate(
        zip(pytree.tree_leaves(expected), pytree.tree_leaves(got), strict=True)
    ):
        if not same_bits(a, b):
            return f"output or input {i} differs"
    for i, (a, b) in enumerate(zip(expected_grads, got_grads, strict=True)):
        if (a is None) != (b is None) or (a is not None and not same_bits(a, b)):
            return f"gradient {i} differs"
    return None
