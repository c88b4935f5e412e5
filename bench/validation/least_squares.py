"""Weighted least squares of R(C) = low·(1 − s(C)) + high·s(C): low and high in closed form, within bounds.

Every family of curves here has this form, where s rises from 0 to 1 and has one or two parameters. These are
sought on a grid first, so that no local optimum is taken for the global one, and then refined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import minimum_filter
from scipy.optimize import least_squares

Array = NDArray[np.float64]
Corners = Sequence[tuple[float, float]]  # (low, high) of a point, a line or a triangle, anticlockwise
Shape = Callable[..., Array]  # s(compute, *parameters), broadcasting

STARTS = 4  # local optima of the grid to refine


@dataclass(frozen=True, slots=True)
class Best:
    """The least-squares curve."""

    parameters: tuple[float, ...]  # of the shape
    low: float
    high: float
    chi2: float  # Σ ((R − curve)/sd)²


def triangle(floor: float, ceiling: float) -> Corners:
    """floor ≤ low ≤ high ≤ ceiling."""
    return ((floor, floor), (ceiling, ceiling), (floor, ceiling))


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """The sums that make up χ², with w = 1/sd: the normal equations of low and high. (...) each."""

    u: Array  # Σ w²(1 − s)²
    v: Array  # Σ w²(1 − s) s
    q: Array  # Σ w² s²
    g: Array  # Σ w²(1 − s) y
    h: Array  # Σ w² s y

    def gain(self, low: Array, high: Array) -> Array:
        """Σ w²y² − χ² of the curve from low to high."""
        result: Array = low * (2 * self.g - self.u * low - 2 * self.v * high)
        return result + high * (2 * self.h - self.q * high)


def moments(s: Array, y: Array, sd: Array) -> Moments:
    """s, y and sd broadcast, the points along the last axis."""
    one, two, wy = 1 / sd, s / sd, y / sd
    rest = one - two
    return Moments(
        *((a * b).sum(-1) for a, b in ((rest, rest), (rest, two), (two, two), (rest, wy), (two, wy)))
    )


def best_ends(m: Moments, corners: Corners) -> tuple[Array, Array, Array]:
    """low and high of least χ² within the corners, and their gain; (...) each."""
    points = np.array(corners)
    around = [(points[i - 1], points[i] - points[i - 1]) for i in range(len(points))]
    tried = []
    for (p0, p1), (d0, d1) in around[:1] if len(points) < 3 else around:
        slope = d0 * (m.g - m.u * p0 - m.v * p1) + d1 * (m.h - m.v * p0 - m.q * p1)
        bend = d0 * d0 * m.u + 2 * d0 * d1 * m.v + d1 * d1 * m.q
        t = np.clip(slope / np.maximum(bend, 1e-300), 0, 1)
        tried.append((p0 + t * d0, p1 + t * d1, np.ones_like(t, np.bool_)))
    if len(points) > 2:
        determinant = m.u * m.q - m.v * m.v
        inside = determinant > 1e-12 * m.u * m.q
        safe = np.where(inside, determinant, 1.0)
        a, b = (m.q * m.g - m.v * m.h) / safe, (m.u * m.h - m.v * m.g) / safe
        for (p0, p1), (d0, d1) in around:
            inside = inside & (d0 * (b - p1) >= d1 * (a - p0))
        tried.append((a, b, inside))
    low, high, _ = tried[0]
    gain = m.gain(low, high)
    for a, b, allowed in tried[1:]:
        new = np.where(allowed, m.gain(a, b), -np.inf)
        wins = new > gain
        low, high, gain = np.where(wins, a, low), np.where(wins, b, high), np.where(wins, new, gain)
    low, high = (np.clip(x, *ends) for x, ends in zip((low, high), _span(points), strict=True))
    return low, np.maximum(low, high), gain


def _span(points: Array) -> Array:
    return np.stack([points.min(0), points.max(0)], 1)


def least_squares_of(
    c: Array, y: Array, sd: Array,  # (n,)
    shape: Shape, axes: Sequence[Array], corners: Corners, starts: int = STARTS,
) -> Best:  # fmt: skip
    """The best curve with the shape's parameters between the ends of `axes`, the grid of the first search."""

    def errors(x: Array) -> Array:
        s = shape(c, *x)
        low, high, _ = best_ends(moments(s, y, sd), corners)
        result: Array = (low * (1 - s) + high * s - y) / sd
        return result

    grid = np.meshgrid(*axes, indexing="ij")
    gain = best_ends(moments(shape(c, *(x[..., None] for x in grid)), y, sd), corners)[2]
    peaks = np.flatnonzero((-gain == minimum_filter(-gain, 3, mode="nearest")).ravel())
    peaks = peaks[np.argsort(-gain.ravel()[peaks], kind="stable")][:starts]
    low_end, high_end = (np.array([a[i] for a in axes]) for i in (0, -1))
    scale = (high_end - low_end) / [len(a) for a in axes]
    best = min(
        (
            least_squares(
                errors,
                np.clip([x.ravel()[k] for x in grid], low_end + 1e-6 * scale, high_end - 1e-6 * scale),
                bounds=(low_end, high_end), x_scale=scale, jac="3-point", ftol=1e-12, xtol=1e-10, gtol=1e-12,
            )
            for k in peaks
        ),
        key=lambda found: float(found.cost),
    )  # fmt: skip
    low, high, _ = best_ends(moments(shape(c, *best.x), y, sd), corners)
    return Best(tuple(float(x) for x in best.x), float(low), float(high), float(2 * best.cost))
