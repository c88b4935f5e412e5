"""A value and its interval, from draws."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its interval."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Estimate:
        """In another unit."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor)


def estimate(value: float, draws: Array, confidence: float) -> Estimate:
    """A value and the interval of its draws, widened where that leaves out the value."""
    tail = (1 - confidence) / 2
    low, high = (float(x) for x in np.quantile(draws, [tail, 1 - tail], method="inverted_cdf"))
    return Estimate(value, min(low, value), max(high, value))


def median(draws: Array, confidence: float) -> Estimate:
    """The median and the interval of draws, of which some can be infinite."""
    return estimate(float(np.quantile(draws, 0.5, method="inverted_cdf")), draws, confidence)
