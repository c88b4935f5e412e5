"""A run's points as the fits take them, from a Curve or arrays: checked, in order, very many averaged."""

from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainer.config import ConfigError
from trainer.scaling.curve.marginal import Data
from trainer.scaling.curve.sigmoid import Curve, EvalPoint, curve_of

Array = NDArray[np.float64]

MAX_POINTS = 150  # longer series are averaged over neighbours
MIN_SD = 1e-3  # of an evaluation: more precise ones are taken for as precise as this
EQUAL_ERROR = 1e-2  # where no errors are reported; for the fit it only matters that they are equal


def checked(curve: Curve) -> Data:
    """The points of a curve in the order of compute, all errors above 0. ConfigError as `fit`."""
    columns = [[getattr(p, name) for p in curve.points] for name in ("compute", "pass_rate", "pass_rate_se")]
    c, r, sd = (np.asarray(x, np.float64) for x in columns)
    if isinstance(curve.R0, EvalPoint):
        return data_of(c, r, sd, curve.R0.pass_rate, curve.R0.pass_rate_se or None)
    return data_of(c, r, sd, curve.R0, 0.0)


def averaged(data: Data) -> Data:
    """The data, with neighbours averaged if there are more than MAX_POINTS."""
    if len(data.compute) <= MAX_POINTS:
        return data
    parts = np.array_split(np.arange(len(data.compute)), MAX_POINTS)
    c, r = (np.array([x[i].mean() for i in parts]) for x in (data.compute, data.reward))
    sd = np.array([float(np.sqrt((data.sd[i] ** 2).sum())) / len(i) for i in parts])
    return replace(data, compute=c, reward=r, sd=sd)


def data_of(c: Array, r: Array, sd: Array, R0: float | None, R0_se: float | None) -> Data:
    """`checked`, of arrays."""
    for name, x, least, most, expected in (
        ("compute", c, 5e-324, np.inf, "above 0 (at 0 it is R0)"),
        ("reward", r, 0.0, 1.0, "in [0, 1]: divide percent by 100"),
        ("standard error", sd, 0.0, np.inf, "of at least 0"),
    ):  # fmt: skip
        if len(wrong := np.flatnonzero(~((x >= least) & (x <= most) & np.isfinite(x)))):
            i = int(wrong[0])
            raise ConfigError(f"fit: {name} of point {i + 1} is {x[i]}; expected a number {expected}")
    for name, value in (("R0", R0), ("R0's standard error", R0_se)):
        if value is not None and not 0 <= value <= 1:
            raise ConfigError(f"fit: {name} is {value}; expected a number in [0, 1]")
    order = np.argsort(c, kind="stable")
    c, r, sd = c[order], r[order], sd[order]
    known = bool((sd > 0).any())
    # The binomial error of a perfect score is 0, but it is no more certain than the most certain point.
    sd = np.where(sd > 0, sd, sd[sd > 0].min() if known else EQUAL_ERROR)
    lowest = float(sd.min(initial=EQUAL_ERROR))
    return Data(c, r, sd, known, R0, lowest if R0_se is None else R0_se, R0_se is not None)


class Columns(Protocol):
    """A DataFrame, a dict of arrays, or whatever else gives a column for its name."""

    def __getitem__(self, name: str, /) -> Any: ...


def curve(
    compute: ArrayLike | str,  # (n,) ≥ 0, in `unit`; what was measured at 0 is R0
    reward: ArrayLike | str,  # (n,) from 0 to 1, on held-out prompts; NaN: not evaluated there, left out
    se: ArrayLike | str | None = None,  # (n,) standard errors of the rewards; None or 0: unknown
    *,
    data: Columns | None = None,  # whose columns `compute`, `reward` and `se` then name
    R0: float | None = None,  # the reward at zero compute, if it is not among the points
    name: str = "",  # for messages
    unit: str = "",  # of compute: "GPU-hours", "FLOPs", "steps"; by default the column's name
) -> Curve:
    """A run for `fit`, `compare` and `predict`: `curve(hours, acc)`, `curve("hours", "acc", data=df)`.

    Percent must be divided by 100. ConfigError: columns of different lengths, or that are not numbers.
    """
    unit = unit or (compute if isinstance(compute, str) else "")
    rows = np.stack(evaluated(compute, reward, se, data), 1).tolist()
    run = curve_of(name, unit, (EvalPoint(i, *row) for i, row in enumerate(rows)))
    return run if R0 is None else replace(run, R0=float(R0))


def evaluated(
    compute: ArrayLike | str, reward: ArrayLike | str | None, se: ArrayLike | str | None, data: Columns | None
) -> list[Array]:
    """(n,) each: compute, reward and standard error (0: unknown) where the reward is not NaN."""
    c, r = _numbers("compute", compute, data), _numbers("reward", reward, data)
    sd = np.zeros(c.shape) if se is None else _numbers("se", se, data)
    if not c.shape == r.shape == sd.shape:
        lengths = f"{len(c)}, {len(r)} and {len(sd)}"
        raise ConfigError(f"compute, reward and se have {lengths} values; expected as many of each")
    return [x[~np.isnan(r)] for x in (c, r, np.where(np.isnan(sd), 0.0, sd))]


def _numbers(what: str, values: ArrayLike | str | None, data: Columns | None) -> Array:
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
