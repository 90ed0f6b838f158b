"""Optimizer steps: ours, torch's and other packages', on the same parameters.

``ns/param`` is the process's CPU time of a step on one thread, in alternating rounds;
ratios are of the same round. ``gain`` is wall time on two threads over one. Temporary
bytes are what tensors hold at a step's peak beyond before it, to the byte.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memscale.benchmarks.goals import Goal, Report
from memscale.benchmarks.optimizer_peers import (
    CONTESTANTS,
    Contestant,
    install,
    state_bytes,
)
from memscale.benchmarks.recompute_case import order_of, spread
from memscale.memory import track

__all__ = ["measure", "optimizer_goals", "run"]

_PARAMS, _QUICK_PARAMS = 100_000_000, 10_000_000
_TENSORS = 4
_BLOCK = 4096  # torchao keeps float32 for sizes that are no multiples of its block
_ROUNDS, _QUICK_ROUNDS = 15, 15
_OURS, _OURS_FP32 = "ours 8-bit", "ours fp32"
_PEER, _FUSED = "bitsandbytes", "torch fused"


def _params(count: int) -> list[nn.Parameter]:
    torch.manual_seed(0)
    size = count // _TENSORS // _BLOCK * _BLOCK
    params = []
    for _ in range(_TENSORS):
        p = nn.Parameter(torch.randn(size) * 0.1)
        p.grad = torch.randn(size) * 0.01
        params.append(p)
    return params


def _settled(
    who: Contestant, params: list[nn.Parameter]
) -> tuple[Any, dict[str, Any]] | None:
    """The optimizer with its state made, and its row; None if it cannot run."""
    count = sum(p.numel() for p in params)
    held: list[Tensor] = list(params)
    try:
        optimizer = who.make(held)
        optimizer.step()
        optimizer.step()
        with track("cpu") as memory:
            optimizer.step()
    except Exception as error:  # another package's: it is not here to be debugged
        if who.package is None:
            raise
        print(f"  {who.name} does not run here: {type(error).__name__}: {error}")
        return None
    row = {
        "optimizer": who.name,
        "params": count,
        "temporary_bytes": memory.peak - memory.before,
        "state_bytes_per_param": state_bytes(optimizer) / count,
    }
    return optimizer, row


def _alternating(
    steps: dict[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float],
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        for name in order_of(list(steps), turn):
            begin = clock()
            steps[name]()
            seconds[name].append(clock() - begin)
    return seconds


def _on_threads(count: int, step: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        torch.set_num_threads(count)
        step()

    return run


def measure(
    contestants: tuple[Contestant, ...], count: int, rounds: int
) -> list[dict[str, Any]]:
    params = _params(count)
    count = sum(p.numel() for p in params)
    torch.set_num_threads(1)
    optimizers: dict[str, Any] = {}
    rows: dict[str, dict[str, Any]] = {}
    for who in contestants:
        found = _settled(who, params)
        if found is not None:
            optimizers[who.name], rows[who.name] = found
    seconds = _alternating(
        {name: each.step for name, each in optimizers.items()},
        rounds,
        time.process_time,
    )
    for name, row in rows.items():
        row["rounds"] = rounds
        row["ns_per_param"] = spread([1e9 * s / count for s in seconds[name]])
        for other in (_OURS, _FUSED):
            if other in seconds:
                pairs = zip(seconds[name], seconds[other], strict=True)
                row[f"time_over_{other.replace(' ', '_')}"] = spread(
                    [mine / its for mine, its in pairs]
                )
    for name in (_OURS, _OURS_FP32, _FUSED):
        step = optimizers[name].step
        both = {"one": _on_threads(1, step), "two": _on_threads(2, step)}
        both["two"]()  # threads start
        wall = _alternating(both, rounds, time.perf_counter)
        pairs = zip(wall["two"], wall["one"], strict=True)
        rows[name]["two_threads_over_one"] = spread([two / one for two, one in pairs])
    torch.set_num_threads(1)
    return list(rows.values())


def optimizer_goals(rows: list[dict[str, Any]]) -> list[Goal]:
    row = {each["optimizer"]: each for each in rows}

    def median(name: str, key: str) -> float:
        return float(row[name][key]["median"]) if name in row else math.nan

    return [
        Goal("8-bit step", median(_OURS, "ns_per_param"), 3.0, "<=", "ns/param"),
        Goal(
            "bitsandbytes' time / 8-bit",
            median(_PEER, "time_over_ours_8-bit"),
            10,
            ">=",
        ),
        Goal("8-bit temporaries", row[_OURS]["temporary_bytes"], 0, "<=", "bytes"),
        Goal(
            "8-bit state",
            row[_OURS]["state_bytes_per_param"],
            2.04,
            "<=",
            "bytes/param",
        ),
        Goal(
            "fp32 step, time / torch fused",
            median(_OURS_FP32, "time_over_torch_fused"),
            1.05,
        ),
        Goal("8-bit, two threads / one", median(_OURS, "two_threads_over_one"), 1, "<"),
        Goal(
            "fp32, two threads / one",
            median(_OURS_FP32, "two_threads_over_one"),
            1,
            "<",
        ),
    ]


def _quartiles(figures: dict[str, float], digits: int = 2) -> str:
    return f"{figures['q1']:.{digits}f}-{figures['q3']:.{digits}f}"


def _print(rows: list[dict[str, Any]]) -> None:
    print(
        f"{rows[0]['params'] / 1e6:.0f} M float32 parameters, one thread, "
        f"{rows[0]['rounds']} rounds\n"
        f"  {'optimizer':<14} {'ns/param':>8} {'quartiles':<13} {'/ fused':>7} "
        f"{'temporaries':>14} {'state B/param':>13} {'two threads / one':>17}"
    )
    for row in rows:
        time_ = row["ns_per_param"]
        gain = row.get("two_threads_over_one")
        ratio = row["time_over_torch_fused"]["median"]
        print(
            f"  {row['optimizer']:<14} {time_['median']:>8.2f} "
            f"{_quartiles(time_):<13} {ratio:>7.2f} {row['temporary_bytes']:>14,} "
            f"{row['state_bytes_per_param']:>13.3f} "
            + (f"{gain['median']:>6.2f} ({_quartiles(gain)})" if gain else ""),
            flush=True,
        )


def run(quick: bool = False) -> Report:
    install(fetch=not quick)
    there = tuple(who for who in CONTESTANTS if who.is_there())
    for who in CONTESTANTS:
        if who not in there:
            print(f"not installed: {who.name}")
    rows = measure(
        there,
        _QUICK_PARAMS if quick else _PARAMS,
        _QUICK_ROUNDS if quick else _ROUNDS,
    )
    _print(rows)
    goals = optimizer_goals(rows)
    if quick and not any(who.name == _PEER for who in there):
        goals = [goal for goal in goals if not math.isnan(goal.figure)]
    return Report("optimizer", rows, goals)
