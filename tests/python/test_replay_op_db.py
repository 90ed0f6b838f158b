"""torch's operator database: gradients under replay are eager's, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memscale import replay
from op_db_on_sim import SKIPPED as NOT_ON_SIM
from op_db_on_sim import operators
from op_db_under_replay import (
    NO_SECOND_DERIVATIVE,
    REFUSED,
    SKIPPED,
    SKIPPED_SAMPLES,
    compare,
    functions,
    op_id,
    samples,
)
from replay_twins import Wrapped, batch

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")

OPERATORS: dict[str, Any] = {op_id(op): op for op in operators()}
TESTED = [name for name in OPERATORS if name not in SKIPPED]
TWICE = [
    name
    for name in TESTED
    if OPERATORS[name].supports_gradgrad and name not in NO_SECOND_DERIVATIVE
]
# Each kind of trouble once: random, in place, views, several outputs, hidden
# writes, lists of tensors, attention, scatter.
CHOSEN = [
    "bernoulli",
    "cat",
    "cumprod",
    "index_put",
    "masked_scatter",
    "max.reduction_with_dim",
    "native_layer_norm",
    "nn.functional.batch_norm",
    "nn.functional.conv2d",
    "nn.functional.dropout",
    "nn.functional.embedding",
    "nn.functional.max_pool2d",
    "nn.functional.rrelu",
    "nn.functional.scaled_dot_product_attention",
    "normal.in_place",
    "sort",
    "unbind",
    "view_as_complex",
]
SAMPLE = sorted({*CHOSEN, *TESTED[::14]})


def check(
    name: str, limit: int | None, second_order: bool = False, device: str = "cpu"
) -> int:
    """Compare samples of the operator; how many saves replay dropped."""
    op = OPERATORS[name]
    dropped = compared = 0
    for variant in functions(op):
        for sample in samples(op, variant, limit):
            comparison = compare(op, sample, variant, second_order, device)
            assert comparison.found in (None, REFUSED), f"{name}{variant}: {sample}"
            compared += comparison.found is None
            dropped += comparison.saves_dropped
    assert compared > 0, "torch refuses every sample: skip it with a reason"
    return dropped


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("name", SAMPLE)
def test_first_samples(name: str, device: str) -> None:
    check(name, limit=3, device=device)


def test_operators_are_really_replayed() -> None:
    """Saves are dropped wherever there is something to save."""
    dropped = {name: check(name, limit=1) for name in CHOSEN}
    assert {name for name, count in dropped.items() if count == 0} == set()


def test_an_op_that_does_not_repeat_is_kept() -> None:
    """lstsq by gelsy gives other bits when it is called again, on the CPU too."""

    def function(
        weight: torch.Tensor, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        a = (x @ weight)[:, :3].detach() * torch.arange(1.0, 4.0)[:, None, None]
        solution = torch.linalg.lstsq(a, a.sin(), driver="gelsy").solution
        return weight.sum() * solution, solution.clone()

    for seed in range(20):
        torch.manual_seed(seed)
        model = Wrapped(function)
        handle = replay.attach(model, "block", min_bytes=0)
        product, solution = model(batch())
        assert torch.equal(product.grad_fn._saved_other, solution)
        handle.detach()


@pytest.mark.full
@pytest.mark.parametrize("name", TESTED)
def test_all_samples(name: str) -> None:
    check(name, limit=None)


# Those that sim refuses altogether; test_simdev_op_db prints the reasons.
SPARSE = {"sparse.sampled_addmm", "sparse.mm.reduce", "to_sparse"}
assert NOT_ON_SIM.keys() >= SPARSE


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in TESTED if name not in SPARSE])
def test_all_samples_on_sim(name: str) -> None:
    check(name, limit=None, device="sim")


@pytest.mark.full
@pytest.mark.parametrize("name", TWICE)
def test_second_derivatives(name: str) -> None:
    check(name, limit=2, second_order=True)


def test_enough_operators_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{len(TESTED)} operators compared under replay; left out:")
        for name, reason in SKIPPED.items():
            print(f"  {name}: {reason}")
        for name, (reason, _) in SKIPPED_SAMPLES.items():
            print(f"  samples of {name}: {reason}")
        for name, reason in NO_SECOND_DERIVATIVE.items():
            print(f"  second derivative of {name}: {reason}")
    assert len(TESTED) >= 650
    left_out = {*SKIPPED, *SKIPPED_SAMPLES, *NO_SECOND_DERIVATIVE}
    assert left_out <= set(OPERATORS), "a skipped operator no longer exists"
    assert set(SAMPLE) <= set(TESTED)
