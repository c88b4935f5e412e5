"""The law that ties reward to compute: fit, words, picture, report."""

from trainer.scaling.fit import Estimate, EvalPoint, Fit, explain, fit, fit_run
from trainer.scaling.law import Sigmoid
from trainer.scaling.plot import plot_curve
from trainer.scaling.report import write_report

__all__ = [
    "Estimate",
    "EvalPoint",
    "Fit",
    "Sigmoid",
    "explain",
    "fit",
    "fit_run",
    "plot_curve",
    "write_report",
]
