"""Are forecasts of other people's runs sharper than "it stays as it is"? [a second a run]

  python -m bench validation.sources FOLDER...              each a source: a folder of CSV files, one a run
  python -m bench validation.sources 'docs/study/curves.csv.gz/*@compute=compute/flops' FOLDER... --record

The mean of each run's last quarter is forecast from its first 25 and 50 %. What runs in general do is learned
from the other sources alone (curve/average.py: the weight of a gain). For each source the weight is taken
with which its forecasts have the least CRPS; the mean over sources is learned, with none as one of them.
The line `folders` is of all sources that are folders of CSV files: runs of other trainers.
Carried on: the mean of the last 5 evaluations seen, a quarter of them at most. --record writes what is
learned from all sources to trainer/scaling/curve/population.json.

The second table compares laws on the same runs: each law of the average alone, and least squares.
"""

import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from bench.harness import ROOT, Case, Row
from bench.table import number, table
from trainer.config import ConfigError
from trainer.scaling.curve.average import DEFAULT, LAWS, LawDraws, gain_weights, resampled
from trainer.scaling.curve.fit import Fit, fit_curve
from trainer.scaling.curve.paper import NAMES, fit_family
from trainer.scaling.curve.points import MIN_POINTS, averaged, checked, last_error
from trainer.scaling.curve.sigmoid import Array, Curve, EvalPoint
from trainer.scaling.forecast import backtest
from trainer.scaling.reading.options import ReadOptions
from trainer.scaling.reading.read import read_inputs

OPTIONS = {"sources": ((), "folders of CSV files, or other inputs of several runs")}
PARALLEL = True
POPULATION = ROOT / "trainer" / "scaling" / "curve" / "population.json"
SHARES = (0.25, 0.5)  # of the compute, from which runs are forecast
GAINS = np.arange(0, 4.01, 0.25).tolist()  # a of the weights
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
    "weight",
    "error",
    "carried on",
    "error / carried on",
    "90 % holds",
)


def cases(options: Namespace) -> Iterator[Case]:
    """Every run of every source, at each share of its compute."""
    for source in options.sources:
        path = Path(source)
        inputs = sorted(map(str, path.glob("*.csv"))) if path.is_dir() else [source]
        name = path.name if path.is_dir() else Path(source.partition("/curves.csv.gz")[0]).name
        for reading in read_inputs(inputs, ReadOptions()):
            for share in SHARES:
                run = reading.curve
                yield f"{name}, {run.name}, {share:.0%}", partial(measure, name, path.is_dir(), run, share)
    if not options.sources:
        raise ConfigError("validation.sources: there is no source; expected folders of CSV files, one a run")


def measure(source: str, folder: bool, curve: Curve, share: float) -> Row:
    """A run's forecasts by each weight and each law, beside its end; without them if it is too short."""
    last = curve.points[-1].compute
    test = backtest(curve, share * last)
    row: Row = {"source": source, "folder": folder, "run": curve.name, "share": share, "forecast": False}
    if test is None:
        return row
    seen = replace(curve, points=tuple(p for p in curve.points if p.compute <= share * last))
    noisy = [
        replace(p, pass_rate_se=last_error([*curve.points, p]))
        for p in curve.points[len(seen.points) :]
        if p.compute >= 0.75 * last
    ]
    fit, truth = fit_curve(seen, prior=replace(DEFAULT, gain=0.0)), test.level.measured
    row |= {"forecast": test.predictable, "truth": truth, "carried": test.carried}
    row["by_gain"] = [scored(weighted(fit, a), noisy, truth) for a in GAINS]
    return row | {"laws": laws(fit, seen, noisy)}


def weighted(fit: Fit, a: float) -> Fit:
    """The fit whose draws are weighted by their gain."""
    ahead = fit.forecast
    of_laws = [part for part in ahead.parts if isinstance(part, LawDraws)]
    parts = resampled(of_laws, gain_weights(of_laws, ahead.last, a))
    return replace(fit, averaged_draws=replace(ahead, parts=tuple(parts)))


def scored(fit: Fit, points: Sequence[EvalPoint], truth: float) -> list[float]:
    """Value, ends and CRPS of a forecast of the points' mean."""
    e, x = fit.level(points), np.sort(fit.level_draws(points))
    spread = float(x @ (2 * np.arange(len(x)) - len(x) + 1)) / len(x) ** 2  # half the mean distance of two
    return [e.value, e.low, e.high, float(np.abs(x - truth).mean()) - spread]


def laws(fit: Fit, seen: Curve, points: Sequence[EvalPoint]) -> dict[str, float]:
    """The points' mean by each law alone: the median of its draws, and least squares."""
    compute = [p.compute for p in points]
    by_law: dict[str, list[Array]] = {}
    for part in fit.forecast.parts:
        if isinstance(part, LawDraws):
            rewards = np.clip(part.reward(compute), 0, 1).mean(1)
            by_law.setdefault(LAWS[part.family.law], []).append(rewards)
    values = {name: float(np.median(np.concatenate(x))) for name, x in by_law.items()}
    data = averaged(checked(seen))
    if len(data.compute) >= MIN_POINTS:
        for name in NAMES:
            rewards = fit_family(name, data, np.array(compute))[1]
            values[f"{name}, least squares"] = float(np.clip(rewards, 0, 1).mean())
    return values


