"""Is what the benchmarks of the loss predict true of runs? Ours beside the textbook's loss, seed by seed.

  NAIVE=bench/validation/recipes/scalerl-naive.yaml
  python -m trainer.sweep scalerl $NAIVE --task arithmetic --seeds 3 --out FOLDER
  python -m bench kernels.compare --only "ours (cpu),naive FP32" --rows 420 --threads 2 --out rates.json
  python -m bench validation.chain FOLDER --kernel-rates rates.json

Predicted: from a run of ours alone, its ledger and the benchmark, the compute that it would have taken with
the naive loss, and with it the curve, R(C / factor). Measured: the run that had the naive loss. Curves are
compared at budgets over the second half, each the mean over seeds; the seed margin is by how much two such
means of one recipe differ, 90 %, from these same curves. All commands on the same machine, and the benchmark
as the learner runs: as many rows and threads, and the environment of the launcher (docs/gpu-hours.md).
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from bench.harness import Case, Row
from bench.table import table
from trainer.accounting.kernel_rates import measured_heads, read_rates
from trainer.accounting.run_account import ledger_of, run_times
from trainer.config import ConfigError
from trainer.scaling.reading.tables import read_tables
from trainer.sweep.curves import CURVES

OPTIONS: dict[str, Any] = {
    "folder": ((), "folder of the sweep, or of its kept curves"),
    "kernel_rates": (None, "record of kernels.compare"),
}
OURS, NAIVE = "scalerl", "scalerl-naive"
BUDGETS = 9  # at which the curves are compared, over the second half of what all runs have
Curve = NDArray[np.float64]  # (2, evaluations): compute and reward


def read_pairs(folder: Path, ratio: float) -> list[Row]:
    """Every seed that both losses have. `ratio`: time of the naive loss over ours, as benchmarked.

    Hours are device-hours, seconds those of the learner in the loss; factors are on the compute.
    """
    curves, pairs = folder / CURVES, []
    names = read_tables(curves)[1] if curves.is_file() else [path.name for path in folder.glob("*")]
    for seed in sorted(int(x[1]) for name in names if (x := re.fullmatch(f"{OURS}-([0-9]+)", name))):
        ours, naive = _run(folder, OURS, seed), _run(folder, NAIVE, seed)
        a, b = run_times(ours), run_times(naive)
        if a is None or b is None:
            continue
        hours, naive_hours = _hours(ours), _hours(naive)
        pairs.append({
            "seed": seed, "loss_seconds": a.loss_head, "naive_loss_seconds": b.loss_head, "hours": hours,
            "naive_hours": naive_hours, "predicted": a.factor(ratio), "measured": naive_hours / hours,
        })  # fmt: skip
    if not pairs:
        raise ConfigError(f"{folder}: expected runs {OURS}-N and {NAIVE}-N of the same seeds, with ledgers")
    return pairs


def shift(folder: Path, pairs: Sequence[Row]) -> Row:
    """The curves of these pairs: ours, ours shifted by the predicted factor, and what came."""
    ours = [_curve(_run(folder, OURS, pair["seed"])) for pair in pairs]
    naive = [_curve(_run(folder, NAIVE, pair["seed"])) for pair in pairs]
    end = min(curve[0, -1] for curve in (*ours, *naive))
    budgets = np.linspace(end / 2, end, BUDGETS)
    factors = [pair["predicted"] for pair in pairs]
    plain = np.array([np.interp(budgets, *curve) for curve in ours])
    shifted = [np.interp(budgets / f, *curve) for f, curve in zip(factors, ours, strict=True)]
    came = np.array([np.interp(budgets, *curve) for curve in naive])
    n, margin = len(pairs), np.nan
    if n > 1:
        variance = sum(x.mean(1).var(ddof=1) for x in (plain, came)) / 2
        margin = float(stats.t.ppf(0.95, 2 * (n - 1)) * np.sqrt(2 * variance / n))
    return {
        "budgets": budgets, "ours": plain.mean(0), "predicted": np.mean(shifted, 0),
        "measured": came.mean(0), "seed_margin": margin,  # NaN with one seed
    }  # fmt: skip


def _run(folder: Path, recipe: str, seed: int) -> Path:
    """A run folder, or its name in the table of a sweep's kept curves."""
    curves = folder / CURVES
    return (curves if curves.is_file() else folder) / f"{recipe}-{seed}"


def _curve(run: Path) -> Curve:
    (rows,) = read_tables(run)[1].values()
    rows = [row for row in rows if "eval/pass_rate" in row]
    return np.array([[row["compute/total"], row["eval/pass_rate"]] for row in rows], np.float64).T


def _hours(run: Path) -> float:
    return float((ledger_of(run) or {})["compute"]["total"])


def measure(folder: Path, rates: Path) -> Row:
    """The pairs, and their curves."""
    tflops = {head.name: head.tflops for head in measured_heads(read_rates(rates), dtype="float32")}
    pairs = read_pairs(folder, tflops["ours"] / tflops["naive FP32"])
    return {"pairs": pairs, "shift": shift(folder, pairs)}


def cases(options: Namespace) -> Iterator[Case]:
    """The folder is one case."""
    if len(options.folder) != 1 or not options.kernel_rates:
        raise ConfigError("expected one FOLDER, and --kernel-rates FILE")
    yield "chain", partial(measure, Path(options.folder[0]), Path(options.kernel_rates))


def describe(head: Row, rows: Sequence[Row]) -> str:
    """Both tables, and the verdict."""
    pairs, rewards = rows[0]["pairs"], rows[0]["shift"]
    columns = ("seed", "loss, s", "naive loss, s", "ratio", "hours", "naive: hours", "factor", "predicted")
    cells = []
    for p in pairs:
        a, b = p["loss_seconds"], p["naive_loss_seconds"]
        hours = [f"{p['hours']:.4f}", f"{p['naive_hours']:.4f}"]
        losses = [f"{a:.1f}", f"{b:.1f}", f"{b / a:.2f}"]
        cells.append([str(p["seed"]), *losses, *hours, f"{p['measured']:.3f}", f"{p['predicted']:.3f}"])
    lines = zip(*(rewards[key] for key in ("budgets", "ours", "predicted", "measured")), strict=True)
    curves = [[f"{c:.4f}", *(f"{r:.3f}" for r in line)] for c, *line in lines]
    error = float(np.mean(np.subtract(rewards["measured"], rewards["predicted"])))
    margin = "of one seed alone"
    if len(pairs) > 1:
        within = "within" if abs(error) <= rewards["seed_margin"] else "beyond"
        margin = f"{within} the seed margin of {rewards['seed_margin']:.4f}"
    measured, predicted = (np.mean([p[name] for p in pairs]) for name in ("measured", "predicted"))
    return "\n\n".join([
        table(columns, cells),
        table(("hours", "ours", "naive, predicted", "naive, measured"), curves),
        f"Factor on the compute: {predicted:.3f} predicted, {measured:.3f} measured. "
        f"Reward at equal budgets: measured − predicted {error:+.4f}, {margin}.",
    ])  # fmt: skip
