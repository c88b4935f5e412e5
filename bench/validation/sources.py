"""Are forecasts of other people's runs sharper than "it stays as it is"? [a second a run]

  python -m bench validation.sources FOLDER...              each a source: a folder of CSV files, one a run
  python -m bench validation.sources 'docs/study/curves.csv.gz/*@compute=compute/flops' FOLDER... --record
  python -m bench validation.sources 'docs/study-lr/curves.csv.gz/*@compute=compute/flops' --shipped

The mean of each run's last quarter is forecast from its first 25 and 50 %. What runs in general do is learned
from the other sources alone (curve/average.py: the weight a of a gain, and its error e). For each source the
weight is taken with which its forecasts have the least CRPS, without an error, and then the error, with the
weight that is learned; what is learned is the mean over sources, with none as one of them.
The line `folders` is of all sources that are folders of CSV files: runs of other trainers.
Carried on: the mean of the last 5 evaluations seen, a quarter of them at most. --record writes what is
learned from all sources to trainer/scaling/curve/population.json. validation.literature compares laws.
"""

import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from bench.harness import ROOT, Case, Row, grouped
from bench.table import number, table
from trainer.config import ConfigError
from trainer.scaling.curve.average import DEFAULT, LawDraws, gain_errors, gain_weights, resampled
from trainer.scaling.curve.fit import Fit, fit_curve
from trainer.scaling.curve.points import last_error
from trainer.scaling.curve.sigmoid import DRAWS, Array, Curve, EvalPoint, estimate
from trainer.scaling.forecast import Backtest, backtest
from trainer.scaling.reading.options import ReadOptions
from trainer.scaling.reading.read import read_inputs

OPTIONS = {
    "sources": ((), "folders of CSV files, or other inputs of several runs"),
    "shipped": (False, "forecast them with what is shipped: sources from which nothing was learned"),
}
PARALLEL = True
POPULATION = ROOT / "trainer" / "scaling" / "curve" / "population.json"
SHARES = (0.25, 0.5)  # of the compute, from which runs are forecast
GAINS = np.arange(0, 4.01, 0.25).tolist()  # a of the weights
ERRORS = np.arange(0, 0.81, 0.1).tolist()  # e of the gains, at a pace of 1
MADE_BY = (
    "python -m bench validation.sources tinker-cog countdown-ppo gsm8k-grpo-ablation "
    "'docs/study/curves.csv.gz/*@compute=compute/flops' "
    "'docs/study-smollm2/curves.csv.gz/*@compute=compute/flops' --record"
)
ORIGINS = {  # of the folders, which are not in the repository
    "tinker-cog": "https://github.com/thinking-machines-lab/tinker-cookbook",
    "countdown-ppo": "https://github.com/kanishkg/TinyZero",
    "gsm8k-grpo-ablation": "https://github.com/tonywang1990/gsm8k-grpo",
}
HEAD = (
    "source",
    "forecast from",
    "runs",
    "forecast",
    "weight, error of a gain",
    "error",
    "carried on",
    "error / carried on",
    "90 % holds",
    "CRPS",
)


def cases(options: Namespace) -> Iterator[Case]:
    """Every run of every source, at each share of its compute. ConfigError: nothing would be learned."""
    if options.shipped and options.record:
        raise ConfigError("--shipped learns nothing, so there is nothing to --record; expected one of them")
    for name, folder, run in inputs_of(options.sources):
        for share in SHARES:
            yield (
                f"{name}, {run.name}, {share:.0%}",
                partial(measure, name, folder, run, share, options.shipped),
            )


def inputs_of(
    sources: Sequence[str], ours: str = "@compute=compute/flops"
) -> Iterator[tuple[str, bool, Curve]]:
    """The name of each run's source, whether that is a folder, and the run. ConfigError: there is none.

    A folder may hold finished runs of ours, which are read as `ours` says.
    """
    for source in sources:
        path = Path(source)
        folder, name = path.is_dir(), Path(source.partition("/curves.csv.gz")[0]).name
        runs = [str(file) for file in sorted(path.glob("*.csv"))]
        runs += [f"{file.parent}{ours}" for file in sorted(path.glob("*/ended.json"))]
        for reading in read_inputs(runs if folder else [source], ReadOptions()):
            yield name, folder, reading.curve
    if not sources:
        raise ConfigError("there is no source; expected folders of CSV files, one a run")


def held_out(curve: Curve, share: float) -> tuple[Curve, list[EvalPoint], Backtest | None]:
    """The run up to a share of its compute, its last quarter as noisy as evaluations are, its backtest."""
    last = curve.points[-1].compute
    seen = replace(curve, points=tuple(p for p in curve.points if p.compute <= share * last))
    later = [p for p in curve.points[len(seen.points) :] if p.compute >= 0.75 * last]
    noisy = [replace(p, pass_rate_se=last_error([*curve.points, p])) for p in later]
    return seen, noisy, backtest(curve, share * last)


def measure(source: str, folder: bool, curve: Curve, share: float, shipped: bool = False) -> Row:
    """A run's forecasts by each weight and error, or as shipped, beside its end; none if it is too short."""
    seen, later, test = held_out(curve, share)
    row: Row = {"source": source, "folder": folder, "run": curve.name, "share": share, "forecast": False}
    if test is None:
        return row
    truth = test.level.measured
    row |= {"forecast": test.predictable, "truth": truth, "carried": test.carried}
    if shipped:
        return row | {"by_gain": [[scored(fit_curve(seen), later, truth)]]}
    fit = fit_curve(seen, prior=replace(DEFAULT, gain=0.0, gain_error=0.0))
    by_gain = [[scored(weighted(fit, a, e), later, truth) for e in ERRORS] for a in GAINS]
    return row | {"by_gain": by_gain}


