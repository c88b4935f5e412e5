"""Laws of the literature beside those of the average, by the error of their forecasts. [4 s a run]

  python -m bench validation.literature FOLDER...           each a source, as validation.sources takes them

    damped oscillator   m R'' + c R' + k (R − A) = 0, at rest at R0    arXiv 2606.30789
    two sigmoids        easy and hard prompts, w and 1 − w of the gain: a gap in difficulty   2602.14872
    decline             a rise (1 − e^−C/τ) e^−C/T that is lost again

The mean of each run's last quarter is forecast from its first 25 and 50 %. Alone: the median of a law's
draws, or least squares. Averages: over laws, to which one of the literature is added with the probability
ADDED, or from which one is taken. Their draws are weighted by what is learned from the other sources (by the
shipped weight, if there is one source only). A difference is one of mean |errors|, each source alike, and its
90 % interval is a bootstrap's: sources are drawn, then runs of these.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from scipy.special import softmax

from bench.harness import Case, Row
from bench.table import number, table
from bench.validation.sources import GAINS, SHARES, crps, held_out, inputs_of, learned, nearest
from trainer.scaling.curve.average import DEFAULT, LAWS, draw, gain_weights, mixture
from trainer.scaling.curve.families import Axis, Family, exponential, integrate, least_squares_curve, reach
from trainer.scaling.curve.fit import fit_curve
from trainer.scaling.curve.marginal import Data
from trainer.scaling.curve.paper import NAMES, fit_family
from trainer.scaling.curve.points import MIN_POINTS, averaged, checked
from trainer.scaling.curve.sigmoid import Array, Curve, EvalPoint, fraction_gained

OPTIONS = {"sources": ((), "folders of CSV files or of run folders, or other inputs of several runs")}
PARALLEL = True
Number = Array | float
POOL = 1500  # draws of each family
ADDED = 0.15  # probability of a law that is added to the average
BOOTSTRAPS = 4000
AVERAGE, CARRIED = "the average as it is", "carried on"


def oscillator(c: Number, zeta: Number, tau: Number) -> Array:
    """s of a damped oscillator that is released at rest; above a damping ratio ζ of 1 it does not swing."""
    z, u = np.asarray(zeta, np.complex128), np.asarray(c, np.float64) / tau
    root = np.sqrt(z**2 - 1 + 1e-9)
    slow, fast = z - root, z + root
    return np.asarray(1 - ((fast * np.exp(-slow * u) - slow * np.exp(-fast * u)) / (2 * root)).real)


def two_sigmoids(c: Number, B: Number, C_mid: Number, apart: Number, easy: Number) -> Array:
    """s of two sigmoids whose midpoints are a factor apart; the first has the share `easy` of the gain."""
    return easy * fraction_gained(c, B, C_mid) + (1 - easy) * fraction_gained(c, B, C_mid * apart)


def decline(c: Number, tau: Number, T: Number) -> Array:
    """s of a rise that is lost again."""
    return exponential(c, tau) * np.exp(-np.asarray(c, np.float64) / T)


def literature(data: Data) -> tuple[Family, ...]:
    """The laws of others, in the place of those of the average that come after LAWS."""
    last = float(data.compute[-1])
    tau = Axis(*reach(data), 21)
    gap = (Axis(0.6, 8.0, 7), Axis(*reach(data), 15), Axis(2.0, 100.0, 5), Axis(0.15, 0.85, 4, log=False))
    families = (
        Family("damped oscillator", oscillator, (Axis(0.2, 5.0, 11), tau)),
        Family("two sigmoids", two_sigmoids, gap),
        Family("decline", decline, (tau, Axis(0.5 * last, 30 * last, 11)), has_end=False),
    )
    return tuple(replace(family, law=len(LAWS) + i) for i, family in enumerate(families))


HEAD = (
    "forecast from", "runs", "median error", "mean, sources alike", "less that of the average", "90 % holds",
)  # fmt: skip
NEW = ("damped oscillator", "two sigmoids", "decline")


def cases(options: Namespace) -> Iterator[Case]:
    """Every run of every source, at each share of its compute."""
    for name, _, run in inputs_of(options.sources):
        for share in SHARES:
            yield f"{name}, {run.name}, {share:.0%}", partial(measure, name, run, share)


def measure(source: str, curve: Curve, share: float) -> Row:
    """A run's forecasts by each law and each average, beside its end; without them if it is too short."""
    row: Row = {"source": source, "run": curve.name, "share": share}
    seen, later, test = held_out(curve, share)
    data = averaged(checked(seen))
    if test is None or not test.predictable or len(data.compute) < MIN_POINTS:
        return row
    values, compute = {CARRIED: test.carried}, np.array([p.compute for p in later])
    for name in NAMES:
        values[f"{name}, least squares"] = _mean(fit_family(name, data, compute)[1])
    for family in literature(data):
        curve_of_law = least_squares_curve(replace(data, R0_se=0.0), family, np.diag(1 / data.sd))
        values[f"{family.name}, least squares"] = _mean(family.reward(compute, *curve_of_law))
    averages = by_average(seen, later, test.level.measured)
    values |= {name: scores[0][0] for name, scores in averages.items() if name in (*LAWS, *NEW)}
    return row | {"truth": test.level.measured, "values": values, "averages": averages}


