"""Every model of the zoo, one after the other, on a few processes.

::

    python tests/python/zoo/run.py                  # all of them (make test-zoo)
    python tests/python/zoo/run.py bert unet_2d     # some
    python tests/python/zoo/run.py --arms wrap,smallest,block bert
    python tests/python/zoo/run.py --arms cpu,sim --no-check
    python tests/python/zoo/run.py --processes 1 --results zoo.jsonl

Prints a line for each, with what was compared, and ends with a summary. The exit
status is 1 if one failed (it trained differently), if fewer passed than there should
be, or, unless ``--no-check``, if a goal of zoo.goals is missed.

Models in plain torch come first, then transformers' in an order that is random and
always the same: a run that is stopped early is a sample.

With ``--results``, each outcome is written to that file as it comes, one JSON object
a line. A run that was stopped goes on from there: it leaves out what the file says
has passed or was skipped, tries again what failed, and sums up all of it.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from memscale import simdev
from zoo import torch_models
from zoo.architectures import architectures
from zoo.check import ARMS, DEFAULT_ARMS, Outcome, check
from zoo.goals import asides, goals

PROCESSES = 2
SECONDS_EACH = 120
AT_LEAST = 250


def work(connection: Connection, arms: tuple[str, ...]) -> None:
    """A process: gets names, gives outcomes."""
    import torch

    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Before the first backward, where autograd's engine counts devices.
    simdev.enable(memory="4GiB")
    architectures()
    gc.collect()
    gc.freeze()  # modules and classes: each collection would look at them again
    for kind in iter(connection.recv, None):
        try:
            connection.send(check(kind, arms))
        except BaseException as error:
            connection.send(Outcome(kind, "failed", f"RAISES {error!r}"[:300]))


class Worker:
    """A process that checks one model at a time, until its time is up."""

    def __init__(self, arms: tuple[str, ...]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, arms), daemon=True)
        self._process.start()
        theirs.close()
        self.kind: str | None = None
        self.deadline = float("inf")

    def give(self, kind: str, seconds: int) -> None:
        self.kind, self.deadline = kind, time.monotonic() + seconds
        self.connection.send(kind)

    def take(self) -> Outcome:
        assert self.kind is not None
        kind, self.kind, self.deadline = self.kind, None, float("inf")
        try:
            outcome: Outcome = self.connection.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            return Outcome(kind, "failed", f"its process died with status {code}")
        return outcome

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def stop(self) -> None:
        self._process.kill()
        self._process.join()


def run_all(
    kinds: list[str],
    arms: tuple[str, ...],
    seconds: int,
    processes: int,
    tell: Callable[[Outcome], None],
) -> None:
    """Calls ``tell`` with each outcome, in the order in which they come."""
    waiting = list(reversed(kinds))
    workers = [Worker(arms) for _ in range(min(processes, len(kinds)))]
    while waiting or any(worker.kind for worker in workers):
        for worker in workers:
            if worker.kind is None and waiting:
                worker.give(waiting.pop(), seconds)
        busy: list[Any] = [w.connection for w in workers if w.kind]
        ready = wait(busy, timeout=1)
        for i, worker in enumerate(workers):
            if worker.connection in ready:
                outcome = worker.take()
            elif worker.kind and time.monotonic() > worker.deadline:
                text = f"took more than {seconds} s"
                outcome = Outcome(worker.kind, "skipped", text)
                worker.stop()
            else:
                continue
            tell(outcome)
            if not worker.is_alive:
                workers[i] = Worker(arms)
    for worker in workers:
        worker.stop()


class Results:
    """Outcomes by name; also in a file, if there is one, which is read first."""

    def __init__(self, path: Path | None) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self._path = path
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                try:
                    outcome = Outcome.from_json(json.loads(line))
                except (ValueError, TypeError) as error:
                    raise SystemExit(
                        f"{path} cannot be gone on from: {error}; name another file"
                    ) from None
                self.outcomes[outcome.kind] = outcome

    def is_done(self, kind: str) -> bool:
        return kind in self.outcomes and self.outcomes[kind].status != "failed"

    def add(self, outcome: Outcome) -> None:
        print(outcome, flush=True)
        self.outcomes[outcome.kind] = outcome
        if self._path is not None:
            with self._path.open("a") as file:
                print(json.dumps(outcome.to_json()), file=file)


def in_order() -> list[str]:
    """All kinds: plain torch first, then transformers', shuffled."""
    others = list(architectures())
    random.Random(17).shuffle(others)
    return [*torch_models.MODELS, *others]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kinds", nargs="*", help="names of models; all, if none")
    parser.add_argument(
        "--arms", default=",".join(DEFAULT_ARMS), help=f"of {', '.join(ARMS)}"
    )
    parser.add_argument("--seconds", type=int, default=SECONDS_EACH, help="for each")
    parser.add_argument("--at-least", type=int, help=f"must pass; {AT_LEAST} of all")
    parser.add_argument("--processes", type=int, default=PROCESSES, help="at a time")
    parser.add_argument(
        "--results", type=Path, help="a file to write to and go on from"
    )
    parser.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether a goal that is missed is a failure",
    )
    arguments = parser.parse_args()
    arms = tuple(arguments.arms.split(","))
    if unknown := set(arms) - set(ARMS):
        parser.error(f"--arms must be of {', '.join(ARMS)}, got {sorted(unknown)}")
    kinds = arguments.kinds or in_order()
    if strangers := set(kinds) - set(in_order()):
        parser.error(f"no model of the zoo has these names: {sorted(strangers)}")
    at_least = arguments.at_least
    if at_least is None:
        at_least = 0 if arguments.kinds else AT_LEAST
    started = time.monotonic()
    results = Results(arguments.results)
    run_all(
        [kind for kind in kinds if not results.is_done(kind)],
        arms,
        arguments.seconds,
        arguments.processes,
        results.add,
    )
    outcomes = [results.outcomes[kind] for kind in kinds]
    return summary(
        outcomes, at_least, time.monotonic() - started, checks=arguments.check
    )


def summary(
    outcomes: list[Outcome], at_least: int, seconds: float, *, checks: bool = True
) -> int:
    count = Counter(outcome.status for outcome in outcomes)
    print()
    for status in ("skipped", "failed"):
        for outcome in sorted(outcomes, key=lambda each: each.kind):
            if outcome.status == status:
                print(outcome)
    print(
        f"\n{count['passed']} passed, {count['failed']} failed, "
        f"{count['skipped']} skipped, in {seconds:.0f} s"
    )
    if count["passed"] < at_least:
        print(f"fewer than {at_least} passed")
    for aside in asides(outcomes):
        print(aside)
    reached = goals(outcomes)
    for goal in reached:
        print(goal)
    missed = checks and not all(goal.is_met for goal in reached)
    return int(count["failed"] > 0 or count["passed"] < at_least or missed)


if __name__ == "__main__":
    sys.exit(main())