def weighted(fit: Fit, a: float, e: float) -> Fit:
    """The fit whose draws are weighted by their gain, which is off by so much."""
    ahead = fit.forecast
    of_laws = [part for part in ahead.parts if isinstance(part, LawDraws)]
    parts = resampled(of_laws, gain_weights(of_laws, ahead.last, a))
    p = sum(len(part.A) for part in parts if part.family.law == 0) / DRAWS
    return replace(fit, averaged_draws=replace(ahead, parts=tuple(parts), gain_error=gain_errors(e, p)))


def scored(fit: Fit, points: Sequence[EvalPoint], truth: float) -> list[float]:
    """Value, ends and CRPS of a forecast of the points' mean."""
    rewards, draws = fit.level_draws(points)
    e = estimate(float(np.median(rewards)), draws, fit.confidence)
    return [e.value, e.low, e.high, crps(draws, np.ones(len(draws)), truth)]


def crps(draws: Array, weight: Array, truth: float) -> float:
    """Continuous ranked probability score of draws with weights, (n,) each: E|x − truth| − E|x − x'| / 2."""
    order = np.argsort(draws)
    x, w = draws[order], weight[order] / weight.sum()
    below = w.cumsum() - w / 2
    return float(w @ np.abs(x - truth) - w @ (x * (2 * below - 1)))


def learned(rows: Sequence[Row], a: float | None = None) -> float:
    """a, from the forecasts of several sources; with an a, e."""
    return float(np.mean([0.0, *best(rows, a).values()]))


def best(rows: Sequence[Row], a: float | None = None) -> dict[str, float]:
    """The a of each source with which its forecasts have the least CRPS, each share alike; with an a, e."""
    sources = grouped([row for row in rows if "by_gain" in row], "source")
    tried, chosen = (GAINS, np.s_[:, 0, 3]) if a is None else (ERRORS, np.s_[nearest(a), :, 3])
    scores = {name: np.zeros(len(tried)) for name in sources}
    for name, its in sources.items():
        for share in SHARES:
            runs = [row for row in its if row["share"] == share]
            if runs:
                naive = np.mean([abs(row["truth"] - row["carried"]) for row in runs])
                scores[name] += np.mean([np.array(row["by_gain"])[chosen] for row in runs], axis=0) / naive
    return {name: tried[int(x.argmin())] for name, x in scores.items()}


def describe(head: Row, runs: Sequence[Row]) -> str:
    """A row for each source and share, and for all of them."""
    sources = list(dict.fromkeys(row["source"] for row in runs))
    shipped = head.get("options", {}).get("shipped")
    gains = {name: both([row for row in runs if row["source"] != name]) for name in sources if not shipped}
    lines = []
    for name in [*sources, "all", "folders"]:
        for share in SHARES:
            its = [row for row in runs if row["share"] == share and name in _names(row)]
            lines.append(_line(name, share, its, gains))
    if shipped:
        return table(HEAD, lines)
    a, e = both(runs)
    what = f"Weight of a gain, by what is best for each source: {best(runs)}; of all: {a:.2f}."
    return f"{table(HEAD, lines)}\n\n{what} Its error: {best(runs, a)}; of all: {e:.2f}."


def both(rows: Sequence[Row]) -> tuple[float, float]:
    """a and e, from the forecasts of several sources."""
    a = learned(rows)
    return a, learned(rows, a)


def _names(row: Row) -> set[str]:
    """The lines that a run is part of."""
    return {row["source"], "all", *(["folders"] if row["folder"] else [])}


def _line(name: str, share: float, rows: Sequence[Row], gains: dict[str, tuple[float, float]]) -> list[str]:
    shown = [row for row in rows if row["forecast"]]
    at = {source: (nearest(a), nearest(e, ERRORS)) for source, (a, e) in gains.items()}
    weight = f"{GAINS[at[name][0]]:.2f}, {ERRORS[at[name][1]]:.1f}" if name in gains else ""
    counts = [name, f"{share:.0%}", str(len(rows)), str(len(shown)), weight]
    if not shown:
        return [*counts, *"–––––"]
    forecasts = [np.array(row["by_gain"])[at.get(row["source"], (0, 0))] for row in shown]
    value, low, high, score = np.array(forecasts).T
    truth, last = np.array([[row["truth"], row["carried"]] for row in shown]).T
    error, carried = np.median(np.abs(truth - value)), np.median(np.abs(truth - last))
    holds = np.mean((low <= truth) & (truth <= high))
    ratio = number(float(error / carried), ".2f")
    return [*counts, f"{error:.3f}", f"{carried:.3f}", ratio, f"{holds:.2f}", f"{score.mean():.4f}"]


def nearest(x: float, tried: Sequence[float] = GAINS) -> int:
    """The index of the value that is used for one that is learned."""
    return int(np.abs(np.array(tried) - x).argmin())


def publish(head: Row, runs: Sequence[Row]) -> None:
    """Write the weight and the error learned from all sources, as they are shipped."""
    (gain, error), errors = both(runs), best(runs, learned(runs))
    counts = {name: len({row["run"] for row in runs if row["source"] == name}) for name in best(runs)}
    sources = {
        name: {"runs": counts[name], "gain": a, "gain_error": round(errors[name], 1)}
        | ({"from": ORIGINS[name]} if name in ORIGINS else {})
        for name, a in best(runs).items()
    }
    population = {"gain": round(gain, 2), "gain_error": round(error, 2)}
    content = {"made by": MADE_BY, "sources": sources} | population
    POPULATION.write_text(json.dumps(content, indent=1) + "\n")
