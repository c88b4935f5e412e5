"""Lengths of completions, drawn from a log-normal distribution."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def lognormal_lengths(
    mean: float, p95: float, longest: int, completions: int, rows: int = 4096, seed: int = 0
) -> NDArray[np.int64]:
    """(rows, completions) lengths of a log-normal with this mean and 95th percentile, cut at `longest`."""
    z = 1.6449  # of the normal's 95th percentile
    # ln(p95/mean) = z·σ − σ²/2, whose smaller root is meant
    root = z * z - 2 * np.log(p95 / mean)
    if not (1 <= mean <= p95 and root >= 0):
        raise ValueError(
            f"no log-normal has mean {mean:g} and 95th percentile {p95:g}: expected a percentile of 1 to "
            f"{np.exp(z * z / 2):.2f} times the mean, and a mean of 1 or more"
        )
    sigma = z - float(np.sqrt(root))
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, (rows, completions))
    return np.clip(np.rint(drawn), 1, longest).astype(np.int64)
