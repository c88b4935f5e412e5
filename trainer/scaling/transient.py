"""Early points that the sigmoid does not describe: found, and left out.

A run's first evaluations may follow another law: it learns the answers' format, or its optimiser warms up.
The paper drops about the first epoch, 1.5k of 8k GPU-hours. Here the points before a quarter of the rise are
dropped if the law of the later points and R0 foretells two neighbours among them wrongly, on the same side
and each by more than two standard deviations. So one outlier drops nothing.

Simulated (A .61, B 1.92, C_mid 2542, 32 points to 8k GPU-hours, noise .005, R0 measured, 40 runs each): with
an early transient of +.05, −.05 or +.1 times exp(−C/500) the ceiling is identified in 88, 97 and 95 % of
runs, instead of 52, 44 and 24 % with all points; the intervals cover. Without one nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trainer.scaling.fit import LEAST_POINTS, fit_curve
from trainer.scaling.points import Curve, EvalPoint

EARLY_SHARE = 0.25  # of the rise
FAR = 2.0  # standard deviations
LAW_PARAMETERS = 3


def without_early(curve: Curve) -> Curve:
    """The curve without its early points, where they are of another law; else the curve itself.

    Nothing is dropped where R0 is unknown, since then the early points tell it, or where too little is left.
    """
    if curve.R0 is None or len(curve.points) < LEAST_POINTS:
        return curve
    law = fit_curve(curve).law
    begin = law.compute_for(law.R0 + EARLY_SHARE * (law.A - law.R0))
    early = [p for p in curve.points if p.compute < begin]
    later = replace(curve, points=curve.points[len(early) :])
    if len(early) < 2 or len(later.points) < 2 * LEAST_POINTS:
        return curve
    off = _surprise(later, early)
    same_side = off[1:] * off[:-1] > 0
    far = np.minimum(np.abs(off[1:]), np.abs(off[:-1])) > FAR
    return later if bool((same_side & far).any()) else curve


def _surprise(later: Curve, early: Sequence[EvalPoint]) -> np.ndarray:
    """How far the early points lie from what the later ones foretell, in standard deviations."""
    found = fit_curve(later)
    assert found.draws is not None  # there are points enough
    c, r, sd = np.array([(p.compute, p.pass_rate, p.pass_rate_se) for p in early]).T
    residual = np.array([p.pass_rate - float(found.law.reward(p.compute)) for p in later.points])
    noise = np.sqrt((residual**2).sum() / (len(residual) - LAW_PARAMETERS))
    law_sd = found.draws.reward(c).std(axis=0)
    result: np.ndarray = (r - found.law.reward(c)) / np.hypot(np.maximum(sd, noise), law_sd)
    return result
