"""The table of operators (core/ops/op_rows.cpp) against torch's dispatcher."""

from __future__ import annotations

import pytest
import torch

from memscale import _C

# Rows whose operator this build of torch does not have, and why they stay.
NOT_IN_THIS_BUILD: dict[str, str] = {}


def base_name(name: str) -> str:
    """The base name of an operator of aten, cut as OpName::of does."""
    base = name.removeprefix("aten::").split(".")[0]
    in_place = len(base) > 1 and base.endswith("_") and not base.endswith("__")
    return base[:-1] if in_place else base


def torchs_base_names() -> set[str]:
    names = torch._C._dispatch_get_all_op_names()
    return {base_name(name) for name in names if name.startswith("aten::")}


def test_every_row_is_an_operator_of_torch() -> None:
    missing = set(_C.op_names()) - torchs_base_names()
    assert missing == set(NOT_IN_THIS_BUILD)


def test_rows_are_sorted_and_there_once() -> None:
    names = _C.op_names()
    assert names == sorted(set(names))
    assert len(names) > 400


def test_every_convolution_has_a_row() -> None:
    """cuDNN's settings apply to them: without a row, replay may give other bits."""
    convolutions = {name for name in torchs_base_names() if "convolution" in name}
    assert len(convolutions) > 10
    for name in convolutions:
        assert "library for convolutions" in _C.describe_op(f"aten::{name}"), name


def test_every_view_is_known_to_make_nothing() -> None:
    """Keep sets leave views out, by their names: see tape_rules.h."""
    views = set()
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name + "." * bool(schema.overload_name) + schema.overload_name
        aliases = [a.alias_info for a in schema.arguments if a.alias_info]
        if (
            schema.name.startswith("aten::")
            and torch._C._dispatch_has_kernel(name)
            and not torch._C._dispatch_has_kernel_for_dispatch_key(
                name, "CompositeImplicitAutograd"
            )
            and not any(alias.is_write for alias in aliases)
            and any(returned.alias_info for returned in schema.returns)
            and "_test_" not in name
        ):
            views.add(schema.name)
    assert len(views) > 30
    missing = {name for name in views if "makes nothing" not in _C.describe_op(name)}
    # Of dual numbers, of slices to be undone, of sparse tensors: without plain bytes,
    # or in no layer's forward.
    assert missing == {
        "aten::_make_dual",
        "aten::_sparse_broadcast_to",
        "aten::slice_inverse",
    }


def test_every_kernel_of_attention_counts_its_flops() -> None:
    kernels = {name for name in torchs_base_names() if "scaled_dot_product_" in name}
    kernels = {name for name in kernels if "attention" in name}
    assert len(kernels) > 10
    for name in kernels:
        assert "flops" in _C.describe_op(f"aten::{name}"), name


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("aten::tanh", "tanh: 2600 ps an element on a CPU, kept there, no workspace"),
        ("aten::addmm.out", "addmm: matmul by argument 1, BLAS, flops, workspace"),
        ("aten::index_put_", "index_put: unordered, fills new zeros, workspace"),
        (
            "aten::native_dropout",
            "native_dropout: 7000 ps an element on a CPU, random, no workspace",
        ),
        ("mylib::tanh", ": never replayed: not one of torch's own ops"),
    ],
)
def test_what_a_row_says(name: str, says: str) -> None:
    assert _C.describe_op(name) == says


def test_every_dtype_of_torch_is_known() -> None:
    torchs = {str(dtype).removeprefix("torch.") for dtype in vars(torch).values()
              if isinstance(dtype, torch.dtype)}  # fmt: skip
    assert torchs == set(_C.dtype_names())
