"""The reward at a budget and the budget for a reward; another loss kernel rescales the compute axis."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.accounting.kernel_cost import CONSTANTS, MODELS, PUBLISHED_HEADS, Head, Setting, cost_factor
from trainer.accounting.kernel_rates import Rates, measured_heads
from trainer.accounting.run_account import run_dtype, run_times
from trainer.config import ConfigError
from trainer.scaling.curve.fit import Estimate, Fit, fit_curve
from trainer.scaling.curve.sigmoid import Curve

KERNELS = {"naive": "naive FP32", "peer": "best peer", "ours": "ours"}  # command line: name of the head


@dataclass(frozen=True, slots=True)
class Reached:
    """The reward at a budget."""

    budget: float
    reward: Estimate
    ahead: float  # the budget in multiples of the last compute measured


@dataclass(frozen=True, slots=True)
class Needed:
    """The compute for a reward."""

    reward: float
    compute: Estimate  # infinite: never reached; 0: reached at the start
    chance: float  # probability that it is ever reached


@dataclass(frozen=True, slots=True)
class Prediction:
    """The rewards of a run at some budgets, and its budgets for some rewards."""

    fit: Fit
    reached: tuple[Reached, ...]
    needed: tuple[Needed, ...]


@dataclass(frozen=True, slots=True)
class Shift:
    """The compute of a run with another loss kernel, relative to the kernel it was measured with."""

    factor: float
    model: str  # one of kernel_cost.MODELS; empty: the run's own
    kernel: Head
    measured_with: Head
    note: str = ""  # why the run's own account was not used


def predict(
    run: Curve | Fit, *, at: Sequence[float] = (), reach: Sequence[float] = (), factor: float = 1.0
) -> Prediction:
    """The rewards `at` budgets in the run's unit of compute, and the budgets to `reach` rewards in (0, 1].

    `factor`: what a step will cost, in multiples of what it cost in the run. Where the ceiling is not
    identified, use the intervals and not the values. ConfigError: too few points, or the run has fallen.
    """
    if type(run) not in (Curve, Fit):
        kind = type(run).__name__
        raise ConfigError(f"predict: the run is a {kind}; expected a Curve, as of curve(...), or a Fit")
    fit = fit_curve(run) if isinstance(run, Curve) else run
    if not fit.has_forecast:
        raise ConfigError(f"there is no forecast: {fit.reasons}")
    last, ever = fit.compute_range[1], fit.forecast.compute_for
    return Prediction(
        fit,
        tuple(Reached(budget, fit.at(budget / factor), budget / factor / last) for budget in at),
        tuple(Needed(r, fit.compute_for(r).times(factor), float(np.isfinite(ever(r)).mean())) for r in reach),
    )


def kernel_shift(model: str, kernel: str, measured_with: str, rates: Rates | None = None) -> Shift:
    """The cost of a step with one of KERNELS relative to another, for one of kernel_cost.MODELS.

    `rates`: measured ones in bf16 replace the published ones. The step has the paper's size.
    """
    if model not in MODELS:
        raise ConfigError(f"--model {model!r}: expected one of {', '.join(MODELS)}")
    shape = MODELS[model]
    new, old = _both(kernel, measured_with, rates, "bfloat16")
    setting = Setting(**{name: c.value for name, c in CONSTANTS.items()})
    return Shift(cost_factor(shape, setting, new, old), shape.name, new, old)


def shift_of_run(folder: Path, kernel: str, measured_with: str, rates: Rates) -> Shift | None:
    """The cost of this run with another kernel, by its own ledger; None if it is no run folder of ours.

    ConfigError: `rates` lack one of both kernels. Published rates are of other machines.
    """
    times = run_times(folder)
    if times is None:
        return None
    new, old = _both(kernel, measured_with, rates, run_dtype(folder))
    return Shift(times.factor(old.tflops / new.tflops), "", new, old)


def _both(kernel: str, measured_with: str, rates: Rates | None, dtype: str) -> tuple[Head, Head]:
    """The published rates of two of KERNELS, or those of one record: both, or ConfigError."""
    known = PUBLISHED_HEADS if rates is None else measured_heads(rates, dtype)
    heads = {head.name: head for head in known}
    if missing := [name for name in (KERNELS[kernel], KERNELS[measured_with]) if name not in heads]:
        raise ConfigError(
            f"--kernel-rates: it has no {' and no '.join(missing)} in {dtype}; both kernels must have been "
            "measured, on one machine"
        )
    return heads[KERNELS[kernel]], heads[KERNELS[measured_with]]
