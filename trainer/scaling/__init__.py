"""The scaling curve of reward over compute: fit it, explain it, compare it, carry it further, plot it.

    from trainer.scaling import compare, curve, fit, predict

    run = curve("gpu_hours", "accuracy", data=frame)  # or curve(hours, accuracy), of arrays (n,)
    fit(run).A                                        # Estimate(value, low, high) of the ceiling, 0 to 1
    fit("gpu_hours", "accuracy", data=frame)          # the same without a Curve; or fit(hours, accuracy)
    compare({"ours": [run, other], "baseline": [third]}).pairs
    predict(run, at=[24_000], reach=[0.6]).reached

Compute is in any unit, the same for all runs; rewards are from 0 to 1. What is wrong is a ConfigError, which
is a ValueError. Importing this imports numpy and scipy, and neither torch nor transformers.
"""

from trainer.config import ConfigError
from trainer.scaling.compare import Comparison, compare
from trainer.scaling.curve.fit import Estimate, Fit, fit, fit_curve
from trainer.scaling.curve.points import curve
from trainer.scaling.curve.sigmoid import Curve, EvalPoint, Sigmoid, curve_of
from trainer.scaling.plot import plot_curve
from trainer.scaling.predict import Prediction, predict
from trainer.scaling.text import explain

__all__ = [
    "Comparison", "ConfigError", "Curve", "Estimate", "EvalPoint", "Fit", "Prediction", "Sigmoid", "compare",
    "curve", "curve_of", "explain", "fit", "fit_curve", "plot_curve", "predict",
]  # fmt: skip
