"""Two tensors are the same if every bit is, and NaN is like NaN."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from memscale.verify.compare import difference, named_tensors, within

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], None),
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([NAN, 2.0], [NAN, 2.0], None),
        ([NAN, 2.0], [-NAN, 2.0], None),
        ([NAN, 2.0], [1.0, 2.0], INF),
        ([INF, 2.0], [INF, 2.0], None),
        ([INF, 2.0], [-INF, 2.0], INF),
        ([0.0], [-0.0], 0.0),
        ([1, 2], [1, 5], 3.0),
        ([True], [False], 1.0),
        ([1 + 2j], [1 + 4j], 2.0),
        ([1.0], [1], INF),
        ([1.0], [1.0, 2.0], INF),
    ],
)
def test_difference(a: list[Any], b: list[Any], expected: float | None) -> None:
    assert difference(torch.tensor(a), torch.tensor(b)) == expected


def test_difference_of_other_tensors() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn):
        a = torch.tensor([1.0, 2.0]).to(dtype)
        b = torch.tensor([1.0, 4.0]).to(dtype)
        assert difference(a, a.clone()) is None
        assert difference(a, b) == 2.0
    a = torch.eye(3).to_sparse()
    assert difference(a, torch.eye(3).to_sparse()) is None
    assert difference(a, (2 * torch.eye(3)).to_sparse()) == 1.0
    assert difference(a, torch.eye(3)) == math.inf
    left = torch.arange(6.0).view(2, 3)
    assert difference(left.t(), left.t().contiguous()) is None
    assert difference(torch.empty(0), torch.empty(0)) is None


def test_within() -> None:
    plain = torch.tensor([10.0, -100.0])
    assert within(None, plain, 0.0)
    assert not within(1.0, plain, 0.0)
    assert within(1.0, plain, 0.01)
    assert not within(1.0, plain, 0.009)
    assert not within(math.inf, plain, 0.5)


def test_named_tensors() -> None:
    @dataclasses.dataclass
    class Output:
        logits: torch.Tensor
        more: Any

    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    output = Output(a, {"states": (b, None, [c])})
    found = dict(named_tensors(output, "output"))
    assert list(found) == [
        "output.logits",
        "output.more.states[0]",
        "output.more.states[2][0]",
    ]
    assert found["output.more.states[2][0]"] is c