def learned(rows: Sequence[Row]) -> float:
    """a, from the forecasts of several sources."""
    return float(np.mean([0.0, *best(rows).values()]))


def best(rows: Sequence[Row]) -> dict[str, float]:
    """The a of each source with which its forecasts have the least CRPS, each share alike."""
    sources: dict[str, list[Row]] = {}
    for row in rows:
        if "by_gain" in row:
            sources.setdefault(row["source"], []).append(row)
    scores = {name: np.zeros(len(GAINS)) for name in sources}
    for name, its in sources.items():
        for share in SHARES:
            runs = [row for row in its if row["share"] == share]
            if runs:
                naive = np.mean([abs(row["truth"] - row["carried"]) for row in runs])
                scores[name] += np.mean([[x[3] for x in row["by_gain"]] for row in runs], axis=0) / naive
    return {name: GAINS[int(x.argmin())] for name, x in scores.items()}


def describe(head: Row, runs: Sequence[Row]) -> str:
    """A row for each source and share, all of them, and the laws."""
    sources = list(dict.fromkeys(row["source"] for row in runs))
    gains = {name: learned([row for row in runs if row["source"] != name]) for name in sources}
    lines = []
    for name in [*sources, "all", "folders"]:
        for share in SHARES:
            its = [row for row in runs if row["share"] == share and name in _names(row)]
            lines.append(_line(name, share, its, gains))
    return "\n\n".join(
        [
            table(HEAD, lines),
            f"Weight of a gain, by what is best for each source: {best(runs)}; of all: {learned(runs):.2f}.",
            _laws(runs, gains),
        ]
    )


def _names(row: Row) -> set[str]:
    """The lines that a run is part of."""
    return {row["source"], "all", *(["folders"] if row["folder"] else [])}


def _line(name: str, share: float, rows: Sequence[Row], gains: dict[str, float]) -> list[str]:
    shown = [row for row in rows if row["forecast"]]
    counts = [
        name,
        f"{share:.0%}",
        str(len(rows)),
        str(len(shown)),
        f"{GAINS[_nearest(gains[name])]:.2f}" if name in gains else "",
    ]
    if not shown:
        return [*counts, *"––––"]
    cells = [_forecast(row, gains) for row in shown]
    error = np.median([abs(row["truth"] - x[0]) for row, x in zip(shown, cells, strict=True)])
    carried = np.median([abs(row["truth"] - row["carried"]) for row in shown])
    holds = np.mean([x[1] <= row["truth"] <= x[2] for row, x in zip(shown, cells, strict=True)])
    ratio = number(float(error / carried), ".2f")
    return [*counts, f"{error:.3f}", f"{carried:.3f}", ratio, f"{holds:.2f}"]


def _forecast(row: Row, gains: dict[str, float]) -> list[float]:
    """The run's forecast by what the other sources say."""
    return list(row["by_gain"][_nearest(gains[row["source"]])])


def _nearest(a: float) -> int:
    """The index in GAINS of the weight that is used for a."""
    return int(np.abs(np.array(GAINS) - a).argmin())


def _laws(runs: Sequence[Row], gains: dict[str, float]) -> str:
    """Median and mean |error| of each law, over the runs for which all of them have a forecast."""
    full = max((len(row["laws"]) for row in runs if "laws" in row), default=0)
    lines = []
    for share in SHARES:
        its = [row for row in runs if row["share"] == share and len(row.get("laws", ())) == full]
        if not its:
            continue
        values = {name: [row["laws"][name] for row in its] for name in its[0]["laws"]}
        values["all laws, averaged"] = [row["by_gain"][0][0] for row in its]
        values["the same, weighted by other sources"] = [_forecast(row, gains)[0] for row in its]
        values["carried on"] = [row["carried"] for row in its]
        truth = np.array([row["truth"] for row in its])
        for name, x in values.items():
            e = np.abs(np.array(x) - truth)
            lines.append([name, f"{share:.0%}", str(len(its)), f"{np.median(e):.3f}", f"{e.mean():.3f}"])
    return table(("law", "forecast from", "runs", "median error", "mean error"), lines)


def publish(head: Row, runs: Sequence[Row]) -> None:
    """Write the weight learned from all sources, as it is shipped."""
    counts = {name: len({row["run"] for row in runs if row["source"] == name}) for name in best(runs)}
    sources = {
        name: {"runs": counts[name], "gain": a} | ({"from": ORIGINS[name]} if name in ORIGINS else {})
        for name, a in best(runs).items()
    }
    content = {"made by": MADE_BY, "sources": sources}
    POPULATION.write_text(json.dumps(content | {"gain": round(learned(runs), 2)}, indent=1) + "\n")
