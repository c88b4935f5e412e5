"""Forecasts in device-hours where a device-hour is not always the same work. [2 s a run]

  python -m bench validation.axis              runs of docs/study*, some of which ran beside other work
  python -m bench validation.axis --loads 2    runs of docs/study on a simulated machine, each twice
  python -m bench validation.axis FOLDER...    folders of finished runs, or other inputs of several

The last evaluation is forecast from 25 and 50 % of the device-hours: fitted to these, or to the FLOPs that
the ledger has beside them. A fit takes the FLOPs where the rates' spread is above DRIFT (curve/axis.py).
In FLOPs: forecast from 25 and 50 % of the FLOPs, at the FLOPs of the end.
With --loads the rewards over FLOPs are those that were measured, and other work begins and ends at random: it
slows the run down to a share from .3 to 1, for stretches that are exponential with a mean of 15 % of the run.
--rates prints which spread of the rate ahead is the likeliest.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, product

import numpy as np
from scipy.stats import t

from bench.harness import ROOT, Case, Row
from bench.table import table
from bench.validation.sources import inputs_of
from trainer.scaling.curve.axis import DRIFT, axis_of
from trainer.scaling.curve.fit import fit_curve
from trainer.scaling.curve.points import checked, last_error
from trainer.scaling.curve.sigmoid import Curve, Estimate

OPTIONS = {
    "sources": ((), "folders of finished runs; without them those of docs/study*"),
    "loads": (0, "random loads of a simulated machine for each run of docs/study; 0: the recorded runs"),
    "rates": (False, "print the likelihood of spreads of the rate ahead"),
}
PARALLEL = True
SHARES = (0.25, 0.5)
SLOWEST, STRETCH = 0.3, 0.15  # speed beside other work; mean length of a stretch, in runs without any
SPREADS = ((0.05, 0.08, 0.12, 0.15, 0.2), (0.0, 0.3, 0.5, 0.7, 1.0), (3, 4, 6))  # a, b, degrees of freedom
BINS = (0.0, 0.05, 0.1, DRIFT, 0.2, 0.3, 9.0)  # of the spread of a run's rates


def cases(options: Namespace) -> Iterator[Case]:
    """Every run at both shares; of a simulated machine, every load of every run."""
    studies = sorted(ROOT.glob(f"docs/study{'' if options.loads else '*'}/curves.csv.gz"))
    for i, (source, _, recorded) in enumerate(inputs_of(options.sources or list(map(str, studies)), "")):
        for seed, share in product(range(options.loads or 1), SHARES):
            run = loaded(recorded, [i, seed]) if options.loads else recorded
            yield f"{source}, {run.name}, {seed}, {share:.0%}", partial(measure, source, run, share)


def loaded(curve: Curve, seed: Sequence[int]) -> Curve:
    """The run on a machine where other work begins and ends at random; compute 1 is the run without it."""
    rng, points = np.random.default_rng(seed), curve.points
    busy, slow = rng.random() < 0.5, rng.uniform(SLOWEST, 1)
    hours, work = [0.0], [0.0]
    while work[-1] < 1:
        hours.append(hours[-1] + rng.exponential(STRETCH))
        work.append(work[-1] + (hours[-1] - hours[-2]) * (slow if busy else 1))
        busy = not busy
    spent = np.interp([p.flops / points[-1].flops for p in points], work, hours).tolist()
    return replace(curve, points=tuple(replace(p, compute=c) for p, c in zip(points, spent, strict=True)))


def measure(source: str, run: Curve, share: float) -> Row | None:
    """The forecasts of the last evaluation on device-hours and on FLOPs; None: there are none."""
    end = run.points[-1]
    points = tuple(p for p in run.points if p.compute <= share * end.compute)
    if not points or (axis := axis_of(checked(replace(run, points=points)))) is None:
        return None
    at_work = zip(points, axis.work[1:].tolist(), strict=True)
    seen = [
        tuple(replace(p, flops=0.0) for p in points),
        tuple(replace(p, compute=c, flops=0.0) for p, c in at_work),
    ]
    fits = [fit_curve(replace(run, points=part)) for part in seen]
    if not all(fit.has_forecast for fit in fits):
        return None
    fits[1] = replace(fits[1], averaged_draws=replace(fits[1].forecast, axis=axis))
    noisy = replace(end, pass_rate_se=last_error(run.points))
    hours, flops = (numbers(fit.level([noisy]), end.pass_rate) for fit in fits)
    ahead = (end.flops / points[-1].flops - 1) / (end.compute / points[-1].compute - 1)
    error = float(np.log(ahead / np.median(axis.ahead)))
    return {
        "source": source, "share": share, "hours": hours, "FLOPs": flops, "in FLOPs": in_flops(run, share),
        "spread": axis.spread, "error of rate": error,
    }  # fmt: skip


def in_flops(run: Curve, share: float) -> list[float]:
    """The numbers of the last evaluation's forecast from a share of the FLOPs, at its FLOPs."""
    points = tuple(replace(p, compute=p.flops, flops=0.0) for p in run.points)
    end = replace(points[-1], pass_rate_se=last_error(run.points))
    seen = tuple(p for p in points if p.compute <= share * end.compute)
    return numbers(fit_curve(replace(run, points=seen)).level([end]), end.pass_rate)


