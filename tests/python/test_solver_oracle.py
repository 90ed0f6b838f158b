"""The solver against HiGHS, which solves the same choice as an integer program."""

from __future__ import annotations

import random
from dataclasses import dataclass

import highspy
import numpy as np
import pytest

from memscale._C import Option, Problem, SolveResult, pareto, solve


@dataclass
class Case:
    """A problem as data: options are (held, forward, backward, host, ns)."""

    options: list[list[tuple[int, int, int, int, int]]]
    layers: list[tuple[int, int, int]]
    other_peak: int
    host_budget: int

    def under(self, budget: int) -> Problem:
        return Problem(
            [[Option(*option) for option in options] for options in self.options],
            self.layers,
            self.other_peak,
            budget,
            self.host_budget,
        )


@dataclass
class Oracle:
    is_optimal: bool
    nanoseconds: float
    bound: float


def ask_highs(case: Case, budget: int, seconds: float = 20.0) -> Oracle | None:
    """Nothing if no plan fits."""
    columns = [
        (layer, option)
        for layer, (which, _, _) in enumerate(case.layers)
        for option in case.options[which]
    ]
    if case.other_peak > budget:
        return None
    rows: list[tuple[dict[int, float], float, float]] = []
    for number, (_, forward_base, backward_base) in enumerate(case.layers):
        one = {c: 1.0 for c, (layer, _) in enumerate(columns) if layer == number}
        rows.append((one, 1.0, 1.0))
        for base, peak in ((forward_base, 1), (backward_base, 2)):
            row = {
                c: float(option[0] + (option[peak] if layer == number else 0))
                for c, (layer, option) in enumerate(columns)
                if layer <= number
            }
            rows.append((row, -highspy.kHighsInf, float(budget - base)))
    host = {c: float(option[3]) for c, (_, option) in enumerate(columns)}
    rows.append((host, -highspy.kHighsInf, float(case.host_budget)))

    program = highspy.HighsLp()
    program.num_col_ = len(columns)
    program.num_row_ = len(rows)
    program.col_cost_ = np.array([float(option[4]) for _, option in columns])
    program.col_lower_ = np.zeros(len(columns))
    program.col_upper_ = np.ones(len(columns))
    program.integrality_ = [highspy.HighsVarType.kInteger] * len(columns)
    program.row_lower_ = np.array([row[1] for row in rows])
    program.row_upper_ = np.array([row[2] for row in rows])
    program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    program.a_matrix_.start_ = np.cumsum([0] + [len(row[0]) for row in rows])
    program.a_matrix_.index_ = np.array([c for row in rows for c in row[0]])
    program.a_matrix_.value_ = np.array([v for row in rows for v in row[0].values()])
    highs = highspy.Highs()
    for name, value in (
        ("output_flag", False),
        ("threads", 1),
        ("time_limit", seconds),
        ("mip_rel_gap", 0.0),
        ("mip_abs_gap", 0.5),
        ("mip_feasibility_tolerance", 1e-9),
        ("primal_feasibility_tolerance", 1e-9),
    ):
        highs.setOptionValue(name, value)
    highs.passModel(program)
    highs.run()
    status = highs.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        return None
    info = highs.getInfo()
    return Oracle(
        status == highspy.HighsModelStatus.kOptimal,
        info.objective_function_value,
        info.mip_dual_bound,
    )


def check(case: Case, budget: int) -> SolveResult:
    result = solve(case.under(budget))
    truth = ask_highs(case, budget)
    if truth is None:
        assert result.status == "infeasible"
        smallest = result.smallest_budget
        if smallest is not None:
            assert smallest > budget
            assert ask_highs(case, smallest - 1) is None
            at_smallest = ask_highs(case, smallest)
            assert at_smallest is not None
            assert result.plan.nanoseconds == round(at_smallest.nanoseconds)
        return result
    assert result.status != "infeasible"
    assert result.plan.peak <= budget
    assert result.plan.host <= case.host_budget
    assert result.plan.nanoseconds >= truth.bound - 0.5
    if truth.is_optimal:
        assert result.lower_bound <= truth.nanoseconds + 0.5
    if result.status == "optimal":
        assert result.plan.nanoseconds <= truth.nanoseconds + 0.5
    else:
        assert result.gap <= 0.01
    return result


def draw_any(chance: random.Random) -> Case:
    below = chance.choice([5, 30, 100_000])

    def any_number() -> int:
        return chance.randrange(below)

    uses_host = chance.random() < 0.5
    options = [
        [
            (
                any_number(),
                any_number(),
                any_number(),
                any_number() if uses_host else 0,
                any_number(),
            )
            for _ in range(chance.randint(1, 6))
        ]
        for _ in range(chance.randint(1, 4))
    ]
    layers = [
        (chance.randrange(len(options)), any_number(), any_number())
        for _ in range(chance.randint(1, 12))
    ]
    return Case(options, layers, any_number(), any_number() * len(layers))


@pytest.mark.parametrize("seed", range(30))
def test_any_problem(seed: int) -> None:
    """Ten each, at budgets from too small to enough."""
    chance = random.Random(seed)
    for _ in range(10):
        case = draw_any(chance)
        most = max(sum(max(option[:3]) for option in o) for o in case.options)
        check(case, chance.randrange(most * (len(case.layers) + 1) + 1))


def draw_layer(
    chance: random.Random, num_options: int, offloads: bool
) -> list[tuple[int, int, int, int, int]]:
    """As cuts are: the less is held, the more is made again, ever more dearly."""
    everything = chance.randint(20_000, 100_000)
    options = []
    held, ns = everything, 0
    for i in range(num_options):
        options.append((held, everything // 4, everything - held, 0, ns))
        less = held * chance.randint(5, 25) // 100
        if offloads and i % 2 == 0:
            options.append(
                (held - less, everything // 3, everything - held, less, ns + less // 9)
            )
        held -= less
        ns += less // (20 - i) + chance.randrange(50)
    return options


def draw_model(kind: str, num_layers: int) -> Case:
    chance = random.Random(kind)
    offloads = kind.endswith("with offload")
    if kind.startswith("equal"):
        options = [draw_layer(chance, 8, offloads)]
        layers = [0] * num_layers
    elif kind.startswith("two kinds"):
        options = [draw_layer(chance, 6, offloads) for _ in range(2)]
        layers = [i % 2 for i in range(num_layers)]
    else:  # four stages that become smaller
        options = []
        layers = []
        for stage in range(4):
            drawn = draw_layer(chance, 5, offloads)
            shrink = 2**stage
            options.append([tuple(n // shrink for n in o) for o in drawn])
            layers += [stage] * (num_layers // 4)
    n = len(layers)
    bases = [(10_000 * n, 10_000 * n + 2_000 * (n - k)) for k in range(n)]
    return Case(
        options,
        [(which, *bases[k]) for k, which in enumerate(layers)],
        11_000 * n,
        4_000 * n if offloads else 0,
    )


KINDS = ["equal", "two kinds", "stages"]


@pytest.mark.parametrize("num_layers", [8, pytest.param(24, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", KINDS + [kind + " with offload" for kind in KINDS])
def test_problems_like_models(kind: str, num_layers: int) -> None:
    case = draw_model(kind, num_layers)
    smallest = solve(case.under(0)).smallest_budget
    assert smallest is not None
    largest = pareto(case.under(0), 2)[-1].plan.peak
    last = None
    for share in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0):
        budget = smallest + int((largest - smallest) * share)
        result = check(case, budget)
        if result.status == "optimal":
            assert last is None or result.plan.nanoseconds <= last
            last = result.plan.nanoseconds
    assert last == 0
