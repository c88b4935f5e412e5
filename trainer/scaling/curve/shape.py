"""Is the curve a sigmoid at all? Checks that do not take the family for granted.

Families with another fraction s(C) of the gain are compared with the sigmoid, and so is a sigmoid with
something added: a second stage, or a change that sets in late. Another shape is better if its most likely
curve is far more likely than the most likely sigmoid. It is as good if its evidence is higher, the
probability of the data averaged over the parameters: then it matters only where it ends elsewhere. The
errors may be correlated in each (marginal.py), so that noise which wanders is not taken for a misfit. The
limits below were chosen by simulation: python -m bench.validation.shapes, and docs/validation.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from trainer.scaling.curve.families import FEW_CORRELATIONS, Axis, Family, integrate, sigmoids
from trainer.scaling.curve.marginal import NOISE_PRIOR_POINTS, Data, Noise, noise_models, typical_gap
from trainer.scaling.curve.posterior import Posterior, full_box, robust
from trainer.scaling.curve.sigmoid import Sigmoid, fraction_gained

Array = NDArray[np.float64]

LAST_LOW = 3  # up to so many last points can be far below the curve
FAR_BELOW = 5.0  # in standard deviations of the other points from the curve
LEAST_DROP = 0.03  # a smaller distance is not called a collapse

MIN_CHECKED = 8  # points; with fewer the families cannot be distinguished
LEAST_SD = 1e-3  # of an evaluation: more precise ones are taken for as precise as this
BETTER = 4.0  # log likelihood of another family's best curve over the sigmoid's from which it is better
SECOND_STAGE, CHANGED = 2.0, 3.5  # ... of a sigmoid with a second stage, or with a late change
AS_GOOD = 1.5  # log evidence of a family over the sigmoid's from which it is as good, ...
NO_WORSE = -1.5  # ... if its best curve is at least this likely
AUTOCORRELATED = 0.9  # probability of correlated errors from which, as without standard errors, ...
MARGIN = 1.25  # ... these limits are higher by this, because the noise itself is less certain
LOGISTIC = "a logistic"  # seen to its end it is like a sigmoid, so that it must be better than one; but ...
LATE = 0.6  # ... with its middle beyond this share of the data it matters as soon as it is no worse
AHEAD = 4.0  # times the data: where families that are as good must agree
STAGE_B, STAGE_SHARE = 2.0, 0.4  # of a second stage: efficiency, and sd of its height in shares of the rise
STAGES = 8  # places that are tried for it
CHANGES, CHANGE_SHARE = (0.5, 0.6, 0.7, 0.8, 0.9), 0.15  # shares of the data after which a change sets in; sd


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """What the data say of a family, and its most likely curve."""

    log: float  # evidence
    peak: float  # log likelihood of that curve, with σ integrated
    R0: float
    A: float
    parameters: tuple[float, ...]

    def reward(self, family: Family, compute: Array | float) -> Array:
        """R(C) of the most likely curve, at most 1."""
        s = family.fraction(np.asarray(compute, np.float64), *self.parameters)
        return np.minimum(self.R0 + (self.A - self.R0) * s, 1)


@dataclass(frozen=True, slots=True)
class OtherShape:
    """A shape that describes the points better than a sigmoid, or as well, with another end."""

    text: str
    better: bool


def another_shape(data: Data, found: Posterior) -> OtherShape | None:
    """The likeliest other shape, one that is better before all that are as good; None: there is none."""
    if len(data.compute) < MIN_CHECKED:
        return None
    weight, scale = robust(data)
    margin = MARGIN if found.autocorrelated_prob > AUTOCORRELATED or not data.sd_known else 0.0
    data, scale = _with_errors(data, scale)
    noises = noise_models(data, weight, FEW_CORRELATIONS)
    sigmoid = sigmoids(full_box(data))
    e = evidence(data, noises, sigmoid)
    usual = replace(e, log=e.log + margin, peak=e.peak + margin)
    shapes = [*_other_families(data, noises, usual, found)]
    shapes += _additions(data, noises, usual, sigmoid, scale)
    return max(shapes, key=lambda found: (found[1].better, found[0]), default=(0.0, None))[1]


def _with_errors(data: Data, scale: float) -> tuple[Data, float]:
    """The data with standard errors: the reported ones, else the residuals' size; and what is left of σ."""
    R0_se = data.start_error(scale) if data.sd_known or data.exact else scale * data.start_error(scale)
    sd, scale = (data.sd, max(scale, 1.0)) if data.sd_known else (data.sd * scale, 1.0)
    R0_se = R0_se if data.exact else max(R0_se, LEAST_SD)
    return replace(data, sd=np.maximum(sd, LEAST_SD), R0_se=R0_se, sd_known=True), scale


