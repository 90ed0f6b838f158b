"""Random programs: hazards that nobody thought of.

About half of them are wrong, and eager says so in backward; then we must, too.
``python tests/python/random_programs.py START COUNT`` runs any others.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

import random_programs
from random_model import KINDS
from random_programs import Tally, Trial
from random_ways import WAYS

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim", "one_thread")

# Kinds and ways that are known to differ. Empty, but while one is being mended.
KNOWN: frozenset[str] = frozenset()


def compare(first: int, count: int, policies: str, device: str = "cpu") -> Tally:
    tally = Tally()
    for seed in range(first, first + count):
        tally.run(Trial(seed, device, KNOWN), policies.split())
    assert not tally.mismatches, "\n".join(tally.mismatches)
    assert tally.count["as under any hooks"] <= max(3, tally.count["ran"] // 100)
    assert tally.count["replaying"] > tally.count["ran"] // 4, str(tally)
    return tally


def test_what_is_left_out_exists() -> None:
    assert not KNOWN - KINDS.keys() - WAYS.keys()


@pytest.mark.parametrize("first", range(0, 32, 8))
def test_on_cpu(first: int) -> None:
    compare(first, 8, "cheap block")


def test_with_policies_of_many_kinds() -> None:
    compare(100, 10, "mixed")


def test_on_sim() -> None:
    compare(200, 8, "cheap block", "sim")


def test_under_plans_with_keep_sets() -> None:
    tally = compare(300, 10, "wrap")
    assert tally.count["planned"] > 5


@pytest.mark.full
@pytest.mark.parametrize("first", range(10_000, 11_200, 100))
def test_many(first: int) -> None:
    compare(first, 100, "cheap block mixed")


@pytest.mark.full
@pytest.mark.parametrize("first", range(20_000, 20_300, 100))
def test_many_on_sim(first: int) -> None:
    """In a process of its own: some programs leave bytes behind without us, too."""
    command = [sys.executable, random_programs.__file__, str(first), "100"]
    command += ["--policies", "cheap,block", "--device", "sim"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "mismatches 0" in result.stdout


@pytest.mark.full
@pytest.mark.parametrize("first", range(30_000, 30_300, 50))
def test_many_under_plans(first: int) -> None:
    compare(first, 50, "wrap")
