"""Who takes part in the optimizer benchmark: ours, torch's and other packages'."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memscale.optim import AdamW8bit

__all__ = ["CONTESTANTS", "Contestant", "install", "state_bytes"]

Params = list[Tensor]


def _bitsandbytes(params: Params) -> Any:
    return importlib.import_module("bitsandbytes").optim.AdamW8bit(params, lr=LR)


def _torchao(params: Params) -> Any:
    return importlib.import_module("torchao.optim").AdamW8bit(params, lr=LR)


def _deepspeed(params: Params) -> Any:
    module = importlib.import_module("deepspeed.ops.adam")
    return module.DeepSpeedCPUAdam(params, lr=LR)


LR = 1e-6  # all step the same parameters, and should not wear them out


@dataclass(frozen=True)
class Contestant:
    name: str
    make: Callable[[Params], Any]
    package: str | None = None  # that it is of, if not torch or ours

    def is_there(self) -> bool:
        return (
            self.package is None or importlib.util.find_spec(self.package) is not None
        )


CONTESTANTS = (
    Contestant("ours 8-bit", lambda params: AdamW8bit(params, lr=LR)),
    Contestant("ours fp32", lambda params: AdamW8bit(params, lr=LR, bits=32)),
    Contestant(
        "torch fused", lambda params: torch.optim.AdamW(params, lr=LR, fused=True)
    ),
    Contestant(
        "torch foreach", lambda params: torch.optim.AdamW(params, lr=LR, foreach=True)
    ),
    Contestant("bitsandbytes", _bitsandbytes, "bitsandbytes"),
    Contestant("torchao", _torchao, "torchao"),
    Contestant("DeepSpeed", _deepspeed, "deepspeed"),
)


def install(fetch: bool = True) -> None:
    """bitsandbytes and torchao for this process, fetched once if they may be.

    Into a folder of their own: transformers and peft behave otherwise where they find
    them, and the environment that is measured should stay as it was.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = cache / "memscale" / "peers"
    if folder.is_dir():
        sys.path.append(str(folder))
    missing = [
        peer.package
        for peer in CONTESTANTS
        if peer.package in ("bitsandbytes", "torchao") and not peer.is_there()
    ]
    if not missing or not fetch:
        return
    print(f"fetching {' and '.join(map(str, missing))} into {folder}", flush=True)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
    result = subprocess.run([*pip, str(folder), *map(str, missing)], check=False)
    if result.returncode == 0 and str(folder) not in sys.path:
        sys.path.append(str(folder))
    importlib.invalidate_caches()


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors in the state, each storage once."""
    storages = {}

    def visit(value: Any) -> None:
        if isinstance(value, dict):
            for each in value.values():
                visit(each)
        elif hasattr(value, "__tensor_flatten__"):  # of several tensors
            for name in value.__tensor_flatten__()[0]:
                visit(getattr(value, name))
        elif isinstance(value, Tensor):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()

    for state in optimizer.state.values():
        visit(state)
    return sum(storages.values())