def numbers(predicted: Estimate, measured: float) -> list[float]:
    """|error|, 1 if the interval holds it, and its width."""
    inside = predicted.low <= measured <= predicted.high
    return [abs(predicted.value - measured), float(inside), predicted.high - predicted.low]


def describe(head: Row, rows: Sequence[Row]) -> str:
    """A line for each source and share, then for each range of the spread of rates."""
    if head["options"]["rates"]:
        return _spreads(rows)
    lines = []
    for source, share in product([*dict.fromkeys(row["source"] for row in rows), "all"], SHARES):
        shown = [row for row in rows if row["share"] == share and source in (row["source"], "all")]
        if shown:
            fitted = [row["FLOPs" if row["spread"] > DRIFT else "hours"] for row in shown]
            drifted = str(sum(row["spread"] > DRIFT for row in shown))
            hours = [row["hours"] for row in shown]
            counts = [source, f"{share:.0%}", str(len(shown)), drifted]
            error, holds, _ = np.array([row["in FLOPs"] for row in shown]).T
            last = f"{np.median(error):.3f}, {holds.mean():.2f}"
            lines.append([*counts, *_cells(hours, fitted), last])
    names = ("error", "error, mean", "90 % holds", "width")
    first = ("source", "forecast from", "runs", "of these on FLOPs")
    parts = [table([*first, *names, "in FLOPs: error, holds"], lines)]
    lines = []
    for low, high in pairwise(BINS):
        if shown := [row for row in rows if low < row["spread"] <= high]:
            both = ([row[axis] for row in shown] for axis in ("hours", "FLOPs"))
            lines.append([f"{low:g} to {high:g}", str(len(shown)), *_cells(*both)])
    return "\n\n".join([*parts, table(["spread of rates", "forecasts", *names], lines)])


def _cells(hours: Sequence[Sequence[float]], flops: Sequence[Sequence[float]]) -> list[str]:
    """Each measure on device-hours → the other."""
    a, b = np.array(hours), np.array(flops)
    ways = ((0, np.median, ".3f"), (0, np.mean, ".3f"), (1, np.mean, ".2f"), (2, np.median, ".3f"))
    return [f"{how(a[:, i]):{form}} → {how(b[:, i]):{form}}" for i, how, form in ways]


def _spreads(rows: Sequence[Row]) -> str:
    """The likeliest spreads of the rate ahead, of those tried, and those without a run's own."""
    error, spread = (np.array([row[key] for row in rows]) for key in ("error of rate", "spread"))
    tried = []
    for a, b, dof in product(*SPREADS):
        scale = np.sqrt(a**2 + b * spread**2)
        tried.append((float((t.logpdf(error / scale, dof) - np.log(scale)).mean()), a, b, dof))
    tried.sort(reverse=True)
    shown = [*tried[:5], next(row for row in tried if row[2] == 0)]
    lines = [[f"{a:g}", f"{b:g}", str(dof), f"{nats:.3f}"] for nats, a, b, dof in shown]
    return table(["a", "b", "degrees of freedom", "log likelihood a forecast"], lines)
