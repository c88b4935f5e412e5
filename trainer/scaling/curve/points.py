"""A run's points as the fits take them: checked, in order, and averaged where there are very many."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from trainer.config import ConfigError
from trainer.scaling.curve.marginal import Data
from trainer.scaling.curve.sigmoid import Curve, EvalPoint

Array = NDArray[np.float64]

MAX_POINTS = 150  # longer series are averaged over neighbours
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
