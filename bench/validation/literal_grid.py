"""The paper's procedure as printed: fit B by `curve_fit` for every pair (A, C_mid) and keep the best."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import curve_fit

from trainer.scaling.curve.paper import PaperGrid
from trainer.scaling.curve.sigmoid import Sigmoid

Array = NDArray[np.float64]


def literal_loop(
    compute: Array, reward: Array, R0: float, grid: PaperGrid, tolerance: float = 1e-8
) -> tuple[Sigmoid, float]:
    """The best curve and its Σ (R − curve)²; `tolerance` is `curve_fit`'s, in B and in the sum."""
    best = (math.inf, 0.0, 0.0, 0.0)
    A_values, C_mid_values = grid.values()
    for A in A_values:
        for C_mid in C_mid_values:

            def model(C: Array, B: float, A: float = A, C_mid: float = C_mid) -> Array:
                result: Array = R0 + (A - R0) / (1 + (C_mid / C) ** B)
                return result

            with np.errstate(over="ignore"):
                (B,), _ = curve_fit(model, compute, reward, p0=[1.0], ftol=tolerance, xtol=tolerance)
                sse = float(((reward - model(compute, B)) ** 2).sum())
            best = min(best, (sse, float(A), float(B), float(C_mid)))
    sse, A, B, C_mid = best
    return Sigmoid(R0, A, B, C_mid), sse
