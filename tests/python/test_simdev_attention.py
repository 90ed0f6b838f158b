"""Fused attention on the simulated device: right, and without a score matrix."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from reference_attention import attend_as_sim

SHAPES = {  # batch, query heads, key heads, queries, keys, width
    "square": (2, 4, 4, 64, 64, 16),
    "several tiles": (1, 2, 2, 300, 300, 8),
    "cross": (2, 3, 3, 17, 140, 8),
    "grouped": (1, 6, 2, 130, 130, 8),
    "one row": (1, 1, 1, 1, 5, 4),
}
MASKS = ["none", "causal", "bool", "float"]


def make(
    shape: tuple[int, ...], mask: str, dtype: torch.dtype = torch.float32
) -> tuple[list[torch.Tensor], dict[str, object]]:
    batch, heads, key_heads, queries, keys, width = shape
    torch.manual_seed(0)
    q = torch.randn(batch, heads, queries, width, dtype=dtype)
    k = torch.randn(batch, key_heads, keys, width, dtype=dtype)
    v = torch.randn(batch, key_heads, keys, width, dtype=dtype)
    options: dict[str, object] = {"enable_gqa": heads != key_heads}
    if mask == "causal":
        options["is_causal"] = True
    elif mask == "bool":
        options["attn_mask"] = torch.rand(batch, 1, queries, keys) > 0.2
    elif mask == "float":
        options["attn_mask"] = torch.randn(queries, keys, dtype=dtype)
    return [q, k, v], options


def run(
    attend: object, inputs: list[torch.Tensor], options: dict, device: str, p: float
) -> list[torch.Tensor]:
    leaves = [t.to(device).requires_grad_() for t in inputs]
    moved = {
        name: x.to(device) if isinstance(x, torch.Tensor) else x
        for name, x in options.items()
    }
    torch.manual_seed(5)
    out = attend(*leaves, dropout_p=p, **moved)  # type: ignore[operator]
    torch.manual_seed(6)
    gradients = torch.autograd.grad(out, leaves, torch.rand(out.shape).to(out))
    return [t.detach().cpu() for t in (out, *gradients)]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("mask", MASKS)
def test_with_dropout_equals_its_reference(
    shape: tuple[int, ...], mask: str, sim: torch.device
) -> None:
    inputs, options = make(shape, mask)
    got = run(F.scaled_dot_product_attention, inputs, options, "sim", p=0.3)
    expected = run(attend_as_sim, inputs, options, "cpu", p=0.3)
    for a, b in zip(expected, got, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mask", MASKS)
def test_without_dropout_equals_the_cpu(mask: str, sim: torch.device) -> None:
    inputs, options = make(SHAPES["square"], mask)
    got = run(F.scaled_dot_product_attention, inputs, options, "sim", p=0.0)
    expected = run(F.scaled_dot_product_attention, inputs, options, "cpu", p=0.0)
    for a, b in zip(expected, got, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mask", MASKS)
def test_formula_with_dropout(mask: str, sim: torch.device) -> None:
    """Against the textbook formula, autograd and a dense mask, in float64."""
    inputs, options = make(SHAPES["square"], mask, torch.float64)
    keys, width = inputs[1].shape[2:]
    p = 0.25
    # With the identity for values the output is the dropped probability matrix;
    # `width` columns of it at a time, each time with the same draws.
    identity = torch.eye(keys, dtype=torch.float64)
    dropped = torch.cat(
        [
            run(
                F.scaled_dot_product_attention,
                [*inputs[:2], columns.expand(*inputs[1].shape).clone()],
                options,
                "sim",
                p,
            )[0]
            for columns in identity.split(width, dim=1)
        ],
        dim=-1,
    )
    kept = dropped != 0
    assert 0.5 < kept.double().mean().item() < 0.85 or mask in ("causal", "bool")

    def textbook(q, k, v, dropout_p, enable_gqa, attn_mask=None, is_causal=False):  # type: ignore[no-untyped-def]
        scores = q @ k.transpose(-1, -2) / q.size(-1) ** 0.5
        if is_causal:
            attn_mask = torch.ones(q.size(2), k.size(2), dtype=torch.bool).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return (scores.softmax(-1) * kept / (1 - dropout_p)) @ v

    got = run(F.scaled_dot_product_attention, inputs, options, "sim", p)
    expected = run(textbook, inputs, options, "cpu", p)
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_holds_no_score_matrix(p: float, sim: torch.device) -> None:
    batch, heads, length, width = 1, 4, 1024, 16
    scores = batch * heads * length * length * 4
    q, k, v = (
        torch.randn(batch, heads, length, width, device=sim, requires_grad=True)
        for _ in range(3)
    )
    held = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
    # The output, one number a row and the seed stay for backward; nothing else.
    rows = batch * heads * length * 4
    assert torch.accelerator.memory_allocated() - held == rows * width + rows + 512
    out.sum().backward()
    assert torch.accelerator.max_memory_allocated() - held < scores // 4


def test_a_row_that_attends_to_nothing_is_zero(sim: torch.device) -> None:
    q, k, v = (torch.randn(1, 1, 3, 4, device=sim, requires_grad=True) for _ in "qkv")
    mask = torch.tensor([[True, True, True], [False] * 3, [True] * 3], device=sim)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.1)
    out.sum().backward()
    assert out[0, 0, 1].eq(0).all()
    assert q.grad is not None
    assert q.grad.isfinite().all()


def test_dropping_everything_gives_zeros(sim: torch.device) -> None:
    q, k, v = (torch.randn(1, 1, 3, 4, device=sim, requires_grad=True) for _ in "qkv")
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=1.0)
    out.sum().backward()
    assert out.eq(0).all()
    assert v.grad is not None
    assert v.grad.eq(0).all()


def test_learned_masks_take_the_math_path(sim: torch.device) -> None:
    q, k, v = (torch.randn(1, 1, 3, 4, device=sim) for _ in "qkv")
    bias = torch.zeros(3, 3, device=sim, requires_grad=True)
    F.scaled_dot_product_attention(q, k, v, attn_mask=bias).sum().backward()
    assert bias.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, sim: torch.device) -> None:
    inputs, options = make(SHAPES["square"], "causal")
    halves = [t.to(dtype) for t in inputs]
    got = run(F.scaled_dot_product_attention, halves, options, "sim", p=0.2)
    expected = run(attend_as_sim, [t.float() for t in halves], options, "cpu", p=0.2)
    for a, b in zip(expected, got, strict=True):
        assert b.dtype == dtype
        torch.testing.assert_close(a, b.float(), rtol=2e-2, atol=2e-2)
