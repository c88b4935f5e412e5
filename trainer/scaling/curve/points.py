"""A run's points as the fits take them, from a Curve or arrays: checked, in order, very many averaged."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.ndimage import uniform_filter1d

from trainer.config import ConfigError
from trainer.scaling.curve.marginal import Data
from trainer.scaling.curve.sigmoid import Array, Curve, EvalPoint, curve_of

MAX_POINTS = 150  # longer series are averaged over neighbours
MIN_POINTS = 5  # beyond R0: the sigmoid has three more parameters
MIN_FORECAST = 3  # evaluations, R0 counted, from which there is a wide forecast all the same
EQUAL_ERROR = 1e-2  # of a reward of .5 where none is reported; the fit estimates the factor


def checked(curve: Curve) -> Data:
    """The points of a curve in the order of compute, all errors above 0.

    ConfigError, after the curve's name: a reward outside [0, 1], a compute that is not above 0.
    """
    rows = np.array([(p.compute, p.pass_rate, p.pass_rate_se) for p in curve.points], np.float64)
    c, r, sd = rows.reshape(-1, 3).T
    first = curve.R0
    R0, R0_se = (first.pass_rate, first.pass_rate_se) if isinstance(first, EvalPoint) else (first, 0.0)
    start = [] if R0 is None else [R0]
    for name, x, least, most, expected in (
        ("compute of point {}", c, 5e-324, np.inf, "above 0 (at 0 it is R0)"),
        ("reward of point {}", r, 0.0, 1.0, "in [0, 1]: divide percent by 100"),
        ("standard error of point {}", sd, 0.0, np.inf, "of at least 0"),
        ("R0", np.array(start), 0.0, 1.0, "in [0, 1]"),
        ("R0's standard error", np.array([R0_se]), 0.0, 1.0, "in [0, 1]"),
    ):  # fmt: skip
        if len(wrong := np.flatnonzero(~((x >= least) & (x <= most) & np.isfinite(x)))):
            i, run = int(wrong[0]), f"{curve.name}: " * bool(curve.name)
            raise ConfigError(f"{run}fit: {name.format(i + 1)} is {x[i]}; expected a number {expected}")
    order = np.argsort(c, kind="stable")
    c, r, sd = c[order], r[order], sd[order]
    work = np.array([p.flops for p in curve.points], np.float64)[order]
    flops = work if len(work) and (work > 0).all() else None
    known = bool((sd > 0).any())
    # The binomial error of a perfect score is 0, but it is no more certain than the most certain point.
    sd = np.where(sd > 0, sd, sd[sd > 0].min()) if known else usual_error(_smoothed(r))
    unsaid = not known and _most_alike(r)
    if isinstance(first, EvalPoint) and not R0_se:
        error = sd.min(initial=EQUAL_ERROR) if known else float(usual_error(first.pass_rate))
        return Data(c, r, sd, known or unsaid, R0, float(error), False, flops)
    return Data(c, r, sd, known or unsaid, R0, R0_se, flops=flops)


def usual_error(reward: ArrayLike) -> Array:
    """The sd of an evaluation where none is reported, but for a factor: as a share of answers has it."""
    p = np.clip(np.asarray(reward, np.float64), 0.02, 0.98)
    return np.asarray(2 * EQUAL_ERROR * np.sqrt(p * (1 - p)))


def _most_alike(reward: Array) -> bool:
    """True if over half of the rewards are the same, (n,), such as 0 before a run takes off.

    Their scatter of 0 is no estimate of the noise: the usual error is then taken for a reported one.
    """
    return bool(len(reward)) and not np.median(np.abs(reward - np.median(reward)))


def _smoothed(reward: Array) -> Array:
    """(n,) means of a fifth of the points around each, or of three."""
    return np.asarray(uniform_filter1d(reward, max(3, len(reward) // 5), mode="nearest"), np.float64)


def averaged(data: Data) -> Data:
    """The data, with neighbours averaged if there are more than MAX_POINTS."""
    if len(data.compute) <= MAX_POINTS:
        return data
    parts = np.array_split(np.arange(len(data.compute)), MAX_POINTS)
    c, r = (np.array([x[i].mean() for i in parts]) for x in (data.compute, data.reward))
    sd = np.array([float(np.sqrt((data.sd[i] ** 2).sum())) / len(i) for i in parts])
    flops = None if data.flops is None else np.array([data.flops[i].mean() for i in parts])
    return replace(data, compute=c, reward=r, sd=sd, flops=flops)


def last_error(points: Sequence[EvalPoint]) -> float:
    """The last point's error as the fit takes it: that of the most certain point if it is 0 or unknown."""
    reported = [p.pass_rate_se for p in points if p.compute > 0 and p.pass_rate_se > 0]
    return points[-1].pass_rate_se or min(reported, default=EQUAL_ERROR)


def curve(
    compute: ArrayLike | str,  # (n,) ≥ 0, in `unit`; what was measured at 0 is R0
    reward: ArrayLike | str | None,  # (n,) from 0 to 1, on held-out prompts; NaN: not evaluated, left out
    se: ArrayLike | str | None = None,  # (n,) standard errors of the rewards; None or 0: unknown
    *,
    data: Any = None,  # a DataFrame or dict of arrays, whose columns `compute`, `reward` and `se` then name
    R0: float | None = None,  # the reward at zero compute, if it is not among the points
    name: str = "",  # for messages
    unit: str = "",  # of compute: "GPU-hours", "FLOPs", "steps"; by default the column's name
) -> Curve:
    """A run for `fit`, `compare` and `predict`: `curve(hours, acc)`, `curve("hours", "acc", data=df)`.

    Percent must be divided by 100. ConfigError: columns of different lengths, or that are not numbers.
    """
    unit = unit or (compute if isinstance(compute, str) else "")
    c, r = _numbers("compute", compute, data), _numbers("reward", reward, data)
    sd = np.zeros(c.shape) if se is None else _numbers("se", se, data)
    if not c.shape == r.shape == sd.shape:
        lengths = f"{len(c)}, {len(r)} and {len(sd)}"
        raise ConfigError(f"compute, reward and se have {lengths} values; expected as many of each")
    rows = np.stack([c, r, np.where(np.isnan(sd), 0.0, sd)], axis=1)[~np.isnan(r)].tolist()
    run = curve_of(name, unit, (EvalPoint(i, *row) for i, row in enumerate(rows)))
    return run if R0 is None else replace(run, R0=float(R0))


def _numbers(what: str, values: ArrayLike | str | None, data: Any) -> Array:
    """(n,)"""
    try:
        if isinstance(values, str):
            values = ({} if data is None else data)[values]
        column = np.asarray(values, np.float64)  # None: NaN, of shape ()
    except KeyError as e:
        table = "there is no data=TABLE" if data is None else "data has no such column"
        raise ConfigError(f"{what}={values!r} is the name of a column, but {table}") from e
    except (TypeError, ValueError) as e:
        raise ConfigError(f"{what} has values that are not numbers ({e}); expected (n,) numbers") from e
    if column.ndim != 1:
        raise ConfigError(f"{what} has the shape {column.shape}; expected (n,)")
    return column