def _other_families(
    data: Data, noises: Sequence[Noise], usual: Evidence, found: Posterior
) -> Iterator[tuple[float, OtherShape]]:
    """The evidence and description of each family that is better, or as good with another end."""
    last = float(data.compute[-1])
    low, high = np.quantile(found.draws.reward(AHEAD * last), [0.05, 0.95])
    for family in _families(data):
        e = evidence(data, noises, family)
        better, as_good = e.peak > usual.peak + BETTER, e.log > usual.log + AS_GOOD
        as_good = as_good and e.peak > usual.peak + NO_WORSE
        if family.name == LOGISTIC:
            as_good = e.log > usual.log and e.parameters[0] > LATE * last
        elsewhere = data.R0 is not None and not low <= float(e.reward(family, AHEAD * last)) <= high
        if better or (as_good and elsewhere):
            end = f"ends at {e.A:.2f}" if family.has_end else "has no ceiling"
            compared = "better than" if better else "as well as"
            text = f"{family.name} describes the points {compared} a sigmoid and {end}"
            yield e.log, OtherShape(text, better)


def _additions(
    data: Data, noises: Sequence[Noise], usual: Evidence, sigmoid: Family, scale: float
) -> Iterator[tuple[float, OtherShape]]:
    """The evidence and description of what is added to the sigmoid. `scale`: σ."""
    c, last = data.compute, float(data.compute[-1])
    rise = float(data.reward.max()) - (float(data.reward.min()) if data.R0 is None else data.R0)
    changes = [CHANGE_SHARE * np.clip((c / last - x) / (1 - x), 0, None) for x in CHANGES]
    stages = [STAGE_SHARE * fraction_gained(c, STAGE_B, x) for x in np.geomspace(c[0] / 4, last, STAGES)]
    for added, least in ((changes, CHANGED), (stages, SECOND_STAGE)):
        directions = [data.with_start(h * rise / scale, 0.0) for h in added]
        each = [evidence(data, [noise.plus(h) for noise in noises], sigmoid) for h in directions]
        k = int(np.argmax([e.peak for e in each]))
        if each[k].peak <= usual.peak + least:
            continue
        if added is stages:
            yield each[k].log, OtherShape("the reward rises in two stages", better=True)
        else:
            away = (data.reward - each[k].reward(sigmoid, c)) @ changes[k]
            part = f"the last {1 - CHANGES[k]:.0%} of the compute"
            says = (
                f"in {part} the reward {'falls below' if away < 0 else 'rises above'} the sigmoid of the rest"
            )
            yield each[k].log, OtherShape(says, better=True)


def evidence(data: Data, noises: Sequence[Noise], family: Family) -> Evidence:
    """The evidence of a family, and its most likely curve."""
    found = integrate(data, noises, family)
    model, k = divmod(int(found.log_weight.argmax()), found.log_weight.shape[1])
    fit = found.cells[model].fit
    A = float(np.clip(fit.A[k], data.lowest_A, 1))
    sse = NOISE_PRIOR_POINTS + max(float(fit.sse[k]), 0.0)
    peak = noises[model].log_prior - 0.5 * found.cells[model].freedom * math.log(sse)
    return Evidence(found.log_evidence, peak, float(fit.R0[k]), A, tuple(float(x[k, 0]) for x in found.theta))


def _families(data: Data) -> tuple[Family, ...]:
    """What else a curve can be. Parameters in compute reach from below the gaps of the data to beyond it."""
    last, gap = float(data.compute[-1]), typical_gap(data.compute)

    def logistic(c: Array, middle: Array, steepness: Array) -> Array:
        low = expit(-steepness * middle)
        return (expit(steepness * (c - middle)) - low) / (1 - low)

    return (
        Family("an exponential approach", lambda c, t: -np.expm1(-c / t), (Axis(gap / 2, 10 * last, 60),)),
        Family("a straight rise to a hard cap", lambda c, t: np.minimum(c / t, 1),
               (Axis(min(2 * gap, last / 2), last, 60),)),
        Family("a straight line", lambda c: c / last, (), has_end=False),
        Family("a logarithm of compute", lambda c, t: np.log1p(c / t) / np.log1p(last / t),
               (Axis(gap / 30, 10 * last, 40),), has_end=False),
        Family(LOGISTIC, logistic,
               (Axis(last / 20, 1.4 * last, 20, log=False), Axis(2 / last, 80 / last, 14))),
    )  # fmt: skip


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
