"""What could be imported before modules moved into rooms can be imported still."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import memscale

# A name of each, as outside programs use them.
PATHS = {
    "api": "wrap",
    "cli": "main",
    "config": "Config",
    "estimator": "estimate",
    "executor": "Executor",
    "first_step": "estimate_at_first_step",
    "hardware": "detect",
    "inputs": "Call",
    "layers": "find_layers",
    "ledger": "Measurement",
    "logs": "logger",
    "memory": "track",
    "oom": "explain_oom",
    "optim": "AdamW8bit",
    "plan_text": "plan_text",
    "planning": "plan",
    "recording": "record_step",
    "replay": "attach",
    "simdev": "enable",
    "targets": "find_model",
    "tracing": "trace_step",
    "training_step": "TrainingStep",
    "verify": "verify_correctness",
}


@pytest.mark.parametrize("name", PATHS)
def test_path(name: str) -> None:
    module = importlib.import_module(f"memscale.{name}")
    assert hasattr(module, PATHS[name])
    assert module is getattr(memscale, name)
    # Its own name is the new one, and there is one module, not two.
    assert sys.modules[module.__name__] is module


def test_in_a_new_process() -> None:
    code = "from memscale.layers import find_layers; import memscale.targets as t; t"
    subprocess.run([sys.executable, "-c", code], check=True)
