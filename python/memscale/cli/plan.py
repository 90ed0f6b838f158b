"""``memscale plan``: what each layer would do, decided without running anything."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import memscale
from memscale._C import ConfigError
from memscale.cli.models import Subject, UsageError
from memscale.config import Config, OptimizationMode
from memscale.planning import Frontier

__all__ = ["add_options", "add_wishes", "check_options", "make", "show"]


def add_wishes(parser: argparse.ArgumentParser, *, default: str | None) -> None:
    """What a plan is asked for; ``default`` is the mode that is not given."""
    add = parser.add_argument
    add(
        "--budget",
        type=_budget,
        metavar="SIZE",
        help='hard limit of allocated device bytes: "8GiB"',
    )
    add(
        "--mode",
        choices=[mode.value for mode in OptimizationMode],
        default=default,
        help="what may be spent where there is no budget; "
        f"default: {default or 'no plan'}",
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """What ``plan`` has beside the options of ``estimate``."""
    add_wishes(parser, default=OptimizationMode.BALANCED.value)
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument(
        "--json", action="store_true", help="print the plan as JSON and nothing else"
    )
    shown.add_argument(
        "--explain", action="store_true", help="print reasons, layer by layer"
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write the plan as JSON, for Config(plan=FILE)",
    )
    kind.add_argument(
        "--pareto",
        action="store_true",
        help="print all plans that no other beats, from the smallest to the fastest",
    )


def _budget(text: str) -> int:
    try:
        budget = Config(budget=text).budget
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    assert budget is not None
    return budget


def check_options(options: argparse.Namespace) -> None:
    """What can be said before anything slow."""
    if options.pareto and options.budget is not None:
        raise UsageError("--pareto shows every budget: --budget does not apply")
    if options.pareto and options.explain:
        raise UsageError("--explain is of one plan: --pareto does not apply")
    if options.output is None:
        return
    if options.output.is_dir():
        raise UsageError(f"--output: {options.output} is a directory")
    if not options.output.parent.is_dir():
        raise UsageError(f"--output: no directory {options.output.parent}")


def make(options: argparse.Namespace, subject: Subject, **sizes: Any) -> Frontier:
    """The plan, or with ``--pareto`` all of them."""
    config = Config(mode=options.mode, budget=options.budget)
    decide = memscale.pareto if options.pareto else memscale.plan
    made = decide(
        subject.model,
        subject.sample,
        options.optimizer,
        config,
        subject.loss_fn,
        **sizes,
    )
    return made if isinstance(made, Frontier) else Frontier([made])


def show(options: argparse.Namespace, plans: Frontier) -> None:
    if options.output is not None:
        options.output.write_text(plans[0].to_json() + "\n", encoding="utf-8")
    if options.json and options.pareto:
        print(f"[{','.join(plan.to_json() for plan in plans)}]")
    elif options.json:
        print(plans[0].to_json())
    elif options.pareto:
        print(plans)
    else:
        print(plans[0].explain() if options.explain else plans[0])
        if options.output is not None:
            print(f"\nSaved: Config(plan={str(options.output)!r}) follows it.")
