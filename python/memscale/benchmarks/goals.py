"""Goals of a benchmark, and what every benchmark does with them at its end."""

from __future__ import annotations

import argparse
import json
import math
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

__all__ = ["Goal", "Report", "add_arguments", "finish"]

Direction = Literal["<=", "<", ">="]


@dataclass(frozen=True)
class Goal:
    """A figure and the bound it should keep. NaN, "not measured", keeps none."""

    name: str
    figure: float
    bound: float
    direction: Direction = "<="
    unit: str = ""

    @property
    def met(self) -> bool:
        if self.direction == "<=":
            return self.figure <= self.bound
        if self.direction == "<":
            return self.figure < self.bound
        return self.figure >= self.bound

    def __str__(self) -> str:
        figure = "not measured" if math.isnan(self.figure) else self._text(self.figure)
        bound = f"{self.direction} {self._text(self.bound)}"
        return f"{self.name}, {figure}, {bound}, {'met' if self.met else 'missed'}"

    def _text(self, value: float) -> str:
        return f"{value:.4g} {self.unit}".rstrip()


@dataclass
class Report:
    """What a benchmark found: its rows, in its own words, and its goals."""

    benchmark: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            "environment": {
                "machine": platform.machine(),
                "python": platform.python_version(),
                "torch": torch.__version__,
                # Both change the workspaces of convolutions.
                "threads": torch.get_num_threads(),
                "cpu": torch.backends.cpu.get_cpu_capability(),
            },
            "rows": self.rows,
            "goals": [
                {
                    "name": goal.name,
                    # JSON has no NaN.
                    "figure": None if math.isnan(goal.figure) else goal.figure,
                    "bound": goal.bound,
                    "direction": goal.direction,
                    "unit": goal.unit,
                    "met": goal.met,
                }
                for goal in self.goals
            ],
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick", action="store_true", help="fewer cases, in under two minutes"
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if a goal is missed"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write rows and goals to FILE"
    )


def finish(report: Report, options: argparse.Namespace) -> int:
    """Print the goals, write the file asked for; the exit code of the process."""
    print()
    for goal in report.goals:
        print(goal)
    if options.json is not None:
        options.json.write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    missed = sum(not goal.met for goal in report.goals)
    return 1 if options.check and missed else 0
