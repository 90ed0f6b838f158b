"""What the zoo is to show of plans: one line for each goal, met or missed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from zoo.budgets import DEVICES
from zoo.check import Outcome

MEDIAN_ERROR = 0.0001
WORST_ERROR = 0.03
MOST_UNDER = 0.01
_MOST_NAMED = 15


@dataclass(frozen=True)
class Goal:
    """``missed_by``: each model that misses it, and by how much, the worst first."""

    name: str
    figure: str
    bound: str
    is_met: bool
    missed_by: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        word = "met" if self.is_met else "MISSED"
        text = f"{word:6} {self.name}: {self.figure} (bound: {self.bound})"
        for each in self.missed_by[:_MOST_NAMED]:
            text += f"\n         {each}"
        if len(self.missed_by) > _MOST_NAMED:
            text += f"\n         and {len(self.missed_by) - _MOST_NAMED} more"
        return text


def goals(outcomes: Sequence[Outcome]) -> list[Goal]:
    """Of all that was shown; a device on which nothing ran has no goals."""
    made: list[Goal] = []
    for device in DEVICES:
        there = [
            outcome
            for outcome in sorted(outcomes, key=lambda each: each.kind)
            if device in outcome.shown and outcome.shown[device].trouble is None
        ]
        if there:
            made += [
                _planned(there, device),
                _unlike(there, device),
                _kept(there, device, "smallest"),
                _kept(there, device, "middle"),
                *_errors(there, device),
            ]
    return made


def asides(outcomes: Sequence[Outcome]) -> list[str]:
    """What the goals leave out, in words."""
    texts = []
    for device in DEVICES:
        shown = {o.kind: o.shown[device] for o in outcomes if device in o.shown}
        cannot = [kind for kind, each in shown.items() if each.trouble is not None]
        recorded = [kind for kind, each in shown.items() if each.planned == "recorded"]
        early = [
            kind
            for kind, each in shown.items()
            for budget in each.budgets.values()
            if budget.is_kept and max(budget.peaks[:-1]) > budget.budget
        ]
        for what, names in (
            ("the plain model does not train there", cannot),
            ("planned from the first real step", recorded),
            ("a budget kept in the last step, exceeded in an earlier one", early),
        ):
            if names:
                texts.append(f"{device}: {what}: {_listed(sorted(set(names)))}")
    random = sorted(o.kind for o in outcomes if o.has_random_depth and o.shown)
    if random:
        texts.append(f"random depth, not among the errors: {_listed(random)}")
    return texts


def _listed(names: list[str]) -> str:
    return f"{len(names)}: {', '.join(names)}"


def _planned(there: list[Outcome], device: str) -> Goal:
    without = [
        f"{outcome.kind}: {outcome.shown[device].why}"
        for outcome in there
        if outcome.shown[device].planned not in ("traced", "recorded")
    ]
    figure = f"{len(there) - len(without)} of {len(there)}"
    return Goal(f"{device}, planned", figure, "all", not without, without)


def _unlike(there: list[Outcome], device: str) -> Goal:
    counts = [(o.shown[device].unlike, o.kind) for o in there]
    missed = sorted(((n, kind) for n, kind in counts if n), reverse=True)
    named = [f"{kind}: {count}" for count, kind in missed]
    figure = f"{sum(n for n, _ in missed)} calls of {len(missed)} models"
    return Goal(f"{device}, unlike calls", figure, "0", not missed, named)


def _kept(there: list[Outcome], device: str, name: str) -> Goal:
    runs = [
        (outcome.kind, outcome.shown[device].budgets[name])
        for outcome in there
        if name in outcome.shown[device].budgets
    ]
    over = sorted(
        ((run.over, kind) for kind, run in runs if not run.is_kept and run.peaks),
        reverse=True,
    )
    missed = [f"{kind}: {by:+.3%}" for by, kind in over]
    missed += [f"{kind}: {run.trouble}" for kind, run in runs if run.trouble]
    figure = f"{len(runs) - len(missed)} of {len(runs)} kept"
    if over:
        figure += f", worst {over[0][0]:+.3%}"
    return Goal(f"{device}, {name} budget", figure, "all", not missed, missed)


def _errors(there: list[Outcome], device: str) -> list[Goal]:
    errors = [
        (outcome.shown[device].error, outcome.kind)
        for outcome in there
        if outcome.shown[device].predicted and not outcome.has_random_depth
    ]
    if not errors:
        return []
    median = statistics.median(abs(error) for error, _ in errors)
    worst = sorted(errors, key=lambda each: -abs(each[0]))
    under = sorted(errors)
    far = [f"{kind}: {e:+.2%}" for e, kind in worst if abs(e) > WORST_ERROR]
    low = [f"{kind}: {e:+.2%}" for e, kind in under if e < -MOST_UNDER]
    name = f"{device}, estimate of {len(errors)}"
    return [
        Goal(
            f"{name}, median |error|",
            f"{median:.4%}",
            f"{MEDIAN_ERROR:.2%}",
            median <= MEDIAN_ERROR,
        ),
        Goal(
            f"{name}, worst",
            f"{worst[0][0]:+.2%} ({worst[0][1]}), {len(far)} beyond",
            f"{WORST_ERROR:.0%}",
            not far,
            far,
        ),
        Goal(
            f"{name}, most under",
            f"{under[0][0]:+.2%} ({under[0][1]}), {len(low)} beyond",
            f"{-MOST_UNDER:.0%}",
            not low,
            low,
        ),
    ]