def _mean(rewards: Array) -> float:
    return float(np.clip(rewards, 0, 1).mean())


def by_average(seen: Curve, later: Sequence[EvalPoint], truth: float) -> dict[str, list[list[float]]]:
    """Value, ends and CRPS of the forecast by each average and each law alone, for each weight of a gain."""
    fit, data = fit_curve(seen, prior=replace(DEFAULT, gain=0.0, gain_error=0.0)), averaged(checked(seen))
    mixed, rng = mixture(data), np.random.default_rng(0)
    laws = [*mixed.components, *(integrate(mixed.data, mixed.noises, x) for x in literature(data))]
    parts = [draw(mixed, law, POOL, rng) for law in laws]
    pool = replace(fit, averaged_draws=replace(fit.forecast, parts=tuple(parts), drift=np.zeros(1)))
    law_of = np.array([law.family.law for law in laws])
    evidence = np.array([law.log_evidence + np.log(law.family.probability) for law in laws])
    mean = np.clip(pool.forecast.reward([p.compute for p in later]), 0, 1).mean(1)
    draws, gains = pool.level_draws(later)[1], [gain_weights(parts, pool.forecast.last, a) for a in GAINS]
    known = len(LAWS)
    averages = {AVERAGE: law_of < known}
    averages |= {
        f"without {law}" if i < known else f"with {law}": (law_of < known) != (law_of == i)
        for i, law in enumerate((*LAWS, *NEW))
    }
    averages |= {law: law_of == i for i, law in enumerate((*LAWS, *NEW))}
    scores = {}
    for name, members in averages.items():
        added = members & (law_of >= known) & (members.sum() > (law_of >= known).sum())
        prior = np.where(added, np.log(ADDED / (1 - ADDED)), 0.0)
        share = softmax(np.where(members, evidence + prior, -np.inf))
        weight = np.repeat(share, POOL)
        scores[name] = [scored(mean, draws, weight * gain, truth) for gain in gains]
    return scores


def scored(mean: Array, draws: Array, weight: Array, truth: float) -> list[float]:
    """Median of the means, 90 % interval and CRPS of the draws, with their weights; (n,) each."""
    value, (low, high) = quantiles(mean, weight, [0.5])[0], quantiles(draws, weight, [0.05, 0.95])
    return [value, low, high, crps(draws, weight, truth)]


def quantiles(x: Array, weight: Array, shares: Sequence[float]) -> list[float]:
    """Quantiles of draws with weights, (n,) each."""
    order = np.argsort(x)
    total = weight[order].cumsum()
    k = np.searchsorted(total, np.array(shares) * total[-1])
    return np.asarray(x[order][np.minimum(k, len(x) - 1)], np.float64).tolist()


