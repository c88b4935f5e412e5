"""The time of a curve fit on one core: ours with its intervals, and the paper's grid beside its literal loop.

  OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 python -m bench.validation.fit_speed
  python -m bench.validation.fit_speed --record      over bench/results/fit-speed.json

The curve is the paper's ScaleRL, evaluated every 250 GPU-hours from 1,500 to 8,000 with noise. CPU time
depends less on other load than wall time. The literal loop runs once.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.optimize import OptimizeWarning

from bench import records
from bench.measure import machine, summary
from bench.sources import CURVES, R0
from bench.table import number, spread, table
from bench.validation.classical_intervals import bootstrap, profile
from bench.validation.literal_grid import literal_loop
from trainer.scaling import Curve, EvalPoint, Sigmoid, fit_curve
from trainer.scaling.curve.least_squares import compare_families
from trainer.scaling.curve.paper import PaperGrid, paper_fit

NOISE = 0.005
RESAMPLES = 1000
CODE = ("trainer/scaling", "bench/validation/fit_speed.py", "bench/validation/literal_grid.py")


def example() -> Curve:
    """27 evaluations of the paper's ScaleRL."""
    published = CURVES["8b"]
    sigmoid = Sigmoid(R0.value, published.A, published.B, published.C_mid)
    compute = np.arange(1500, 8001, 250.0)
    reward = sigmoid.reward(compute) + np.random.default_rng(0).normal(0, NOISE, len(compute))
    points = (
        EvalPoint(i, float(c), float(r), NOISE) for i, (c, r) in enumerate(zip(compute, reward, strict=True))
    )
    return Curve("ScaleRL", "GPU-hours", tuple(points), R0.value)


def measure(rounds: int, grid: PaperGrid | None = None) -> dict[str, Any]:
    """Milliseconds of each case, and the difference between the literal loop's answer and ours."""
    curve, grid = example(), grid or PaperGrid()
    compute = np.array([p.compute for p in curve.points])
    reward = np.array([p.pass_rate for p in curve.points])

    def fit_and_bootstrap() -> None:
        fit_curve(curve)
        bootstrap(curve, RESAMPLES)

    cases: dict[str, Callable[[], object]] = {
        "fit": lambda: fit_curve(curve),
        f"fit and {RESAMPLES:,} bootstraps": fit_and_bootstrap,
        "profile likelihood": lambda: profile(curve),
        "five families": lambda: compare_families(curve),
        "the paper's grid": lambda: paper_fit(compute, reward, R0.value, grid),
    }
    times = {name: _timed(call, rounds) for name, call in cases.items()}
    literal_fits: list[Sigmoid] = []

    def literal() -> None:
        literal_fits.append(literal_loop(compute, reward, R0.value, grid)[0])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OptimizeWarning)
        times["the paper's grid, literal loop"] = _timed(literal, 1)
    ours = paper_fit(compute, reward, R0.value, grid).sigmoid
    return {
        "cases": times,
        "differs": {k: abs(getattr(ours, k) - getattr(literal_fits[0], k)) for k in ("A", "B", "C_mid")},
        "pairs": len(grid.values()[0]) * len(grid.values()[1]),
        "machine": machine("cpu"),
        "threads": {k: os.environ.get(k) for k in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")},
        "load": os.getloadavg()[0],
        "commit": records.commit(*CODE),
    }


def _timed(call: Callable[[], object], rounds: int) -> dict[str, dict[str, float]]:
    """Median and quartiles in milliseconds, after a first call if there are several rounds."""
    if rounds > 1:
        call()
    cpu, wall = [], []
    for _ in range(rounds):
        begin = time.process_time(), time.perf_counter()
        call()
        cpu.append((time.process_time() - begin[0]) * 1e3)
        wall.append((time.perf_counter() - begin[1]) * 1e3)
    return {"cpu": summary(cpu), "wall": summary(wall)}


def describe(record: dict[str, Any]) -> str:
    """The table."""
    rows = [
        [name, *spread(ms["cpu"], ".0f"), number(ms["wall"]["median"], ".0f")]
        for name, ms in record["cases"].items()
    ]
    grid, loop = (record["cases"][f"the paper's grid{k}"]["cpu"]["median"] for k in ("", ", literal loop"))
    differs = ", ".join(f"{k} {v:.1g}" for k, v in record["differs"].items())
    return (
        f"{table(('', 'ms CPU', 'quartiles', 'ms wall'), rows)}\n"
        f"The grid of {record['pairs']} pairs is {loop / grid:.0f}× as fast as its loop; "
        f"their answers differ by {differs}."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the record where asked."""
    parser = records.parser("validation.fit_speed", __doc__)
    parser.add_argument("--rounds", type=int, default=9, help="timed calls of each case (9)")
    records.add_options(parser, "fit-speed.json")
    args = parser.parse_args(argv)
    record = measure(args.rounds)
    path = records.path_of(args, "fit-speed.json")
    records.write(path, record)
    print(describe(record))
    records.say_written(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
