"""Each example runs, with the real libraries, and says what it should."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), "--steps", "2"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done


def test_plain_loop() -> None:
    done = run("plain_loop.py")
    plain, wrapped = done.stdout.splitlines()
    peaks = [int(line.split()[-2].replace(",", "")) for line in (plain, wrapped)]
    assert peaks[1] < 0.85 * peaks[0]
    assert plain.split()[2] == wrapped.split()[2]
    assert "TransformerEncoder with float32[16, 128, 128] on sim" in done.stderr


def test_hf_trainer() -> None:
    done = run("hf_trainer.py")
    assert "loss 5." in done.stdout
    assert " saves dropped" in done.stdout
    assert "\n0 saves dropped" not in done.stdout


def test_peft_lora() -> None:
    done = run("peft_lora.py")
    assert "step 1: loss 5." in done.stdout
    assert "\n0 saves dropped" not in done.stdout
    assert "the same as the plain one, bit for bit" in done.stdout


@pytest.mark.parametrize("name", ["plain_loop.py", "hf_trainer.py", "peft_lora.py"])
def test_is_short(name: str) -> None:
    lines = (EXAMPLES / name).read_text().splitlines()
    assert len(lines) < 60