def describe(head: Row, runs: Sequence[Row]) -> str:
    """A line for each law alone, then for each average."""
    shown, errors = [row for row in runs if "truth" in row], dict[str, list[tuple[Row, float, bool | None]]]()
    for row in shown:
        for name, value in row["values"].items():
            errors.setdefault(name, []).append((row, abs(value - row["truth"]), None))
    averages = list(dict.fromkeys(name for row in shown for name in row["averages"]))
    averages = [name for name in averages if name not in (*LAWS, *NEW)]
    for name in averages:
        errors[name] = weighted_by_others(shown, name)
    usual = {id(row): error for row, error, _ in errors[AVERAGE]}
    parts = []
    for title, names in (("alone", [x for x in errors if x not in averages]), ("averages", averages)):
        lines = [[name, *_line(errors[name], share, usual)] for name in names for share in SHARES]
        parts.append(table((title, *HEAD), [line for line in lines if len(line) > 1]))
    return "\n\n".join(parts)


def weighted_by_others(runs: Sequence[Row], name: str) -> list[tuple[Row, float, bool | None]]:
    """|error| of an average and whether 90 % holds, by the weight that the other sources say."""
    rows = [
        {"source": row["source"], "share": row["share"], "truth": row["truth"], "run": row,
         "carried": row["values"][CARRIED], "by_gain": [[x] for x in row["averages"][name]]}
        for row in runs
        if name in row["averages"]
    ]  # fmt: skip
    sources = {row["source"] for row in rows}
    a = {x: learned([row for row in rows if row["source"] != x]) for x in sources}
    if len(sources) == 1:
        a = dict.fromkeys(sources, DEFAULT.gain)
    result: list[tuple[Row, float, bool | None]] = []
    for row in rows:
        value, low, high, _ = row["by_gain"][nearest(a[row["source"]])][0]
        result.append((row["run"], abs(value - row["truth"]), low <= row["truth"] <= high))
    return result


def _line(
    errors: Sequence[tuple[Row, float, bool | None]], share: float, usual: dict[int, float]
) -> list[str]:
    """The cells of HEAD; none if there is no run."""
    here = [
        (row["source"], e, holds, e - usual[id(row)]) for row, e, holds in errors if row["share"] == share
    ]
    if not here:
        return []
    by_source = [[(e, d) for name, e, _, d in here if name == x] for x in dict.fromkeys(x[0] for x in here)]
    mean, difference = (float(np.mean([np.mean([x[i] for x in runs]) for runs in by_source])) for i in (0, 1))
    low, high = np.quantile(bootstrapped([[d for _, d in runs] for runs in by_source]), [0.05, 0.95])
    holds = None if here[0][2] is None else float(np.mean([x[2] for x in here]))
    shown = f"{difference:+.3f} ({low:+.3f} to {high:+.3f})" if any(x[3] for x in here) else "–"
    median = float(np.median([x[1] for x in here]))
    return [f"{share:.0%}", str(len(here)), f"{median:.3f}", f"{mean:.3f}", shown, number(holds, ".2f")]


def bootstrapped(by_source: Sequence[Sequence[float]]) -> Array:
    """(BOOTSTRAPS,) means, each source alike, of sources that are drawn and of runs drawn of these."""
    rng, of_source = np.random.default_rng(0), []
    for values in by_source:
        k = rng.integers(len(values), size=(BOOTSTRAPS, len(by_source), len(values)))
        of_source.append(np.array(values)[k].mean(-1))
    drawn = rng.integers(len(by_source), size=(BOOTSTRAPS, len(by_source)))
    means = np.stack(of_source)  # (sources, BOOTSTRAPS, places)
    rows, places = np.arange(BOOTSTRAPS)[:, None], np.arange(len(by_source))
    return np.asarray(means[drawn, rows, places].mean(1), np.float64)
