"""torch's operator database: the device computes what the CPU computes, bit for bit."""

from __future__ import annotations

import pytest
import torch

from op_db_on_sim import REFUSED, SKIPPED, difference, op_id, operators, samples

OPERATORS = {op_id(op): op for op in operators()}
TESTED = [name for name in OPERATORS if name not in SKIPPED]


@pytest.mark.parametrize("name", TESTED)
def test_first_samples(name: str, sim: torch.device) -> None:
    compared = 0
    for sample in samples(OPERATORS[name], limit=3):
        found = difference(OPERATORS[name], sample)
        assert found in (None, REFUSED)
        compared += found is None
    assert compared > 0, "the CPU refuses every sample: skip it with a reason"


@pytest.mark.full
@pytest.mark.parametrize("name", TESTED)
def test_all_samples(name: str, sim: torch.device) -> None:
    for sample in samples(OPERATORS[name], limit=None):
        assert difference(OPERATORS[name], sample) in (None, REFUSED)


def test_enough_operators_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{len(TESTED)} operators compared with the CPU; left out:")
        for name, reason in SKIPPED.items():
            print(f"  {name}: {reason}")
    assert len(TESTED) >= 400
    assert set(SKIPPED) <= set(OPERATORS), "a skipped operator no longer exists"
