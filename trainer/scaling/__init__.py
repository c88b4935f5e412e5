"""The scaling curve of reward over compute: fit it, explain it, compare it, carry it further, plot it.

Importing this imports numpy and scipy, and neither torch nor transformers.
"""

from trainer.scaling.fit import Estimate, Fit, fit, fit_curve, fit_run
from trainer.scaling.plot import plot_curve
from trainer.scaling.sigmoid import Curve, EvalPoint, Sigmoid, curve_of
from trainer.scaling.text import explain

__all__ = [
    "Curve", "Estimate", "EvalPoint", "Fit", "Sigmoid", "curve_of", "explain", "fit", "fit_curve", "fit_run",
    "plot_curve",
]  # fmt: skip
