"""Is the curve a sigmoid at all? Checks that do not take the family for granted."""

import numpy as np
from numpy.typing import NDArray

from trainer.scaling.posterior import Data
from trainer.scaling.sigmoid import Sigmoid

Array = NDArray[np.float64]

LAST_LOW = 3  # up to so many last points can be far below the curve
FAR_BELOW = 5.0  # in standard deviations of the other points from the curve
LEAST_DROP = 0.03  # a smaller distance is not called a collapse


def last_drop(data: Data, sigmoid: Sigmoid) -> float:
    """How far the last points lie below the curve while all others follow it; 0: they do not.

    The fit gives little weight to such points, so that the curve is that of the others.
    """
    residual = data.reward - sigmoid.reward(data.compute)
    for count in range(1, LAST_LOW + 1):
        last, others, sd = residual[-count:], residual[:-count], data.sd[:-count]
        freedom = len(others) - (3 if data.exact else 4)
        if freedom < 1:
            break
        scale = float(np.sqrt(((others / sd) ** 2).sum() / freedom))
        noise = data.sd * (max(scale, 1.0) if data.sd_known else scale)
        limit = np.maximum(FAR_BELOW * noise, LEAST_DROP)
        if (last < -limit[-count:]).all() and (np.abs(others) < limit[:-count]).all():
            return float(-last.mean())
    return 0.0
