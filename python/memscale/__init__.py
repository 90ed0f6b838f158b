"""MemScale: train PyTorch models in less memory."""

from __future__ import annotations

import sys as _sys
from importlib.metadata import version as _version

import torch as _torch

# The compiled modules are bound to one minor version of torch (its C++ ABI).
_TORCH_SERIES = "2.13."
if not _torch.__version__.startswith(_TORCH_SERIES):
    raise ImportError(
        f"memscale is built for torch {_TORCH_SERIES}*, "
        f"but torch {_torch.__version__} is installed: "
        f"pip install torch=={_TORCH_SERIES}0"
    )

from memscale import hardware, logs, memory, optim, replay, simdev  # noqa: E402
from memscale._C import (  # noqa: E402
    ConfigError,
    Error,
    HardwareError,
    InputError,
    ParseError,
    Plan,
    PlanError,
    TraceError,
)
from memscale.api import (  # noqa: E402
    apply_all_optimizations,
    detach,
    optimize,
    wrap,
)
from memscale.attach.executor import Executor  # noqa: E402
from memscale.config import AsyncOffloadConfig, Config, OptimizationMode  # noqa: E402
from memscale.estimation.estimate import Estimate  # noqa: E402
from memscale.estimation.first_step import FirstStepEstimate, estimate_at_first_step  # noqa: E402
from memscale.estimation.oom import OomReport, explain_oom  # noqa: E402
from memscale.planning import estimate, pareto, plan  # noqa: E402
from memscale.verify import VerifyError, VerifyReport, verify_correctness  # noqa: E402

__version__ = _version("memscale-open")

# Modules that moved into rooms, by the names they had: imports of them go on working.
_MOVED = {
    "estimator": "planning",
    "executor": "attach.executor",
    "first_step": "estimation.first_step",
    "inputs": "model.inputs",
    "layers": "model.layers",
    "ledger": "attach.ledger",
    "oom": "estimation.oom",
    "plan_text": "report.plan",
    "recording": "trace.recording",
    "targets": "calls.targets",
    "tracing": "trace.static",
    "training_step": "trace.training_step",
}
for _old, _new in _MOVED.items():
    _module = _sys.modules[f"memscale.{_new}"]
    globals()[_old] = _sys.modules[f"memscale.{_old}"] = _module

__all__ = [
    "AsyncOffloadConfig",
    "Config",
    "ConfigError",
    "Error",
    "Estimate",
    "Executor",
    "FirstStepEstimate",
    "HardwareError",
    "InputError",
    "OomReport",
    "OptimizationMode",
    "ParseError",
    "Plan",
    "PlanError",
    "TraceError",
    "VerifyError",
    "VerifyReport",
    "apply_all_optimizations",
    "detach",
    "estimate",
    "estimate_at_first_step",
    "explain_oom",
    "hardware",
    "logs",
    "memory",
    "optim",
    "optimize",
    "pareto",
    "plan",
    "replay",
    "simdev",
    "verify_correctness",
    "wrap",
]
