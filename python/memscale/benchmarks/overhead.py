"""What a wrapped model costs where nothing is gained: launch-bound, the worst case.

24 layers of width 64 and a batch of one, so that a step is nearly all launches: what is
done for each call, each layer and each op shows as it never will in a model that is
worth wrapping. Forward and backward, in the process's CPU time on one thread, each
variant with a model of its own, step by step in alternating order; ratios are to the
eager step of the same round.

A layer's hook, the way in through which its calls come to us, is measured alone: on
layers that keep everything and run one op, where it is idle, and on layers that are
recorded and run none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import memscale
from memscale import Config, replay
from memscale.benchmarks.goals import Goal, Report
from memscale.benchmarks.recompute_case import order_of, spread

__all__ = ["goals_of", "measure_hook", "measure_steps", "run"]

_LAYERS, _WIDTH, _HEADS, _LENGTH = 24, 64, 4, 16
_ROUNDS, _QUICK_ROUNDS = 301, 101
_WARM_UP = 8  # more than the steps that a wrapped model measures
_HOOKED_LAYERS = 100


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first_norm = nn.LayerNorm(_WIDTH)
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.out = nn.Linear(_WIDTH, _WIDTH)
        self.second_norm = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, 4 * _WIDTH)
        self.down = nn.Linear(4 * _WIDTH, _WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.first_norm(x)).view(batch, length, 3, _HEADS, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(batch, length, width)))
        hidden = F.gelu(self.up(self.second_norm(x)))
        result: torch.Tensor = x + self.drop(self.down(hidden))
        return result


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(_LAYERS))
        self.head = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(x)
        return result


class _Hooked(nn.Module):
    """A layer that runs one op, or none."""

    def __init__(self, runs_op: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.part = nn.Identity()  # layers have parts
        self.runs_op = runs_op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight if self.runs_op else x


def _wrap(model: nn.Module) -> None:
    """A model this small fits anywhere: its plan is empty."""
    memscale.wrap(model, Config(enable_logging=False))


def _attach_cheap(model: nn.Module) -> None:
    replay.attach(model, "cheap", min_bytes=0)  # also what is small


VARIANTS: dict[str, Callable[[nn.Module], None]] = {
    "eager": lambda model: None,
    "empty plan": _wrap,
    "cheap": _attach_cheap,
}


def _step(model: nn.Module, x: torch.Tensor) -> tuple[float, float]:
    """Process seconds of forward and of backward."""
    model.zero_grad(set_to_none=True)
    start = time.process_time()
    loss = model(x).square().mean()
    between = time.process_time()
    loss.backward()
    return between - start, time.process_time() - between


def measure_steps(rounds: int) -> list[dict[str, Any]]:
    """A row for each variant: spreads of its times, and of their ratios to eager's."""
    x = torch.ones(1, _LENGTH, _WIDTH)
    models = {}
    for name, attach in VARIANTS.items():
        torch.manual_seed(0)
        models[name] = _Model()
        attach(models[name])
        for _ in range(_WARM_UP):
            _step(models[name], x)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for turn in range(rounds):
        for name in order_of(list(models), turn):
            times[name].append(_step(models[name], x))
    rows = []
    for name, steps in times.items():
        ratios = [
            sum(step) / sum(eager)
            for step, eager in zip(steps, times["eager"], strict=True)
        ]
        rows.append(
            {
                "variant": name,
                "rounds": rounds,
                "forward_seconds": spread([forward for forward, _ in steps]),
                "backward_seconds": spread([backward for _, backward in steps]),
                "time_over_eager": spread(ratios),
            }
        )
    _check_plan(models["empty plan"])
    return rows


def _check_plan(model: nn.Module) -> None:
    recorded = model._memscale_executor.stats().ops_recorded  # type: ignore[union-attr, operator]
    if recorded:
        raise RuntimeError(f"the plan is not empty: {recorded} ops were recorded")


def _calls(model: nn.Module, x: torch.Tensor) -> float:
    start = time.process_time()
    model(x)
    return time.process_time() - start


def measure_hook(recording: bool, rounds: int) -> dict[str, Any]:
    """Microseconds that the way into a layer adds to a call of the layer."""
    x = torch.ones(8, 8)
    plain, hooked = (
        nn.Sequential(*(_Hooked(not recording) for _ in range(_HOOKED_LAYERS)))
        for _ in range(2)
    )
    handle = replay.attach(hooked, "block")
    if not recording:
        handle.set_policies(["keep"] * (1 + _HOOKED_LAYERS), tell=True)
    figures = []
    for turn in range(rounds + 1):
        seconds = {}
        for name in order_of(["plain", "hooked"], turn):
            seconds[name] = _calls(plain if name == "plain" else hooked, x)
        if turn > 0:  # the first warms up
            extra = seconds["hooked"] - seconds["plain"]
            figures.append(1e6 * extra / _HOOKED_LAYERS)
    handle.detach()
    return {
        "hook": "recording" if recording else "idle",
        "rounds": rounds,
        "layers": _HOOKED_LAYERS,
        "microseconds": spread(figures),
    }


def goals_of(rows: list[dict[str, Any]], hooks: list[dict[str, Any]]) -> list[Goal]:
    ratio = {row["variant"]: row["time_over_eager"]["median"] for row in rows}
    goals = [
        Goal("empty plan, time / eager", ratio["empty plan"], 1.01),
        Goal("cheap, every storage, time / eager", ratio["cheap"], 1.25),
    ]
    for hook in hooks:
        name = f"a layer's hook, {hook['hook']}"
        goals.append(Goal(name, hook["microseconds"]["median"], 5.0, "<=", "us"))
    return goals


def _print_rows(rows: list[dict[str, Any]]) -> None:
    print(f"{_LAYERS} layers, width {_WIDTH}, batch 1, {rows[0]['rounds']} rounds")
    print(f"  {'ms':<10} {'forward':>8} {'backward':>8} {'/ eager':>8} quartiles")
    for row in rows:
        ratio = row["time_over_eager"]
        print(
            f"  {row['variant']:<10} {1e3 * row['forward_seconds']['median']:>8.2f} "
            f"{1e3 * row['backward_seconds']['median']:>8.2f} {ratio['median']:>8.3f} "
            f"{ratio['q1']:.3f}-{ratio['q3']:.3f}",
            flush=True,
        )


def run(quick: bool = False) -> Report:
    torch.set_num_threads(1)
    rounds = _QUICK_ROUNDS if quick else _ROUNDS
    rows = measure_steps(rounds)
    _print_rows(rows)
    hooks = [measure_hook(recording, rounds) for recording in (False, True)]
    for hook in hooks:
        figures = hook["microseconds"]
        print(
            f"a layer's hook, {hook['hook']}: {figures['median']:.2f} us, quartiles "
            f"{figures['q1']:.2f}-{figures['q3']:.2f}"
        )
    return Report("overhead", [*rows, *hooks], goals_of(rows, hooks))
