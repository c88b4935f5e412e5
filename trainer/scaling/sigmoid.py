"""The sigmoid law of reinforcement-learning compute (arXiv 2510.13786, eq. 1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sigmoid:
    """R(C) = R0 + (A − R0) / (1 + (C_mid / C)^B)."""

    R0: float  # reward at zero compute
    A: float  # ceiling
    B: float  # efficiency
    C_mid: float  # compute at which half of A − R0 is won

    def reward(self, compute: ArrayLike) -> Array:
        """R(C); R(0) = R0."""
        return self.R0 + (self.A - self.R0) * rise(compute, self.B, self.C_mid)

    def compute_for(self, reward: float) -> float:
        """C at which R(C) is `reward`: 0 up to R0, infinite from the ceiling on."""
        return float(compute_for(reward, self.R0, self.A, self.B, self.C_mid))


def rise(compute: ArrayLike, B: ArrayLike, C_mid: ArrayLike) -> Array:
    """The share of A − R0 that is won: 1 / (1 + (C_mid / C)^B), 0 at C = 0. Broadcasts."""
    c, b, c_mid = (np.asarray(x, np.float64) for x in (compute, B, C_mid))
    with np.errstate(divide="ignore", over="ignore"):
        result: Array = 1 / (1 + (c_mid / c) ** b)
    return result


def compute_for(reward: ArrayLike, R0: ArrayLike, A: ArrayLike, B: ArrayLike, C_mid: ArrayLike) -> Array:
    """C at which R(C) is `reward`: 0 up to R0, infinite from A on. Broadcasts."""
    won = np.asarray(reward, np.float64) - np.asarray(R0, np.float64)
    left = np.asarray(A, np.float64) - np.asarray(reward, np.float64)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        between = np.asarray(C_mid) * (np.maximum(won, 0) / np.maximum(left, 0)) ** (1 / np.asarray(B))
    result: Array = np.where(won <= 0, 0.0, np.where(left <= 0, np.inf, between))
    return result
