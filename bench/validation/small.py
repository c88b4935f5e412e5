"""The small parts of the validation: the effect of a wrong R0, and the power law's error."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.sources import RANGES
from bench.validation.fits import FINER
from bench.validation.scenarios import LONG, NOISE, PAPER_RUNS, Scenario, simulate
from trainer.scaling import fit
from trainer.scaling.curve.least_squares import fit_power_law
from trainer.scaling.curve.marginal import Data
from trainer.scaling.curve.paper import paper_fit

SERIES = 40
ASSUMED = (0.25, 0.30, 0.35)


def wrong_R0() -> list[dict[str, Any]]:
    """The curve of ScaleRL without noise, evaluated up to 8k GPU-hours, fitted with each assumed R0."""
    run = PAPER_RUNS["ScaleRL"]
    c = np.arange(1500.0, run.high + 1, run.every)
    r = run.curve.reward(c)
    fits = []
    for R0 in ASSUMED:
        mine, theirs = fit(c, r, np.full(len(c), NOISE), R0=R0), paper_fit(c, r, R0, FINER)
        fits.append({
            "R0": R0, "ours": [mine.A.value, mine.B.value, mine.C_mid.value],
            "paper, finer": [theirs.A, theirs.B, theirs.C_mid],
        })  # fmt: skip
    return fits


def power_law(seed: int) -> list[dict[str, Any]]:
    """A of a power law fitted to the long run, whose true curve is a sigmoid: median and quartiles."""
    fits = []
    for published in (r for r in RANGES if r.family == "power law"):
        scenario = Scenario("power law", rows=(LONG,), low=published.low, high=published.high)
        A = []
        for i in range(SERIES):
            p = simulate(scenario, PAPER_RUNS[LONG], i, seed)
            data = Data(p.compute, p.reward, np.full(len(p.compute), NOISE), True, p.R0, p.R0_se)
            A.append(fit_power_law(data).A)
        quartiles = [float(x) for x in np.quantile(A, [0.25, 0.75])]
        fits.append({"low": published.low, "high": published.high, "published A": published.A,
                      "A": float(np.median(A)), "quartiles": quartiles, "runs": SERIES})  # fmt: skip
    return fits
