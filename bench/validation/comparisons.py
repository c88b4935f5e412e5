"""How often is `compare` right? Pairs of simulated recipes, with and without a difference in the ceiling.

  OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 python -m bench.validation.comparisons
  python -m bench.validation.comparisons --record    over bench/results/comparisons.json

Both recipes of a pair have B 1.8 and C_mid 2,000, with A .58 and .58 + ΔA. A run is evaluated 24 times, with
noise of sd .006, up to 3 or 5 times C_mid. Where seeds vary, each run has an A, B and C_mid of its own, with
standard deviations of .006, 5 % and 7 %. Every number in the table is a share of the pairs.

Then groups of three seeds: how often their interval of a parameter is no wider than the narrowest one of the
three alone (with the variance over seeds assumed that single runs get), and their ceiling identified where
any of the three alone is. One core takes a quarter of an hour for 100 pairs a row.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np

from bench import records
from bench.measure import machine
from bench.table import markdown
from trainer.scaling.compare import DIFFERENT, EQUIVALENT, INCONCLUSIVE, compare_fits
from trainer.scaling.curve.fit import Fit, fit_curve
from trainer.scaling.curve.sigmoid import Curve, Sigmoid
from trainer.scaling.seeds import PARAMETERS
from trainer.scaling.simulate import autocorrelated, simulated

A, B, C_MID, R0 = 0.58, 1.8, 2000.0, 0.30
EVALUATIONS, NOISE = 24, 0.006
SEED_SD = (0.006, 0.05, 0.07)  # of A, log B and log C_mid, where seeds vary
SEEDS = 3  # of a group
CODE = ("trainer/scaling", "bench/validation/comparisons.py")
Run = tuple[Curve, Fit]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of run."""

    vary: bool  # whether seeds vary
    reach: int  # last compute over C_mid
    correlation: float = 0.0  # of the errors of neighbouring evaluations

    def __str__(self) -> str:
        return ("seeds vary" if self.vary else "exact") + (
            f", AR {self.correlation:g}" * (self.correlation > 0)
        )


@dataclass(frozen=True, slots=True)
class Row:
    """Pairs of one kind."""

    kind: Kind
    seeds: int
    gap: float  # true difference of the ceilings


ROWS = [
    *(
        Row(Kind(vary, reach), seeds, gap)
        for reach in (3, 5)
        for vary in (False, True)
        for seeds in (1, SEEDS)
        for gap in (0.0, 0.02, 0.04)
    ),
    *(Row(Kind(False, reach, 0.6), 1, 0.0) for reach in (3, 5)),
]
HEAD = (
    "runs", "data to × C_mid", "seeds", "true ΔA", "A: different", "equivalent", "not known",
    "not identified", "B differs", "C_mid differs", "B or C_mid", "a lead",
)  # fmt: skip


def simulate(kind: Kind, ceiling: float, i: int, seed: int) -> Curve:
    """Simulated run `i`; the same for the same arguments."""
    stream = [seed, i, kind.reach, int(kind.vary), round(1000 * ceiling), round(10 * kind.correlation)]
    rng = np.random.default_rng(stream)
    moved = rng.normal(0, SEED_SD) * kind.vary
    truth = Sigmoid(R0, ceiling + moved[0], B * np.exp(moved[1]), C_MID * np.exp(moved[2]))
    error = rng.normal(0, NOISE, EVALUATIONS + 1)
    error[1:] = autocorrelated(error[1:], kind.correlation)  # that of R0 is its own
    compute = kind.reach * C_MID * np.arange(EVALUATIONS + 1) / EVALUATIONS
    return simulated(truth.reward, compute, error, NOISE, f"run {i}")


@cache
def run(kind: Kind, ceiling: float, i: int, seed: int) -> Run:
    """The simulated run with its fit."""
    curve = simulate(kind, ceiling, i, seed)
    return curve, fit_curve(curve)


