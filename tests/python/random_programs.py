"""Random programs, trained plain and by us, and compared to the bit.

::

    python tests/python/random_programs.py 0 1000               # seeds 0 to 999
    python tests/python/random_programs.py 0 1000 --policies wrap --device cpu
    python tests/python/random_programs.py 17 1 --without mode,data_write
    python tests/python/random_programs.py 17 1 --shrink        # the least that differs

A program is drawn from its seed: its steps (random_model), and how the loop trains it
(random_ways). Both runs stop at the first error. An error of ours where eager has none
counts as refused where docs/replay.md says so, else as a mismatch.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import memscale
from memscale import Config, OptimizationMode, replay, simdev
from memscale._C import Question
from memscale.attach import planner
from memscale.model.layers import find_layers
from random_model import KINDS, ONLY_ON_CPU, Program
from random_ways import MAY_REFUSE, WAYS, batch
from same_bytes import how_far, same_bytes

STEPS = 3
POLICIES = ("cheap", "block", "mixed", "wrap")


@dataclass
class Run:
    """What training showed until it ended or raised."""

    recorded: dict[str, Tensor | None] = field(default_factory=dict)
    error: str | None = None
    ways: list[str] = field(default_factory=list)
    ops_replayed: int = 0
    planned: bool = False
    left_behind: int = 0  # bytes on the simulated device that nothing frees


@dataclass(frozen=True)
class Trial:
    """A seed and all that decides what is run for it."""

    seed: int
    device: str = "cpu"
    without: frozenset[str] = frozenset()
    keep: int = -1

    def ways(self) -> list[str]:
        rng = random.Random(self.seed * 7 + 1)
        drawn = rng.choices(list(WAYS), [5.0] + [1.0] * (len(WAYS) - 1), k=STEPS)
        return ["plain" if way in self.without else way for way in drawn]

    def command(self, policy: str) -> str:
        text = f"python tests/python/random_programs.py {self.seed} 1"
        text += f" --policies {policy} --device {self.device}"
        if self.without:
            text += f" --without {','.join(sorted(self.without))}"
        return text if self.keep == -1 else f"{text} --keep {self.keep:#x}"


def train(trial: Trial, policy: str | None) -> Run:
    """``policy`` None: the plain model."""
    run = Run()
    on_sim = trial.device == "sim"
    before = torch.accelerator.memory_allocated() if on_sim else 0
    _train_new_model(trial, policy, run)
    run.left_behind = _left_behind(before) if on_sim else 0
    return run


def _left_behind(before: int) -> int:
    """Bytes on the simulated device beyond ``before``, after what can be is freed."""
    for _ in range(5):
        if torch.accelerator.memory_allocated() <= before:
            break
        gc.collect()
        time.sleep(0.002)  # the thread of autograd may be freeing its last graph
    return torch.accelerator.memory_allocated() - before


def _train_new_model(trial: Trial, policy: str | None, run: Run) -> None:
    torch.manual_seed(trial.seed)
    without = trial.without | (ONLY_ON_CPU if trial.device != "cpu" else set())
    model = Program(trial.seed, without, trial.keep).to(trial.device)
    with _ours(model, policy, trial.seed, run):
        _train(model, trial, run)


def _train(model: Program, trial: Trial, run: Run) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, way in enumerate(trial.ways()):
        run.ways.append(way)
        torch.manual_seed(trial.seed * 10 + step)
        x = batch(trial.device)
        rng = random.Random(trial.seed * 10 + step)
        optimizer.zero_grad()
        try:
            loss = WAYS[way](model, x, rng)
        except Exception as error:
            run.error = f"{type(error).__name__}: {error}"
            return
        seen = {"loss": loss, "batch": x, "random state": torch.get_rng_state()}
        if trial.device == "sim":
            state = torch.get_device_module("sim").get_rng_state()
            seen["random state of sim"] = state
        seen |= {f"gradient of {n}": p.grad for n, p in model.named_parameters()}
        optimizer.step()
        seen |= dict(model.named_parameters()) | dict(model.named_buffers())
        for name, tensor in seen.items():
            copied = None if tensor is None else tensor.detach().cpu().clone()
            run.recorded[f"step {step} ({way}): {name}"] = copied


@contextmanager
def _ours(model: Program, policy: str | None, seed: int, run: Run) -> Iterator[None]:
    if policy is None:
        yield
        return
    if policy == "wrap":
        with _plans_for_small_tensors():
            config = Config(
                enable_logging=False,
                force_optimize=True,
                mode=OptimizationMode.AGGRESSIVE,
                use_8bit_optimizer=False,
                warmup_steps=1,
            )
            memscale.wrap(model, config)
            executor = model._memscale_executor
            try:
                yield
            finally:
                run.ops_replayed = executor.stats().ops_replayed
                run.planned = executor.plan is not None
                memscale.detach(model)
        return
    chosen: str | dict[str, replay.Policy] = policy
    if policy == "mixed":
        rng = random.Random(seed)
        names = find_layers(model).modules
        chosen = {name: rng.choice(["cheap", "block", "keep"]) for name in names}
    handle = replay.attach(model, chosen, min_bytes=0)
    try:
        yield
    finally:
        run.ops_replayed = handle.stats().ops_replayed
        handle.detach()


@contextmanager
def _plans_for_small_tensors() -> Iterator[None]:
    """Keep sets for tensors of any size, which ``wrap`` has no field for."""
    defaults = replay.attach.__kwdefaults__
    before = defaults["min_bytes"], planner.question_of

    def question_of(*args: Any, **facts: Any) -> Question:
        question = before[1](*args, **facts)
        question.min_bytes = 0
        return question

    defaults["min_bytes"], planner.question_of = 0, question_of
    try:
        yield
    finally:
        defaults["min_bytes"], planner.question_of = before


def difference(plain: Run, ours: Run) -> str | None:
    """What is not the same; None if all is, and "refused" where we may."""
    for name in plain.recorded.keys() & ours.recorded.keys():
        if not same_bytes(plain.recorded[name], ours.recorded[name]):
            break
    else:
        return _difference_of_errors(plain, ours)
    for name, theirs in plain.recorded.items():  # the first one
        if not same_bytes(theirs, ours.recorded[name]):
            return f"{name}: {how_far(theirs, ours.recorded[name])}"
    raise AssertionError


def _difference_of_bytes(plain: Run, ours: Run) -> str | None:
    """Some programs make cycles that torch itself never frees; ours free no less."""
    if ours.left_behind <= plain.left_behind:
        return None
    return f"leaves {ours.left_behind} bytes behind, plain {plain.left_behind}"


def _difference_of_errors(plain: Run, ours: Run) -> str | None:
    # With several wrong tensors another one may be the first, so what it says does
    # not count; its type, and when it comes, do.
    theirs, our = ((run.error or "").partition(":")[0] for run in (plain, ours))
    if theirs == our and plain.ways == ours.ways:
        return _difference_of_bytes(plain, ours)
    is_torchs = "modified by an inplace operation" in (ours.error or "")
    if is_torchs and MAY_REFUSE & set(ours.ways[-1:]):
        return "refused"
    when = f"step {len(ours.ways) - 1} ({ours.ways[-1]})"
    return f"{when}: error {plain.error!r:.160}, ours {ours.error!r:.160}"


def _is_of_any_hooks(trial: Trial, plain: Run, ours: Run) -> bool:
    """Whether saved-tensor hooks that do nothing give torch our results.

    torch.utils.checkpoint saves its arguments from Python. With any hooks set, that
    asks a view whose base was written for its node, sooner than its first use would:
    see the limits in docs/replay.md.
    """
    # Under hooks torch checks no versions: only results can be told so.
    if plain.error is not None or ours.error is not None:
        return False
    if "checkpoint" not in Program(trial.seed, trial.without, trial.keep).text():
        return False
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        return difference(train(trial, None), ours) is None


@dataclass
class Tally:
    """What came of many trials."""

    count: Counter[str] = field(default_factory=Counter)
    mismatches: list[str] = field(default_factory=list)

    def run(self, trial: Trial, policies: Collection[str]) -> list[str]:
        """Policies under which the program is not the same."""
        unlike = []
        plain = train(trial, None)
        self.count["eager errors"] += plain.error is not None
        for policy in policies:
            ours = train(trial, policy)
            self.count["ran"] += 1
            self.count["ops replayed"] += ours.ops_replayed
            self.count["replaying"] += ours.ops_replayed > 0
            self.count["planned"] += ours.planned
            found = difference(plain, ours)
            if found not in (None, "refused") and _is_of_any_hooks(trial, plain, ours):
                self.count["as under any hooks"] += 1
            elif found == "refused":
                self.count["refused"] += 1
            elif found is not None:
                unlike.append(policy)
                seed = f"seed {trial.seed}, {policy}"
                self.mismatches.append(f"{seed}: {found}\n    {trial.command(policy)}")
        return unlike

    def __str__(self) -> str:
        return f"ran {self.count['ran']}, mismatches {len(self.mismatches)}, " + (
            ", ".join(
                f"{name} {self.count[name]}"
                for name in (
                    "refused",
                    "as under any hooks",
                    "eager errors",
                    "planned",
                    "ops replayed",
                )
            )
        )


def shrunk(trial: Trial, policy: str) -> Trial:
    """The same mismatch with as few instructions as can be, left out one by one."""

    def fails(candidate: Trial) -> bool:
        found = difference(train(candidate, None), train(candidate, policy))
        return found not in (None, "refused")

    trial = Trial(trial.seed, trial.device, trial.without, (1 << 64) - 1)
    for bit in reversed(range(64)):
        keep = trial.keep & ~(1 << bit)
        candidate = Trial(trial.seed, trial.device, trial.without, keep)
        if fails(candidate):
            trial = candidate
    return trial


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("start", type=int, help="the first seed")
    parser.add_argument("count", type=int, help="how many seeds")
    parser.add_argument("--policies", default="cheap,block,mixed")
    parser.add_argument("--device", default="cpu", choices=["cpu", "sim"])
    parser.add_argument(
        "--without", default="", help=f"of {', '.join([*KINDS, *WAYS])}"
    )
    parser.add_argument("--keep", type=lambda text: int(text, 0), default=-1)
    parser.add_argument("--shrink", action="store_true", help="each that differs")
    parser.add_argument("--show", action="store_true", help="print the programs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.device == "sim":
        simdev.enable(memory="4GiB")
    without = frozenset(filter(None, arguments.without.split(",")))
    unknown = without - KINDS.keys() - WAYS.keys()
    if unknown:
        parser.error(f"no such kind: {', '.join(sorted(unknown))}")
    tally, started = Tally(), time.monotonic()
    for seed in range(arguments.start, arguments.start + arguments.count):
        trial = Trial(seed, arguments.device, without, arguments.keep)
        if arguments.show:
            print(Program(seed, without, trial.keep).text())
            print("steps:", ", ".join(trial.ways()))
        before = len(tally.mismatches)
        unlike = tally.run(trial, arguments.policies.split(","))
        print("".join(f"{text}\n" for text in tally.mismatches[before:]), end="")
        for policy in unlike if arguments.shrink else []:
            least = shrunk(trial, policy)
            print(f"  what is left of it, under {policy}:")
            print(Program(seed, without, least.keep).text())
            print(f"    {least.command(policy)}")
        sys.stdout.flush()
    print(f"{tally}, in {time.monotonic() - started:.0f} s")
    return int(bool(tally.mismatches))


if __name__ == "__main__":
    sys.exit(main())
