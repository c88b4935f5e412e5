"""A run's evaluations as arrays, or as columns of a DataFrame, made into a Curve."""

from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainer.config import ConfigError
from trainer.scaling.curve.sigmoid import Curve, EvalPoint, curve_of


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
    made = curve_of(name, unit, (EvalPoint(i, *row) for i, row in enumerate(rows)))
    return made if R0 is None else replace(made, R0=float(R0))


def evaluated(
    compute: ArrayLike | str, reward: ArrayLike | str | None, se: ArrayLike | str | None, data: Columns | None
) -> list[NDArray[np.float64]]:
    """(n,) each: compute, reward and standard error (0: unknown) where the reward is not NaN."""
    c, r = _numbers("compute", compute, data), _numbers("reward", reward, data)
    sd = np.zeros(c.shape) if se is None else _numbers("se", se, data)
    if not c.shape == r.shape == sd.shape:
        lengths = f"{len(c)}, {len(r)} and {len(sd)}"
        raise ConfigError(f"compute, reward and se have {lengths} values; expected as many of each")
    return [x[~np.isnan(r)] for x in (c, r, np.where(np.isnan(sd), 0.0, sd))]


def _numbers(what: str, values: ArrayLike | str | None, data: Columns | None) -> NDArray[np.float64]:
    """(n,)"""
    try:
        if isinstance(values, str):
            values = ({} if data is None else data)[values]
        found = np.asarray(values, np.float64)  # None: NaN, of shape ()
    except KeyError as e:
        table = "there is no data=TABLE" if data is None else "data has no such column"
        raise ConfigError(f"{what}={values!r} is the name of a column, but {table}") from e
    except (TypeError, ValueError) as e:
        raise ConfigError(f"{what} has values that are not numbers ({e}); expected (n,) numbers") from e
    if found.ndim != 1:
        raise ConfigError(f"{what} has the shape {found.shape}; expected (n,)")
    return found
