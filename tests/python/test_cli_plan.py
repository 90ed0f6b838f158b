"""``memscale plan``: what it prints and saves, and its exit status."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import memscale
from memscale.benchmarks.models import BENCHMARK_MODELS
from memscale.cli import commands
from test_cli import SIZE, TINY, run

# So many tokens that activations, not the optimizer's step, hold the peak.
LARGE = ["gpt2", "--batch", "8", "--seq", "128", *TINY, "--set", "vocab_size=512"]
LARGE += ["--set", "bos_token_id=None", "--set", "eos_token_id=None"]
FIELDS = {
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 2,
    "vocab_size": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}


def build(device: str) -> torch.nn.Module:
    with torch.device(device):
        return BENCHMARK_MODELS["gpt2"].build(**FIELDS)


def sample() -> object:
    return BENCHMARK_MODELS["gpt2"].sample(8, 128, "cpu")


def plan_of(config: memscale.Config, optimizer: str = "adamw") -> memscale.Plan:
    return memscale.plan(build("meta"), sample(), optimizer, config, device="RTX 3090")


@pytest.fixture
def budget() -> int:
    """Between the smallest that works and the plain step's."""
    plans = memscale.pareto(build("meta"), sample(), device="RTX 3090")
    smallest, largest = plans[0].peak_bytes, plans[-1].peak_bytes
    assert smallest < largest
    return (smallest + largest) // 2


def test_json_is_the_plan(capsys: pytest.CaptureFixture[str], budget: int) -> None:
    status, out, _ = run(
        capsys,
        "plan",
        *LARGE,
        "--device",
        "RTX 3090",
        "--budget",
        str(budget),
        "--json",
    )
    assert status == 0
    expected = plan_of(memscale.Config(budget=budget))
    assert out == expected.to_json() + "\n"
    assert memscale.Plan.from_json(out) == expected
    assert expected.budget == budget
    assert expected.peak_bytes <= budget < expected.plain_peak_bytes


def test_options_reach_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", *LARGE, "--device", "RTX 3090", "--json"]
    found = [
        json.loads(run(capsys, *arguments, *more)[1])
        for more in ([], ["--mode", "aggressive"], ["--optimizer", "SGD"])
    ]
    assert [plan["mode"] for plan in found] == ["balanced", "aggressive", "balanced"]
    assert [plan["optimizer"] for plan in found] == ["AdamW", "AdamW", "SGD"]
    assert all("int64[8, 128]" in plan["call"] for plan in found)


def test_sizes_have_units(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", *LARGE, "--device", "RTX 3090", "--json", "--budget"]
    for text, size in (("2GiB", 2 << 30), ("1.5 GB", 1_500_000_000)):
        status, out, _ = run(capsys, *arguments, text)
        assert (status, json.loads(out)["budget"]) == (0, size)


def test_a_table_and_reasons(capsys: pytest.CaptureFixture[str], budget: int) -> None:
    arguments = ["plan", *LARGE, "--device", "RTX 3090", "--budget", str(budget)]
    expected = plan_of(memscale.Config(budget=budget))
    status, out, _ = run(capsys, *arguments)
    assert status == 0
    assert out.startswith("gpt2: GPT-2 small, 124 M; batch 8, seq 128; n_layer=2")
    assert out.endswith(f"\n\n{expected}\n")
    status, out, _ = run(capsys, *arguments, "--explain")
    assert status == 0
    assert out.endswith(f"\n\n{expected.explain()}\n")


def test_the_frontier(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", *LARGE, "--device", "RTX 3090", "--pareto"]
    expected = memscale.pareto(build("meta"), sample(), device="RTX 3090")
    assert len(expected) > 2
    status, out, _ = run(capsys, *arguments)
    assert status == 0
    assert out.endswith(f"\n\n{expected}\n")
    status, out, _ = run(capsys, *arguments, "--json")
    assert status == 0
    found = [memscale.Plan.from_json(json.dumps(each)) for each in json.loads(out)]
    assert found == list(expected)


def test_says_which_device_it_chose(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "plan", "gpt2", *SIZE, *TINY)
    assert f"For {commands._default_device()}, what this machine has" in out


def test_a_saved_plan_is_followed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, budget: int, sim: torch.device
) -> None:
    file = tmp_path / "plan.json"
    arguments = ["plan", *LARGE, "--device", "sim", "--budget", str(budget)]
    status, out, _ = run(capsys, *arguments, "--output", str(file))
    assert status == 0
    assert f"Saved: Config(plan={str(file)!r}) follows it." in out
    model = build("cpu").to(sim)
    batch = {name: tensor.to(sim) for name, tensor in sample().items()}
    with memscale.optimize(model, config=memscale.Config(plan=str(file))) as executor:
        assert executor.plan == memscale.Plan.from_json(file.read_text())
        model(**batch).loss.backward()
        stats = executor.stats()
    assert stats.ops_replayed > 0
    assert stats.calls_unlike_keep_set == 0


def test_a_factory_of_ones_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planned_factory.py").write_text(
        "import torch\n"
        "print('imported')\n"
        "def pair():\n"
        "    return torch.nn.Linear(16, 4), torch.zeros(8, 16)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    arguments = ["plan", "planned_factory:pair", "--device", "RTX 3090", "--json"]
    status, out, err = run(capsys, *arguments)
    assert status == 0
    assert json.loads(out)["model"] == "Linear"
    assert "imported" in err


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 2, "required: model"),
        (["gtp2"], 2, "no model named 'gtp2': did you mean gpt2"),
        (["gpt2", "--budget", "many"], 2, "cannot read 'many' as a size"),
        (["gpt2", "--budget", "0"], 2, "budget must be"),
        (["gpt2", "--mode", "bold"], 2, "invalid choice: 'bold'"),
        (["gpt2", "--json", "--explain"], 2, "not allowed with argument"),
        (["gpt2", "--pareto", "--output", "x"], 2, "not allowed with argument"),
        (["gpt2", "--pareto", "--explain"], 2, "--explain is of one plan"),
        (["gpt2", "--pareto", "--budget", "1GiB"], 2, "--pareto shows every budget"),
        (["gpt2", "--output", "."], 2, "--output: . is a directory"),
        (["gpt2", "--output", "no_such/x"], 2, "--output: no directory no_such"),
        (["gpt2", "--device", "RTX 9999"], 1, "RTX 9999"),
        (["gpt2", "--seq", "2048"], 1, "at most the model's 1024"),
        (
            ["gpt2", *SIZE, *TINY, "--device", "T4", "--budget", "1MiB"],
            1,
            "budget must be at least ",
        ),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    message: str,
) -> None:
    found, out, err = run(capsys, "plan", *arguments)
    assert found == status
    assert out == ""
    assert message in err
    assert "error: " in err.splitlines()[-1]
    assert "Traceback" not in err


def test_no_file_is_left_by_a_plan_that_is_not_made(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    arguments = ["plan", "gpt2", *SIZE, *TINY, "--budget", "1MiB"]
    assert run(capsys, *arguments, "--output", str(file))[0] == 1
    assert not file.exists()
