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

from trainer.scaling.curve.families import LOGISTIC, Family, integrate, other_families, sigmoids
from trainer.scaling.curve.marginal import FEW_CORRELATIONS, NOISE_PRIOR_POINTS, Data, Noise, noise_models
from trainer.scaling.curve.points import MIN_SD
from trainer.scaling.curve.posterior import Posterior
from trainer.scaling.curve.sigmoid import fraction_gained

Array = NDArray[np.float64]

UNLIKELY = (
    0.1  # probability of a sigmoid, of independent errors, of a gain below which they are not counted on
)
MIN_CHECKED = 8  # points; with fewer the families cannot be distinguished
BETTER = 3.5  # log likelihood of the best other curve over the best sigmoid's from which it is better
AS_GOOD = 1.4  # log evidence of a family over the sigmoid's from which it is as good
LATE = 0.6  # share of the data beyond whose middle a logistic matters as soon as it is no worse
EXTRAPOLATION = 4.0  # times the data: where families that are as good must agree
CHANGES, CHANGE_SHARE = (0.5, 0.6, 0.7, 0.8, 0.9), 0.15  # shares of the data after which a change sets in; sd
STAGES, STAGE_B, STAGE_SHARE = (
    8,
    2.0,
    0.4,
)  # places tried for a second stage; its B; sd, in shares of the rise


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """The probability of the data under a family, and its most likely curve."""

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

    @property
    def flag(self) -> str:
        """The flag of a fit to such points."""
        return "not-sigmoid" if self.better else "other-shape"


def another_shape(data: Data, found: Posterior) -> OtherShape | None:
    """The likeliest other shape, one that is better before all that are as good; None: there is none."""
    if len(data.compute) < MIN_CHECKED:
        return None
    # The noise is less certain where errors are correlated or not reported; then the limits are higher.
    margin = AS_GOOD if found.autocorrelated_prob > 1 - UNLIKELY or not data.sd_known else 0.0
    data, sigma = _with_errors(data, found.scale)
    noises, sigmoid = noise_models(data, found.weight, FEW_CORRELATIONS), sigmoids(data)
    e = evidence(data, noises, sigmoid)
    usual = replace(e, log=e.log + margin, peak=e.peak + margin)
    shapes = [
        *_families(data, noises, usual, found), *_additions(data, noises, usual, sigmoid, sigma)
    ]  # fmt: skip
    return max(shapes, key=lambda shape: (shape[1].better, shape[0]), default=(0.0, None))[1]


def _with_errors(data: Data, scale: float) -> tuple[Data, float]:
    """The data with standard errors: the reported ones, else the residuals' size; and what remains of σ."""
    R0_se = data.start_error(scale)
    if not data.sd_known:
        data, scale, R0_se = replace(data, sd=data.sd * scale, sd_known=True), 1.0, scale * R0_se
    R0_se = data.R0_se if data.exact else max(R0_se, MIN_SD)
    return replace(data, sd=np.maximum(data.sd, MIN_SD), R0_se=R0_se), max(scale, 1.0)


def _families(
    data: Data, noises: Sequence[Noise], usual: Evidence, found: Posterior
) -> Iterator[tuple[float, OtherShape]]:
    """The evidence and description of each family that is better, or as good with another end."""
    last = float(data.compute[-1])
    low, high = np.quantile(found.draws.reward(EXTRAPOLATION * last), [0.05, 0.95])
    for family in other_families(data):
        e = evidence(data, noises, family)
        better = e.peak > usual.peak + BETTER
        as_good = e.log > usual.log + AS_GOOD and e.peak > usual.peak - AS_GOOD
        if family.name == LOGISTIC:  # seen to its end it is like a sigmoid
            as_good = e.log > usual.log and e.parameters[0] > LATE * last
        end = float(e.reward(family, EXTRAPOLATION * last))
        if better or (as_good and data.R0 is not None and not low <= end <= high):
            says = f"ends at {e.A:.2f}" if family.has_end else "has no ceiling"
            compared = "better than" if better else "as well as"
            text = f"{family.name} describes the points {compared} a sigmoid and {says}"
            yield e.log, OtherShape(text, better)


def _additions(
    data: Data, noises: Sequence[Noise], usual: Evidence, sigmoid: Family, sigma: float
) -> Iterator[tuple[float, OtherShape]]:
    """The evidence and description of what is added to the sigmoid."""
    c, last = data.compute, float(data.compute[-1])
    rise = float(data.reward.max()) - (float(data.reward.min()) if data.R0 is None else data.R0)

    def likeliest(terms: Sequence[Array]) -> tuple[Evidence, int]:
        directions = [data.prepend_R0(h * rise / sigma, 0.0) for h in terms]
        each = [evidence(data, [noise.plus(h) for noise in noises], sigmoid) for h in directions]
        k = int(np.argmax([e.peak for e in each]))
        return each[k], k

    changes = [CHANGE_SHARE * np.clip((c / last - x) / (1 - x), 0, None) for x in CHANGES]
    e, k = likeliest(changes)
    if e.peak > usual.peak + BETTER:
        away = (data.reward - e.reward(sigmoid, c)) @ changes[k]
        moves = "falls below" if away < 0 else "rises above"
        part = f"the last {1 - CHANGES[k]:.0%} of the compute"
        yield e.log, OtherShape(f"in {part} the reward {moves} the sigmoid of the rest", better=True)
    stages = [STAGE_SHARE * fraction_gained(c, STAGE_B, x) for x in np.geomspace(c[0] / 4, last, STAGES)]
    e, _ = likeliest(stages)
    if e.peak > usual.peak + math.log(STAGES):  # the best of so many places is by chance as much likelier
        yield e.log, OtherShape("the reward rises in two stages", better=True)


def evidence(data: Data, noises: Sequence[Noise], family: Family) -> Evidence:
    """The evidence of a family, and its most likely curve."""
    found = integrate(data, noises, family)
    model, k = divmod(int(found.log_weight.argmax()), found.log_weight.shape[1])
    fit = found.cells[model].fit
    A = float(np.clip(fit.A[k], data.lowest_A, 1))
    sse = NOISE_PRIOR_POINTS + max(float(fit.sse[k]), 0.0)
    peak = noises[model].log_prior - 0.5 * found.cells[model].dof * math.log(sse)
    return Evidence(found.log_evidence, peak, float(fit.R0[k]), A, tuple(float(x[k, 0]) for x in found.theta))
