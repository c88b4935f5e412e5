"""Simulated runs: evaluations of a known curve, whose errors may be correlated.

    white = rng.normal(0, sd, len(compute))
    run = simulated(truth.reward, compute, autocorrelated(white, 0.6), sd)

The caller draws the independent errors, so that a simulation decides which of its runs share them.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from trainer.scaling.curve.sigmoid import Array, Curve, EvalPoint, curve_of


def autocorrelated(white: ArrayLike, rho: ArrayLike, before: float | None = None) -> Array:
    """(n,) errors as large as the independent ones `white`, each correlated by `rho` with the one before it.

    `rho`: one number, or (n,). `before`: the error of the point before the first; None: there was none.
    """
    errors = np.array(white, np.float64)
    for i, r in enumerate(np.broadcast_to(np.asarray(rho, np.float64), errors.shape).tolist()):
        if before is not None:
            errors[i] = r * before + (1 - r * r) ** 0.5 * errors[i]
        before = float(errors[i])
    return errors


def simulated(
    reward: Callable[[Array], Array],  # R(C) of the true curve: `Sigmoid.reward`, for instance
    compute: ArrayLike,  # (n,); what is evaluated at 0 is R0
    errors: ArrayLike,  # (n,) of the evaluations, or one for all
    se: ArrayLike,  # (n,) standard errors that the run reports, or one for all; 0: none
    name: str = "simulated",
) -> Curve:
    """The run whose evaluations are the true rewards plus their errors, within 0 to 1."""
    c, error, sd = (np.asarray(x, np.float64) for x in (compute, errors, se))
    rows = np.stack(np.broadcast_arrays(c, np.clip(reward(c) + error, 0, 1), sd), axis=1).tolist()
    return curve_of(name, "GPU-hours", [EvalPoint(i, *row) for i, row in enumerate(rows)])
