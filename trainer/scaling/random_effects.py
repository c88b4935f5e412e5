"""Units that differ by more than their errors: seeds of a recipe, sizes of a model, earlier runs.

    value_i ~ N(x_i · a, τ² + variance_i),    a flat, or normal where something is known of it

For each level of τ, a is integrated in closed form; the prior of τ is the caller's. The posterior is a
mixture over these levels.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import softmax

from trainer.scaling.curve.sigmoid import Array

LEVELS = np.linspace(-8, 8, 129)  # log2 of τ over its prior's median


@dataclass(frozen=True, slots=True, eq=False)
class Effects:
    """The posterior of a and the evidence on τ, by level of τ."""

    log_evidence: Array  # (levels,) log p(values | τ), but for a constant
    mean: Array  # (levels, k) of a
    covariance: Array  # (levels, k, k)


def effects(
    units: ArrayLike,  # (units, 2): value and variance of each
    tau: Array,  # (levels,)
    x: Array | None = None,  # (units, k); None: one mean for all
    known: tuple[float, float] | None = None,  # mean and sd of a prior of that mean; None: it is flat
) -> Effects:
    """The effects a integrated out for every level of τ. With a flat prior one unit says nothing about τ."""
    y, v = np.asarray(units, np.float64).T
    design = np.ones((len(y), 1)) if x is None else x
    w = 1 / (tau[:, None] ** 2 + v)  # (levels, units)
    before, precision = (known[0], known[1] ** -2) if known else (0.0, 0.0)
    P = np.einsum("ui,lu,uj->lij", design, w, design) + precision
    covariance = np.linalg.inv(P)
    mean = np.einsum("lij,lj->li", covariance, np.einsum("ui,lu,u->li", design, w, y) + precision * before)
    sse = (w * (y - mean @ design.T) ** 2).sum(1) + precision * ((mean - before) ** 2).sum(1)
    return Effects(0.5 * (np.log(w).sum(1) - np.linalg.slogdet(P)[1] - sse), mean, covariance)


def mixture_moments(each: Effects, tau: Array, log_prior: Array) -> tuple[float, float]:
    """Mean and sd of the value of another unit."""
    p = softmax(log_prior + each.log_evidence)
    mean = float(p @ each.mean[:, 0])
    return mean, float(np.sqrt(p @ (each.covariance[:, 0, 0] + tau**2 + (each.mean[:, 0] - mean) ** 2)))
