"""Two published laws over the sizes of models, as cross-checks of across.py: each fitted to the same runs.

Each gives one number for a size not trained, with the jackknife's interval: fitted again without each size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy.special import expit, stdtrit

from trainer.scaling.curve.fit import Estimate
from trainer.scaling.curve.sigmoid import Curve, EvalPoint

Runs = Mapping[float, Sequence[Curve]]  # by size

MAX_WIDTH = 0.2  # of a reward's interval, and ...
MAX_FACTOR = 3.0  # ... of an exponent's, beyond which the law is not identified
DELTAS, STARTS = np.geomspace(1, 60, 15), np.linspace(-0.5, 1, 16)  # δ and t0 of the logistic
POWER = "arXiv 2509.25300, log(1 − R) = −k(N) log C + E(N), k(N) = K_max/(1 + N0/N), E(N) free: k(N)"
LOGISTIC = "arXiv 2507.18014, R = α R0 + β N + γ/(1 + exp(−δ(t − t0))): R at t = 1, an equally long training,"


def other_laws(runs: Runs, size: float, R0: float, confidence: float) -> dict[str, Estimate | None]:
    """What each law says of a size that starts from `R0`; None: the runs do not identify the law."""
    k = jackknife(exponent, runs, size, confidence)
    reward = jackknife(lambda some, n: end_reward(some, n, R0), runs, size, confidence)
    narrow = reward and reward.low >= 0 and reward.high <= min(1, reward.low + MAX_WIDTH)
    return {POWER: k if k and 0 < k.high < MAX_FACTOR * k.low else None, LOGISTIC: reward if narrow else None}


def jackknife(
    rule: Callable[[Runs, float], float], runs: Runs, size: float, confidence: float
) -> Estimate | None:
    """A rule's number for `size`, with Student's interval; None: it fails, also without one of the sizes."""
    without = [rule({n: some for n, some in runs.items() if n != omitted}, size) for omitted in runs]
    value, dof = rule(runs, size), len(runs) - 1
    half = math.sqrt(dof * float(np.var(without))) * float(stdtrit(dof, (1 + confidence) / 2))
    return Estimate(value, value - half, value + half) if math.isfinite(value + half) else None


def exponent(runs: Runs, size: float) -> float:
    """k(N) of POWER, from 1/k = 1/K_max + (N0/K_max)/N over the sizes. NaN: these are no positive numbers."""
    k = [float(np.mean([_slope(curve) for curve in curves])) for curves in runs.values()]
    if min(k) <= 0:
        return math.nan
    per_size, least = np.polyfit(1 / np.array(list(runs)), 1 / np.array(k), 1).tolist()
    return 1 / (least + per_size / size) if least > 0 and per_size >= 0 else math.nan


def _slope(curve: Curve) -> float:
    """−d log(1 − R) / d log C, by least squares."""
    points = [p for p in curve.points if p.pass_rate < 1]
    c, error = np.log([p.compute for p in points]), np.log([1 - p.pass_rate for p in points])
    return -float(np.polyfit(c, error, 1)[0])


def end_reward(runs: Runs, size: float, R0: float) -> float:
    """R at t = 1 of LOGISTIC; t is the share of a run's compute. NaN: the R0 of a run is unknown."""
    rows = [
        (_start(curve), n / size, p.compute / curve.points[-1].compute, p.pass_rate)
        for n, curves in runs.items()
        for curve in curves
        for p in curve.points
    ]
    start, relative, t, reward = np.array(rows).T
    if np.isnan(start).any():
        return math.nan
    best, predicted = math.inf, math.nan
    for delta, t0 in ((delta, t0) for delta in DELTAS for t0 in STARTS):
        design = np.stack([start, relative, expit(delta * (t - t0))], 1)
        solution, _, rank, _ = np.linalg.lstsq(design, reward, rcond=1e-6)
        sse = float(((reward - design @ solution) ** 2).sum())
        if rank == 3 and sse < best:
            best = sse
            predicted = float(solution @ [R0, 1.0, expit(delta * (1 - t0))])
    return predicted


def _start(curve: Curve) -> float:
    """R0; NaN if it is unknown."""
    R0 = curve.R0.pass_rate if isinstance(curve.R0, EvalPoint) else curve.R0
    return math.nan if R0 is None else R0
