"""The command ``memscale``: what it prints, and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import memscale
from memscale import cli
from memscale.benchmarks.models import BENCHMARK_MODELS
from memscale.cli import commands

TINY = ["--set", "n_layer=2", "--set", "n_embd=64", "--set", "n_head=2"]
SIZE = ["--batch", "2", "--seq", "32"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        status = cli.main(arguments)
    except SystemExit as exit_:  # argparse's way
        status = int(exit_.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


def estimate_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    status, out, _ = run(capsys, "estimate", *arguments, "--json")
    assert status == 0
    return json.loads(out)


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "memscale", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
    )


# ---- models by name ----


@pytest.mark.parametrize("device", ["RTX 3090", "cpu"])
def test_json_has_the_numbers_of_estimate(
    capsys: pytest.CaptureFixture[str], device: str
) -> None:
    found = estimate_json(capsys, "gpt2", *SIZE, *TINY, "--device", device)
    entry = BENCHMARK_MODELS["gpt2"]
    with torch.device("meta"):
        model = entry.build(n_layer=2, n_embd=64, n_head=2)
    expected = memscale.estimate(model, entry.sample(2, 32, "cpu"), device=device)
    assert found == {"model": "gpt2", **expected.to_dict()}


@pytest.mark.parametrize("name", ["GPT2", "gpt-2", "GPT 2"])
def test_names_are_forgiving(capsys: pytest.CaptureFixture[str], name: str) -> None:
    status, out, _ = run(capsys, "estimate", name, *SIZE, *TINY)
    assert status == 0
    assert out.startswith("gpt2: GPT-2 small, 124 M; batch 2, seq 32; n_layer=2")


def test_options_reach_the_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    plain = estimate_json(capsys, "lstm", *SIZE, "--device", "sim")
    sgd = estimate_json(capsys, "lstm", *SIZE, "--device", "sim", "--optimizer", "SGD")
    none = estimate_json(
        capsys, "lstm", *SIZE, "--device", "sim", "--optimizer", "none"
    )
    assert plain["optimizer"] == "AdamW"
    assert sgd["optimizer"] == "SGD"
    assert sgd["breakdown"]["optimizer_state"] == 0
    assert none["optimizer"] == "none"
    assert "optimizer" not in none["phases"]


def test_dtype_is_of_parameters_and_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["resnet18", "--batch", "2", "--seq", "32", "--device", "sim"]
    full = estimate_json(capsys, *arguments)
    half = estimate_json(capsys, *arguments, "--dtype", "bfloat16")
    assert "bfloat16[2, 3, 32, 32]" in half["call"]
    ratio = full["breakdown"]["parameters"] / half["breakdown"]["parameters"]
    assert ratio == pytest.approx(2, rel=0.01)


def test_says_which_device_it_chose(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "estimate", "gpt2", *SIZE, *TINY)
    chosen = commands._default_device()
    assert f"For {chosen}, what this machine has" in out
    _, out, _ = run(capsys, "estimate", "gpt2", *SIZE, *TINY, "--device", "T4")
    assert "what this machine has" not in out


def test_check_fits(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["estimate", "gpt2", *SIZE, *TINY, "--check-fits"]
    large = ["estimate", "gpt2-xl", "--check-fits", "--device", "RTX 3070"]
    assert run(capsys, *small, "--device", "RTX 3070")[0] == 0
    status, out, _ = run(capsys, *large)
    assert status == 3
    assert "Does not fit RTX 3070" in out
    status, out, _ = run(capsys, *large, "--json")
    assert status == 3
    assert json.loads(out)["fit"]["fits"] is False
    # Without the question the answer is no error.
    assert run(capsys, *[a for a in large if a != "--check-fits"])[0] == 0


# ---- wrong command lines ----


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 2, "required: COMMAND"),
        (["estimate"], 2, "required: model"),
        (["estimate", "gtp2"], 2, "no model named 'gtp2': did you mean gpt2"),
        (["estimate", "zzz"], 2, '"memscale models" lists them'),
        (["estimate", "gpt2", "--batch", "0"], 2, "must be a positive integer, got"),
        (["estimate", "gpt2", "--seq", "-3"], 2, "must be a positive integer, got"),
        (["estimate", "gpt2", "--batch", "many"], 2, "must be a positive integer"),
        (["estimate", "gpt2", "--batch", "1.5"], 2, "must be a positive integer"),
        (["estimate", "gpt2", "--optimizer", "adan"], 2, "must be one of adadelta"),
        (["estimate", "gpt2", "--dtype", "int8"], 2, "invalid choice: 'int8'"),
        (["estimate", "gpt2", "--set", "n_layer"], 2, "must be KEY=VALUE"),
        (["estimate", "gpt2", "--set", "n_layers=2"], 2, "did you mean n_layer"),
        (["estimate", "resnet18", "--set", "depth=2"], 2, "argument 'depth'"),
        (["estimate", "no.such:factory"], 2, "no module named 'no.such'"),
        (["estimate", "memscale.cli:nothing"], 2, "has no function 'nothing'"),
        (["estimate", ":factory"], 2, "is not package.module:factory"),
        (["estimate", "json:dumps", "--set", "a=1"], 2, "--set is for models known"),
        (["estimate", "gpt2", "--check-fits", "--device", "cpu"], 2, "needs a card"),
        (["estimate", "gpt2", "--device", "RTX 9999"], 1, "RTX 9999"),
        (["estimate", "gpt2", "--seq", "2048"], 1, "at most the model's 1024"),
        (["estimate", "builtins:dict"], 1, "must return a torch.nn.Module"),
        (["estimate", "vit-base", "--seq", "256"], 1, "ValueError: Input image size"),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    message: str,
) -> None:
    found, out, err = run(capsys, *arguments)
    assert found == status
    assert out == ""
    assert message in err
    last = err.splitlines()[-1]
    assert "error: " in last
    assert "Traceback" not in err


def test_debug_raises(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(memscale.InputError):
        run(capsys, "estimate", "gpt2", "--seq", "2048", "--debug")


# ---- models of one's own ----


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    text = """
        import torch
        from torch import nn

        print("imported")

        def pair():
            return nn.Linear(16, 4), torch.zeros(8, 16)

        def alone():
            return nn.Linear(16, 4)

        def not_on_meta():
            model = nn.Linear(16, 4)
            assert model.weight.sum().item() != 1e9
            return model, torch.zeros(8, 16)
    """
    (tmp_path / "my_factories.py").write_text(textwrap.dedent(text))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_factories", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.mark.parametrize("name", ["pair", "not_on_meta"])
def test_a_factory_of_ones_own(
    capsys: pytest.CaptureFixture[str], factories: Path, name: str
) -> None:
    found = estimate_json(capsys, f"my_factories:{name}", "--device", "sim")
    expected = memscale.estimate(
        torch.nn.Linear(16, 4), torch.zeros(8, 16), device="sim"
    )
    assert found["peak_bytes"] == expected.peak_bytes
    assert found["breakdown"] == expected.breakdown


def test_a_factory_without_a_sample(
    capsys: pytest.CaptureFixture[str], factories: Path
) -> None:
    status, out, err = run(capsys, "estimate", "my_factories:alone")
    assert (status, out) == (1, "")
    assert "sample_input is needed: Linear does not say" in err


def test_a_sample_has_its_own_size(
    capsys: pytest.CaptureFixture[str], factories: Path
) -> None:
    status, _, err = run(capsys, "estimate", "my_factories:pair", "--batch", "2")
    assert status == 2
    assert "--batch and --seq do not apply" in err


# ---- as a program ----


def test_json_alone_is_on_stdout(factories: Path) -> None:
    done = command("estimate", "my_factories:pair", "--json", cwd=factories)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["peak_bytes"] > 0
    assert "imported" in done.stderr


def test_models_cards_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "models")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == list(BENCHMARK_MODELS)
    status, out, _ = run(capsys, "cards")
    assert status == 0
    assert len(out.splitlines()) == 1 + len(memscale.hardware.known())
    status, out, _ = run(capsys, "--version")
    assert status == 0
    assert out.startswith(f"memscale {memscale.__version__} ")


def test_a_reader_may_stop_early(tmp_path: Path) -> None:
    shell = f"{sys.executable} -m memscale cards | true"
    done = subprocess.run(
        ["bash", "-c", f"{shell}; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0
    assert done.stderr == ""
