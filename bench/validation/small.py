"""Parts of the validation that take seconds: what a wrong R0 does, and how the power law fails."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.sources import RANGES
from bench.validation.cases import LONG, NOISE, ROWS, Case, simulate
from bench.validation.fits import FINER
from trainer.scaling import fit
from trainer.scaling.alternatives.families import fit_power_law
from trainer.scaling.alternatives.paper import paper_fit
from trainer.scaling.posterior import Data

SERIES = 40
ASSUMED = (0.25, 0.30, 0.35)


def wrong_R0() -> list[dict[str, Any]]:
    """The law of ScaleRL without noise, evaluated up to 8k, fitted with each assumed R0."""
    row = ROWS["ScaleRL"]
    c = np.arange(1500.0, row.high + 1, row.every)
    r = row.law.reward(c)
    found = []
    for R0 in ASSUMED:
        mine, theirs = fit(c, r, np.full(len(c), NOISE), R0=R0), paper_fit(c, r, R0, FINER)
        found.append({
            "R0": R0, "ours": [mine.A.value, mine.B.value, mine.C_mid.value],
            "paper, finer": [theirs.A, theirs.B, theirs.C_mid],
        })  # fmt: skip
    return found


def power_law(seed: int) -> list[dict[str, Any]]:
    """A of the power law fitted to the long run, whose truth is a sigmoid: median and quartiles."""
    found = []
    for published in (r for r in RANGES if r.law == "power law"):
        case = Case("power law", rows=(LONG,), low=published.low, high=published.high)
        A = []
        for i in range(SERIES):
            p = simulate(case, ROWS[LONG], i, seed)
            data = Data(p.compute, p.reward, np.full(len(p.compute), NOISE), True, p.R0, p.R0_se)
            A.append(fit_power_law(data).A)
        quartiles = [float(x) for x in np.quantile(A, [0.25, 0.75])]
        found.append({"low": published.low, "high": published.high, "published A": published.A,
                      "A": float(np.median(A)), "quartiles": quartiles, "runs": SERIES})  # fmt: skip
    return found
