"""The sigmoid law of reinforcement-learning compute (arXiv 2510.13786, eq. 1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True)
class Sigmoid:
    """R(C) = R0 + (A − R0) / (1 + (C_mid / C)^B)."""

    R0: float  # reward at zero compute
    A: float  # ceiling
    B: float  # efficiency
    C_mid: float  # compute at which half of A − R0 is won

    def reward(self, compute: ArrayLike) -> NDArray[np.float64]:
        """R(C); R(0) = R0."""
        return self.R0 + (self.A - self.R0) * rise(compute, self.B, self.C_mid)

    def compute_for(self, reward: float) -> float:
        """C at which R(C) is `reward`: 0 up to R0, infinite from the ceiling on."""
        if reward <= self.R0:
            return 0.0
        if reward >= self.A:
            return math.inf
        return float(self.C_mid * ((reward - self.R0) / (self.A - reward)) ** (1 / self.B))


def rise(compute: ArrayLike, B: Any, C_mid: Any) -> NDArray[np.float64]:
    """The share of A − R0 that is won: 1 / (1 + (C_mid / C)^B), 0 at C = 0. Broadcasts."""
    c = np.asarray(compute, np.float64)
    with np.errstate(divide="ignore", over="ignore"):
        result: NDArray[np.float64] = 1 / (1 + (C_mid / c) ** B)
    return result
