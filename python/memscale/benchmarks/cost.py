"""What a prediction costs: time, memory, and how both grow with depth.

Each figure is taken in a process of its own, ``python -m memscale.benchmarks.cost
<what> <device>``, because the first call's imports and the high-water mark of
resident memory belong to a process and cannot be taken twice.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import memscale
from memscale.benchmarks.models import BENCHMARK_MODELS, BenchmarkModel

__all__ = ["measure_depth", "measure_xl"]

_RUNS = 5


def _resident(field: str) -> int:
    """Bytes of a line of /proc/self/status, which has KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {field}")


def _reset_high_water() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        # Not permitted in some containers. The mark then includes the imports'
        # peak, so that the figure is an upper bound.
        print("cost: cannot reset VmHWM; the figure is a bound", file=sys.stderr)


def _on_meta(entry: BenchmarkModel, **overrides: object) -> tuple[Any, Any]:
    with torch.device("meta"):
        model = entry.build(**overrides)
    return model, entry.sample(1, 512, "meta")


def _estimate(model: Any, batch: Any, device: str) -> int:
    return int(
        memscale.estimate(model, batch, optimizer="adamw", device=device).peak_bytes
    )


def _xl(device: str) -> dict[str, float]:
    started = time.perf_counter()
    model, batch = _on_meta(BENCHMARK_MODELS["gpt2-xl"])
    built = time.perf_counter()
    _reset_high_water()
    before = _resident("VmRSS")
    started_estimate = time.perf_counter()
    peak = _estimate(model, batch, device)
    first = time.perf_counter() - started_estimate
    extra = _resident("VmHWM") - before
    started_estimate = time.perf_counter()
    _estimate(model, batch, device)
    return {
        "build_seconds": built - started,
        "seconds": first,
        "second_call_seconds": time.perf_counter() - started_estimate,
        "extra_bytes": extra,
        "predicted": peak,
    }


def _depth(device: str) -> dict[str, float]:
    entry = BENCHMARK_MODELS["gpt2-medium"]
    pairs = {layers: _on_meta(entry, n_layer=layers) for layers in (24, 96)}
    times: dict[int, list[float]] = {24: [], 96: []}
    for run in range(_RUNS + 1):
        # Alternating, so that a slow spell of the machine meets both.
        for layers, (model, batch) in pairs.items():
            started = time.process_time()
            _estimate(model, batch, device)
            if run > 0:  # the first warms up
                times[layers].append(time.process_time() - started)
    shallow, deep = (statistics.median(times[layers]) for layers in (24, 96))
    return {"seconds_24": shallow, "seconds_96": deep, "ratio": deep / shallow}


_FIGURES = {"xl": _xl, "depth": _depth}


def _in_process(what: str, device: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "memscale.benchmarks.cost", what, device],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"cost {what} on {device}: exit code {done.returncode}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def measure_xl(device: str, runs: int = 1) -> dict[str, float]:
    """Medians of predicting a step of GPT-2 XL, 1x512, AdamW, model on meta.

    ``seconds`` and ``extra_bytes`` are of the first call in a fresh process.
    """
    found = [_in_process("xl", device) for _ in range(runs)]
    return {key: statistics.median(f[key] for f in found) for key in found[0]}


def measure_depth(device: str) -> dict[str, float]:
    """CPU seconds for 24 and 96 layers of GPT-2 medium's width, and their ratio."""
    return _in_process("depth", device)


def _main(what: str, device: str) -> None:
    if device == "sim":
        memscale.simdev.enable(memory="64GiB")
    print(json.dumps(_FIGURES[what](device)))


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2])
