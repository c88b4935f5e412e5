"""Flags of a fit: what the data cannot identify, and how that is said."""

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from trainer.scaling.curve.families import B_RANGE
from trainer.scaling.curve.marginal import Data
from trainer.scaling.curve.sigmoid import Estimate, Sigmoid

FIFTH = 0.2  # of the rise, the points, the variance: see the flags wide and poor-fit
MAX_INTERVAL = 0.1  # A is not identified where its interval is wider than this
MIN_DROP = 0.03  # a smaller distance is not called a collapse
SURPRISING = 2.0  # standard errors from which residuals are more than noise
FLAGS = {
    "too-few-points": "there are fewer than 5 evaluations after the start",
    "flat": "the reward has not risen beyond its noise",
    "A-at-bound": "a ceiling of 1, the highest possible, fits the data as well",
    "C_mid-beyond-data": "half of the rise is beyond the data, or in the last point alone",
    "falling": "the reward has fallen from its peak, which a sigmoid cannot describe",
    "not-sigmoid": "another shape describes the points better than a sigmoid",
    "other-shape": "other shapes describe the points as well as a sigmoid, or better, with another end",
    "wide": "the interval of A is wider than a fifth of the rise from R0, or than 0.10",
    "last-point-low": "the last evaluation is far below the curve: a collapse, or a bad evaluation",
    "poor-fit": "a fifth of the points are outliers, or the curve explains less than a fifth of the variance",
    "B-at-bound": "the rise was over before the evaluations could show how steep it was",
    "R0-unknown": "the reward at zero compute was not measured, and B and C_mid depend on it",
}
SUFFICIENT = {"too-few-points", "falling", "flat"}  # reasons that explain the other ones
HARMLESS = {"B-at-bound", "R0-unknown"}  # the ceiling is identified all the same
NO_CURVE = {"flat", "falling", "poor-fit"}  # no shape describes such points


def reasons(flags: Iterable[str]) -> list[str]:
    """The flags because of which the ceiling is not identified, but for those that follow from others."""
    doubts = [flag for flag in flags if flag not in HARMLESS]
    named = [flag for flag in doubts if flag in SUFFICIENT] or [flag for flag in doubts if flag != "wide"]
    return named or doubts


def is_wide(e: Estimate, rise: float, within: float | None) -> bool:
    """True if an interval reaches further than `within` from its value, or is too wide for the rise."""
    if within is not None:
        return max(e.high - e.value, e.value - e.low) > within
    return e.high - e.low > min(FIFTH * rise, MAX_INTERVAL)


def few_points(data: Data) -> tuple[str, ...]:
    """The flags of too few points for a sigmoid: fallen from their peak, or not risen, by three errors."""
    if data.R0 is None or not len(data.reward):
        return ("too-few-points",)
    last, noise = float(data.reward[-1]), 3 * math.hypot(float(data.sd[-1]), data.R0_se)
    if last < max(float(data.reward.max()), data.R0) - noise:
        return "too-few-points", "falling"
    return ("too-few-points", "flat") if last < data.R0 + noise else ("too-few-points",)


def has_fallen(r: NDArray[np.float64], sd: NDArray[np.float64]) -> bool:
    """True if the last of five rewards or more, (n,), are below an earlier peak by more than their noise."""
    sd = np.maximum(sd, scatter(r))
    width = min(len(r), max(3, len(r) // 5))  # the median of three ignores one outlier
    windows = np.median(np.lib.stride_tricks.sliding_window_view(r, width), axis=-1)
    ends = (width, windows[-1]), (3, np.median(r[-3:]))  # a late fall shows in a few points only
    return any(windows.max() - end > max(MIN_DROP, 4 * sd.mean() / n**0.5) for n, end in ends)


def scatter(r: NDArray[np.float64]) -> float:
    """The noise of rewards by how far they are from the mean of their neighbours, outliers and a fall left
    aside: a quarter of standard normal numbers are within .319."""
    return float(np.quantile(np.abs(np.diff(r, 2)), 0.25)) / 0.319 / 6**0.5


def flags_of(
    data: Data, sigmoid: Sigmoid, outliers: NDArray[np.bool_], A: Estimate, B: Estimate, within: float | None
) -> dict[str, str]:
    """The flags of a sigmoid, and what each means."""
    r, sd, rise = data.reward, data.sd, sigmoid.A - sigmoid.R0
    falling, sd = has_fallen(r, sd), np.maximum(sd, scatter(r))
    last = max(2, len(r) // 5)
    start = float(r[0]) if data.R0 is None else data.R0
    flat = not falling and r[-last:].mean() - start < 3 * sd[-last:].mean() / last**0.5
    drop = 0.0 if falling else _last_drop(data, sigmoid, outliers)
    limit = f"{FIFTH * rise:.3f}, a fifth of the rise from R0" if FIFTH * rise <= MAX_INTERVAL else "0.10"
    wide = f"the interval of A is {A.high - A.low:.3f} wide, which is more than {limit}"
    raised = {
        "flat": flat,
        "A-at-bound": A.high >= 0.99 and A.low < 0.95,
        "C_mid-beyond-data": sigmoid.C_mid > data.compute[-2],
        "falling": falling,
        "last-point-low": drop > 0,
        "wide": is_wide(A, rise, within),
        "poor-fit": not flat and not falling and _is_poor(data, sigmoid, outliers),  # these say why
        "B-at-bound": B.high > 0.9 * B_RANGE[1],
        "R0-unknown": data.R0 is None,
    }
    said = FLAGS | {
        "wide": f"the interval of A reaches further than {within:g} from its value" if within else wide,
        "last-point-low": FLAGS["last-point-low"].replace("far", f"{drop:.2f}"),
    }
    return {flag: said[flag] for flag, is_raised in raised.items() if is_raised}


def _is_poor(data: Data, sigmoid: Sigmoid, outliers: NDArray[np.bool_]) -> bool:
    """True if too many points are outliers, or the sigmoid explains too little of the variance.

    So a single jump or mere noise is not taken for a curve. R0 counts as a point, because much of the rise
    can come before the first evaluation.
    """
    residual = data.reward - sigmoid.reward(data.compute)
    if outliers.sum() >= FIFTH * len(residual):
        return True
    if data.sd_known and float(np.sqrt(((residual / data.sd) ** 2).mean())) < SURPRISING:
        return False  # the reported errors explain it
    r = data.reward
    if data.R0 is not None:
        residual, r = np.append(residual, data.R0 - sigmoid.R0), np.append(r, data.R0)
    return float((residual**2).sum()) > (1 - FIFTH) * float(((r - r.mean()) ** 2).sum())


def _last_drop(data: Data, sigmoid: Sigmoid, outliers: NDArray[np.bool_]) -> float:
    """Mean distance of up to three last points below a curve that all others follow; 0: there are none.

    The fit gives little weight to such points, so that the curve is that of the others.
    """
    residual = data.reward - sigmoid.reward(data.compute)
    far = outliers & (np.abs(residual) > MIN_DROP)
    count = int(far.sum())
    last = residual[len(residual) - count :]
    if not 0 < count <= 3 or not far[len(far) - count :].all() or (last > 0).any():
        return 0.0
    return float(-last.mean())