def measure_pair(row: Row, i: int, seed: int) -> dict[str, Any]:
    """What is said of pair `i`; the same runs in every row of their kind."""
    two = {
        name: [run(row.kind, ceiling, first + row.seeds * i + k, seed) for k in range(row.seeds)]
        for name, ceiling, first in (("a", A + row.gap, 0), ("b", A, 100_000))
    }
    pair = compare_fits(two).pairs[0]
    return {
        "verdict": pair.verdict,
        "wrong sign": pair.verdict == DIFFERENT and pair.A.value * row.gap < 0,
        "identified": not pair.doubts,
        "B": pair.B_differs,
        "C_mid": pair.C_mid_differs,
        "B or C_mid": pair.B_differs or pair.C_mid_differs,
        "lead": bool(pair.leads),
    }


def measure_group(kind: Kind, i: int, seed: int) -> dict[str, Any]:
    """Group `i` of seeds beside each of them alone."""
    runs = [run(kind, A, SEEDS * i + k, seed) for k in range(SEEDS)]
    group = compare_fits({"all": runs}).recipes[0]
    alone = compare_fits({str(k): [one] for k, one in enumerate(runs)}).recipes
    result: dict[str, Any] = {"identified": not group.doubts or all(recipe.doubts for recipe in alone)}
    for name in PARAMETERS:
        widths = [np.log(e.high / e.low) for e in (r.estimate(name) for r in (group, *alone))]
        result[name] = bool(widths[0] <= min(widths[1:]))
    return result


def measure(pairs: int, groups: int, seed: int) -> records.Record:
    """The shares of every row, and of the groups."""
    rows = []
    for row in ROWS:
        pair = [measure_pair(row, i, seed) for i in range(pairs)]
        shares = {key: float(np.mean([p[key] for p in pair])) for key in pair[0] if key != "verdict"}
        for verdict in (DIFFERENT, EQUIVALENT, INCONCLUSIVE):
            shares[verdict] = float(np.mean([p["verdict"] == verdict for p in pair]))
        rows.append(asdict(row) | {"runs": str(row.kind)} | shares)
        records.say(" ".join(cells(rows[-1])))
    kinds = [Kind(True, 3), Kind(True, 5)]
    grouped = [measure_group(kinds[i % 2], i // 2, seed) for i in range(groups)]
    return {
        "pairs": pairs, "groups": groups, "seed": seed, "rows": rows,
        "more seeds": {key: float(np.mean([g[key] for g in grouped])) for key in grouped[0]},
        "machine": machine("cpu"), "commit": records.commit(*CODE),
    }  # fmt: skip


def cells(row: dict[str, Any]) -> list[str]:
    """One row of the table."""
    shares = [row[k] for k in (DIFFERENT, EQUIVALENT, INCONCLUSIVE)]
    shares += [1 - row["identified"], *(row[k] for k in ("B", "C_mid", "B or C_mid", "lead"))]
    reach, seeds, gap = row["kind"]["reach"], row["seeds"], row["gap"]
    return [row["runs"], f"{reach} ×", str(seeds), f"{gap:g}", *(f"{x:.2f}" for x in shares)]


def describe(record: records.Record) -> str:
    """Both tables, in Markdown."""
    more = record["more seeds"]
    widths = ", ".join(f"{name} in {more[name]:.3f}" for name in PARAMETERS)
    return (
        f"{markdown(HEAD, [cells(row) for row in record['rows']])}\n\n"
        f"Of {record['groups']} groups of three seeds that vary, the interval is no wider than the narrowest "
        f"of the three alone for {widths};\n"
        f"the ceiling is identified if that of any of them is in {more['identified']:.3f}."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, fit, compare, and print the shares."""
    tracked = "comparisons.json"
    parser = records.parser("validation.comparisons", __doc__, tracked, pairs=100, groups=300, seed=0)
    args = parser.parse_args(argv)
    record = measure(args.pairs, args.groups, args.seed)
    return records.finish(args, tracked, record, describe(record))


if __name__ == "__main__":
    sys.exit(main())
