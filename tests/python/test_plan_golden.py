"""Plans as texts: ``tests/golden/<model>.txt`` is what ``plan.explain()`` says.

After a change of rules, costs or traces that is meant to change plans::

    MEMSCALE_UPDATE_GOLDEN=1 .venv/bin/python -m pytest tests/python/test_plan_golden.py

writes the texts anew; the diff is then part of the review. Texts do not depend on the
host: the simulated device has a fixed size, and the number of threads, by which some
kernels' scratch grows, is fixed as well.
"""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import memscale
from memscale import Config
from memscale._C import Plan, Question, StepFacts, Target, Trace, plan_for
from memscale.estimation.estimate import Estimate
from plan_cases import GOLDEN, golden

_FOLDER = Path(__file__).parent.parent / "golden"
_UPDATE = "MEMSCALE_UPDATE_GOLDEN"
_MEMORY = 8 << 30
_CONFIG = Config(force_optimize=True)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _plan(name: str) -> Plan:
    case = golden(name)
    return memscale.plan(
        case.model, case.batch, "adamw", _CONFIG, case.loss_fn, device="sim"
    )


@pytest.mark.parametrize("name", GOLDEN)
def test_plan_is_as_it_was(name: str, sim_of: Callable[[int], torch.device]) -> None:
    sim_of(_MEMORY)
    text = _plan(name).explain()
    file = _FOLDER / f"{name}.txt"
    if os.environ.get(_UPDATE) == "1":
        file.write_text(text, encoding="utf-8")
    expected = file.read_text(encoding="utf-8")
    difference = "".join(
        difflib.unified_diff(
            expected.splitlines(keepends=True),
            text.splitlines(keepends=True),
            file.name,
            "now",
        )
    )
    assert not difference, f"{difference}\n{_UPDATE}=1 writes it anew"


def test_every_text_has_its_model() -> None:
    assert {file.stem for file in _FOLDER.glob("*.txt")} == set(GOLDEN)


# ---- the same bytes in every process ----


def plan_of_saved(trace: Trace, facts: dict[str, str]) -> str:
    """A plan under a budget, where the solver has the most to choose from."""
    question = Question(
        trace,
        Config(budget=int(facts["budget"])),
        Target(type="sim", memory=_MEMORY),
        StepFacts(model=facts["model"], call=facts["call"]),
    )
    return plan_for(question).to_json()


def _estimate(name: str) -> Estimate:
    case = golden(name)
    return memscale.estimate(
        case.model, case.batch, "adamw", None, case.loss_fn, device="sim"
    )


_SAVED = """
import sys, json, pathlib
from memscale._C import Trace
from test_plan_golden import plan_of_saved
folder = pathlib.Path(sys.argv[1])
facts = json.loads((folder / "facts.json").read_text())
print(plan_of_saved(Trace.from_json((folder / "trace.json").read_text()), facts))
"""

_ANEW = """
import sys, json, pathlib
import torch
from memscale import simdev
from test_plan_golden import _estimate, plan_of_saved
torch.set_num_threads(2)
simdev.enable()
folder = pathlib.Path(sys.argv[1])
facts = json.loads((folder / "facts.json").read_text())
trace = _estimate(facts["name"]).trace
print(plan_of_saved(trace, facts))
"""


def _in_processes(folder: Path, script: str, seeds: range) -> set[str]:
    """What processes with these seeds of hashes print, two at a time."""
    printed = set()
    for first in seeds[::2]:
        running = [
            subprocess.Popen(
                [sys.executable, "-c", script, str(folder)],
                stdout=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).parent,
                env={**os.environ, "PYTHONHASHSEED": str(seed)},
            )
            for seed in range(first, min(first + 2, seeds.stop))
        ]
        for process in running:
            out, _ = process.communicate(timeout=300)
            assert process.returncode == 0
            printed.add(out.strip())
    return printed


@pytest.mark.parametrize(
    ("num_saved", "num_anew"),
    [(2, 2), pytest.param(45, 5, marks=pytest.mark.full)],
)
def test_plan_is_the_same_in_every_process(
    num_saved: int,
    num_anew: int,
    sim_of: Callable[[int], torch.device],
    tmp_path: Path,
) -> None:
    sim_of(_MEMORY)
    name = "unet"  # without transformers, whose import takes longest
    traced = _estimate(name)
    case = golden(name)
    plans = memscale.pareto(
        case.model, case.batch, "adamw", None, case.loss_fn, device="sim"
    )
    facts = {
        "name": name,
        "model": type(case.model).__name__,
        "call": traced.call,
        "budget": str((plans[0].peak_bytes + plans[-1].peak_bytes) // 2),
    }
    (tmp_path / "trace.json").write_text(traced.trace.to_json(), encoding="utf-8")
    (tmp_path / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    here = plan_of_saved(traced.trace, facts)
    assert Plan.from_json(here).nanoseconds > 0
    assert _in_processes(tmp_path, _SAVED, range(1, 1 + num_saved)) == {here}
    assert _in_processes(tmp_path, _ANEW, range(101, 101 + num_anew)) == {here}
