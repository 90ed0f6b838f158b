"""Tests on a CUDA build of torch over the stand-in libraries (README.md).

Run by ``make test-cuda``. A test runs on one RTX 3090, unless it is marked with
``machine``, which names the cards, their number, variables of the environment and the
build of MemScale (``kernels=False``: without CUDA kernels): then it runs in a process
of its own.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

# Before torch looks for a card, and read by torch when it is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
os.environ["HF_HUB_OFFLINE"] = "1"

import cards
import pytest
import standin
import torch
import transformers.masking_utils

DEFAULT_CARD = "RTX 3090"
INSIDE = "CUDA_STANDIN_INSIDE"  # set in the process of a marked test
FAILED = pytest.StashKey[bool]()
BUILDS = Path(os.environ["CUDA_STANDIN_BUILDS"])  # of make test-cuda

if INSIDE not in os.environ:
    os.environ.update(cards.environment(DEFAULT_CARD))

# Kernels compute nothing here, so that positions are all zeros, which transformers
# takes for many sequences packed into one.
transformers.masking_utils.find_packed_sequence_indices = lambda position_ids: None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "machine(card, devices, env, kernels): in a process of its own"
    )
    config.addinivalue_line("markers", "calls_unsupported: what nobody wrote")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    mark = item.get_closest_marker("machine")
    if mark is None or INSIDE in os.environ:
        return
    item.obj = lambda **fixtures: run_alone(item.nodeid, item.config, **mark.kwargs)


def run_alone(
    test: str,
    config: pytest.Config,
    card: str = DEFAULT_CARD,
    devices: int = 1,
    env: dict[str, str] | None = None,
    kernels: bool = True,
) -> None:
    """Runs the test in a process that sees such a machine."""
    if kernels and not has_kernels():
        pytest.skip("MemScale was built without CUDA kernels: no nvcc")
    build = BUILDS / ("with_kernels" if kernels else "without_kernels")
    # Without what xdist tells its workers.
    variables = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    variables |= cards.environment(card, devices=devices) | (env or {})
    variables |= {INSIDE: "1", "PYTHONPATH": str(build)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test],
        env=variables,
        cwd=config.rootpath,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def has_kernels() -> bool:
    return (BUILDS / "with_kernels").exists()


@pytest.fixture(autouse=True)
def _empty_card(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test begins and ends with an empty card and calls nothing unsupported."""
    free_all()
    before = standin.unsupported_calls()
    yield
    if request.node.stash.get(FAILED, False):
        return  # its traceback keeps tensors alive
    if request.node.get_closest_marker("calls_unsupported") is None:
        assert standin.unsupported_calls() == before
    free_all()
    assert torch.cuda.memory_allocated() == torch.cuda.memory_reserved() == 0, (
        "the test left tensors on the card"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


def free_all() -> None:
    for name in ("last_exc", "last_value", "last_traceback"):  # of a failed test
        if hasattr(sys, name):
            delattr(sys, name)
    gc.collect()
    # torch keeps cuBLAS's workspaces for each handle and stream, as its own tensors.
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
