"""The efficiency plot of arXiv 2510.13786: over log C a sigmoid is a straight line of slope B.

log[(R − R0) / (A − R)] = B log C − B log C_mid
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.scaling.fit import Fit
from trainer.scaling.points import Curve

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Straightened:
    """Points of the efficiency plot, one standard error up and down; (n,) each, natural logarithms."""

    compute: Array
    value: Array
    low: Array  # −inf where the point less its error is not above R0
    high: Array  # inf where the point with its error is not below A
    left_out: int  # points not between R0 and A have no logarithm


def straighten(curve: Curve, fit: Fit) -> Straightened:
    """The curve's points, by the R0 and A of its fit."""
    c = np.array([p.compute for p in curve.points], np.float64)
    r = np.array([p.pass_rate for p in curve.points], np.float64)
    se = np.array([p.pass_rate_se for p in curve.points], np.float64)
    R0, A = fit.R0.value, fit.A.value
    has = (r > R0) & (r < A)

    def of(x: Array) -> Array:
        with np.errstate(divide="ignore"):
            result: Array = np.log(np.maximum(x - R0, 0)) - np.log(np.maximum(A - x, 0))
        return result

    r, se = r[has], se[has]
    return Straightened(c[has], of(r), of(r - se), of(r + se), int((~has).sum()))
