"""Pictures in the docs are those that their programs draw."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_pipeline_is_up_to_date() -> None:
    program = ROOT / "tools" / "draw_pipeline.py"
    run = subprocess.run(
        [sys.executable, str(program), "--check"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout
