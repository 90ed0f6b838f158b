"""What wrap says, where, and how it is told to say nothing."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import memscale
from compat_twins import (
    Net,
    batch,
    config_of,
    executor_of,
    make,
    untouched_process,  # noqa: F401
)
from memscale import Config, logs
from memscale.report import progress

# How the text of a plan begins.
WITH_PLAN = "Net with float32[320, 64]"


def test_something_readable_by_default(caplog: pytest.LogCaptureFixture) -> None:
    model = make()
    memscale.wrap(model, config_of())
    for text in ("Net", "38,216 parameters", "7 layers", "mode balanced"):
        assert text in caplog.text
    caplog.clear()
    model(batch()).sum().backward()
    for text in ("Net with float32[320, 64]", "blocks.0", "peak", "MiB"):
        assert text in caplog.text
    caplog.clear()
    model.zero_grad()
    model(batch()).sum().backward()
    assert not caplog.records  # said once
    assert {record.name for record in caplog.records} <= {"memscale"}


def test_why_there_is_no_prediction(caplog: pytest.LogCaptureFixture) -> None:
    class Branching(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if x.sum() > 0 else -x)

    model = memscale.wrap(make(Branching), Config(use_empirical_fallback=False))
    caplog.clear()
    for _ in range(3):
        model(batch()).sum().backward()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "Branching runs without a prediction: values decide" in record.message


def test_silent(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    model = make()
    memscale.wrap(model, Config(enable_logging=False))
    model(batch()).sum().backward()
    memscale.detach(model)
    with memscale.optimize(model, config=Config(enable_logging=False)):
        model(batch()).sum().backward()
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


def test_silent_with_verification(caplog: pytest.LogCaptureFixture) -> None:
    model = make()
    memscale.wrap(model, Config(enable_logging=False, verify_correctness=True))
    model(batch()).sum().backward()
    memscale.detach(model)
    assert not caplog.records


def test_log_file(tmp_path: Path) -> None:
    """Written while the model is wrapped, closed with it, shared by two models."""
    path = tmp_path / "run.log"
    first, second = make(), make()
    for model in (first, second):
        memscale.wrap(model, Config(log_file=path))
    first(batch()).sum().backward()
    memscale.detach(first)
    assert path.read_text().count("7 layers") == 2
    assert path.read_text().count(WITH_PLAN) == 1
    second(batch()).sum().backward()
    assert path.read_text().count(WITH_PLAN) == 2
    memscale.detach(second)
    size = path.stat().st_size
    memscale.detach(memscale.wrap(make()))
    assert path.stat().st_size == size
    assert not any(isinstance(h, logging.FileHandler) for h in logs.logger.handlers)


def test_log_file_of_the_users_own_stays(tmp_path: Path) -> None:
    handler = logs.add_file(tmp_path / "run.log")
    memscale.detach(memscale.wrap(make(), Config(log_file=tmp_path / "run.log")))
    assert handler in logs.logger.handlers
    logs.logger.removeHandler(handler)
    handler.close()


def test_handlers_do_not_pile_up() -> None:
    memscale.detach(memscale.wrap(make()))
    before = list(logs.logger.handlers)
    for _ in range(5):
        memscale.detach(memscale.wrap(make()))
    assert logs.logger.handlers == before


def test_on_stderr_without_any_set_up() -> None:
    """A program that sets up no logging sees it; stdout is its own."""
    code = (
        "import torch, memscale\n"
        "model = memscale.wrap(torch.nn.Linear(8, 8))\n"
        "model(torch.ones(2, 8)).sum().backward()\n"
        "print('done')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "done\n"
    assert "Linear (72 parameters" in done.stderr
    assert "Linear with float32[2, 8]" in done.stderr


def test_progress_on_a_terminal_only(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    started: list[str] = []

    class Status:
        def __init__(self, text: str) -> None:
            self.text = text

        def start(self) -> None:
            started.append(self.text)

        def stop(self) -> None:
            pass

    class Console:
        def __init__(self, stderr: bool) -> None:
            assert stderr

        def status(self, text: str) -> Status:
            return Status(text)

    monkeypatch.setattr(progress, "Console", Console)
    model = memscale.wrap(make(), sample_input=batch())
    assert started == []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    memscale.wrap(model, sample_input=batch())
    assert started == ["memscale: planning Net …"]


def test_text_of_an_executor() -> None:
    model = memscale.wrap(make())
    assert "mode balanced" in str(executor_of(model))
    model(batch()).sum().backward()
    assert WITH_PLAN in str(executor_of(model))
    executor = executor_of(model)
    del model
    with pytest.raises(ReferenceError, match="gone"):
        str(executor)
