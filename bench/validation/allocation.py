"""Does `allocate` find the best value of an axis? Simulated frontiers with a known answer. [5 s a family]

  python -m bench validation.allocation --runs 20

A family is five runs, with group sizes v of 4 to 64: R0 .2, B 1.6, a ceiling .75 − a / √v and a midpoint
300 v^b, so that larger groups are slower and end higher; a from .15 to .4, b from .35 to .7. 24 evaluations
up to 12,000 to 24,000; noise of sd .006. *Seeds vary*: A by .006, C_mid by 7 % (sd). The best value is known
on a fine grid of v, at the compute that all have, and at its half and quarter.
"""

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from bench.harness import Case, Row, repeated
from bench.table import table
from trainer.scaling.allocate import Allocation, allocate
from trainer.scaling.compare import compare
from trainer.scaling.curve.sigmoid import Curve, Sigmoid
from trainer.scaling.frontier import draws_by_value
from trainer.scaling.simulate import simulated

OPTIONS = {"runs": (20, "families of each kind")}
PARALLEL = True
VALUES = (4, 8, 16, 32, 64)
LAST, EVALUATIONS, NOISE = 12_000.0, 24, 0.006
SEED_A, SEED_C_MID = 0.006, 0.07  # standard deviations over seeds
KINDS = {"exact": 0.0, "seeds vary": 1.0}
SHARES = (0.25, 0.5, 1.0)


def family(rng: np.random.Generator) -> tuple[float, float]:
    """a and b."""
    return float(rng.uniform(0.15, 0.4)), float(rng.uniform(0.35, 0.7))


def law(v: float, a: float, b: float) -> Sigmoid:
    """The curve of a value."""
    return Sigmoid(0.2, 0.75 - a / v**0.5, 1.6, 300 * v**b)


def best_value(compute: float, a: float, b: float) -> float:
    """The best value between the lowest and the highest, at a compute."""
    grid = np.geomspace(VALUES[0], VALUES[-1], 2000)
    return float(grid[np.argmax([law(v, a, b).reward(compute) for v in grid])])


def simulate(a: float, b: float, spread: float, rng: np.random.Generator) -> dict[str, Curve]:
    """A run of each value."""
    runs = {}
    for v in VALUES:
        truth = law(v, a, b)
        A = truth.A + spread * SEED_A * float(rng.standard_normal())
        C_mid = truth.C_mid * float(np.exp(spread * SEED_C_MID * rng.standard_normal()))
        compute = np.linspace(0, LAST * rng.uniform(1, 2), EVALUATIONS + 1)
        noise, curve = rng.normal(0, NOISE, len(compute)), Sigmoid(truth.R0, A, truth.B, C_mid)
        runs[str(v)] = simulated(curve.reward, compute, noise, NOISE, str(v))
    return runs


def allocation_of(runs: Mapping[str, Curve], at: Sequence[float] = ()) -> Allocation:
    """The best values, of runs by their value."""
    on_axis = draws_by_value(compare(runs), {name: name for name in runs}, at)
    assert on_axis is not None
    return allocate(*on_axis)


def measure(kind: str, i: int) -> Row:
    """The best values, with their intervals and the truth, and the exponent beside that of the truth."""
    rng = np.random.default_rng([i, len(kind)])
    a, b = family(rng)
    rows = []
    for one in allocation_of(simulate(a, b, KINDS[kind], rng)).budgets[-len(SHARES) :]:
        e = one.value
        rows.append([best_value(one.compute, a, b), e.value, e.low, e.high])
    return {"kind": kind, "budgets": rows}


def cases(options: Namespace) -> Iterator[Case]:
    """Every family of both kinds."""
    return repeated(KINDS, options.runs, measure)


def describe(head: Row, rows: Sequence[Row]) -> str:
    """A line for each kind and budget: how often the interval holds the best value, error and width."""
    lines = []
    for kind in KINDS:
        for i, share in enumerate(SHARES):
            x = np.array([row["budgets"][i] for row in rows if row["kind"] == kind])
            if len(x):
                truth, value, low, high = x.T
                holds = float(((low <= truth * 1.001) & (truth <= high * 1.001)).mean())
                error, width = np.exp(np.median(np.abs(np.log(value / truth)))), np.median(high / low)
                lines.append(
                    [kind, f"{share:g}", str(len(x)), f"{holds:.2f}", f"× {error:.2f}", f"× {width:.1f}"]
                )
    return table(["kind", "of the compute", "families", "90 % holds", "error", "width"], lines)
