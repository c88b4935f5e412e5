"""Is the curve a sigmoid at all? Checks that do not take the family for granted.

Families with another fraction s(C) of the gain are compared with the sigmoid, and so is a sigmoid with
something added: a second stage, or a change that sets in late. Another shape is better if its most likely
curve is far more likely than the most likely sigmoid. It is as good if its evidence is higher, the
probability of the data averaged over the parameters: then it matters only where it ends elsewhere. The
errors may be correlated in each (marginal.py), so that noise which wanders is not taken for a misfit. The
limits below were chosen by simulation: python -m bench validation.shapes, and docs/validation.md.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trainer.scaling.curve import marginal
from trainer.scaling.curve.families import LOGISTIC, Family, integrate, other_families, sigmoids
from trainer.scaling.curve.sigmoid import Array, Draws, fraction_gained

UNLIKELY = 0.1  # a sigmoid, independent errors or a gain of less probability is not counted on
MIN_BETTER = 3.5  # log likelihood of the best other curve over the best sigmoid's from which it is better
AS_GOOD = 1.4  # log evidence of a family over the sigmoid's from which it is as good
MIN_MIDDLE = 0.6  # share of the data beyond whose middle a logistic matters as soon as it is no worse
EXTRAPOLATION = 4.0  # times the data: where families that are as good must agree
CHANGES, CHANGE_SHARE = (0.5, 0.6, 0.7, 0.8, 0.9), 0.15  # shares of the data after which a change sets in; sd
STAGES, STAGE_SHARE = 8, 0.4  # places tried for a second stage; its sd, in shares of the rise

Shape = tuple[bool, float, str]  # whether it is better than a sigmoid, its log evidence, and its description


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """The probability of the data under a family, and its most likely curve."""

    log: float  # evidence
    peak: float  # log likelihood of that curve, with σ integrated
    curve: tuple[float, ...]  # R0, A and the parameters


def another_shape(
    data: marginal.Data,
    draws: Draws,
    weight: Array,  # (n,) of each point
    scale: float,  # size of the residuals, in standard errors
    correlated: bool,  # whether the errors of neighbours may be
) -> dict[str, str]:
    """The flag and the description of the likeliest other shape, one that is better before all as good.

    With fewer than 8 points the families cannot be distinguished.
    """
    if len(data.compute) < 8:
        return {}
    # The noise is less certain where errors are correlated or not reported; then the limits are higher.
    margin = AS_GOOD if correlated or not data.sd_known else 0.0
    R0_se = data.start_error(scale)
    if not data.sd_known:  # the residuals' size
        data, scale, R0_se = replace(data, sd=data.sd * scale, sd_known=True), 1.0, scale * R0_se
    R0_se = 0.0 if data.exact else max(R0_se, marginal.MIN_SD)
    data = replace(data, sd=np.maximum(data.sd, marginal.MIN_SD), R0_se=R0_se)
    noises = marginal.noise_models(data, weight, marginal.FEW_CORRELATIONS)
    e = evidence(data, noises, sigmoids(data))
    usual = replace(e, log=e.log + margin, peak=e.peak + margin)
    shapes = [*_families(data, noises, usual, draws), *_additions(data, noises, usual, max(scale, 1.0))]
    if not shapes:
        return {}
    better, _, text = max(shapes)
    return {"not-sigmoid" if better else "other-shape": text}


def _families(
    data: marginal.Data, noises: Sequence[marginal.Noise], usual: Evidence, draws: Draws
) -> Iterator[Shape]:
    """Each family that is better, or as good with another end."""
    last = float(data.compute[-1])
    low, high = np.quantile(draws.reward(EXTRAPOLATION * last), [0.05, 0.95])
    for family in other_families(data):
        e = evidence(data, noises, family)
        better = e.peak > usual.peak + MIN_BETTER
        as_good = e.log > usual.log + AS_GOOD and e.peak > usual.peak - AS_GOOD
        if family.name == LOGISTIC:  # seen to its end it is like a sigmoid
            as_good = e.log > usual.log and e.curve[2] > MIN_MIDDLE * last
        end = min(float(family.reward(EXTRAPOLATION * last, *e.curve)), 1.0)
        if better or (as_good and data.R0 is not None and not low <= end <= high):
            says = f"ends at {e.curve[1]:.2f}" if family.has_end else "has no ceiling"
            compared = "better than" if better else "as well as"
            yield better, e.log, f"{family.name} describes the points {compared} a sigmoid and {says}"


def _additions(
    data: marginal.Data, noises: Sequence[marginal.Noise], usual: Evidence, sigma: float
) -> Iterator[Shape]:
    """Each addition to the sigmoid that makes it better."""
    c, last, family = data.compute, float(data.compute[-1]), sigmoids(data)
    rise = float(data.reward.max()) - (float(data.reward.min()) if data.R0 is None else data.R0)

    def likeliest(terms: Sequence[Array]) -> tuple[Evidence, int]:
        directions = [data.prepend_R0(h * rise / sigma, 0.0) for h in terms]
        each = [evidence(data, [noise.plus(h) for noise in noises], family) for h in directions]
        k = int(np.argmax([e.peak for e in each]))
        return each[k], k

    changes = [CHANGE_SHARE * np.clip((c / last - x) / (1 - x), 0, None) for x in CHANGES]
    e, k = likeliest(changes)
    if e.peak > usual.peak + MIN_BETTER:
        away = (data.reward - np.minimum(family.reward(c, *e.curve), 1)) @ changes[k]
        moves = "falls below" if away < 0 else "rises above"
        part = f"the last {1 - CHANGES[k]:.0%} of the compute"
        yield True, e.log, f"in {part} the reward {moves} the sigmoid of the rest"
    stages = [STAGE_SHARE * fraction_gained(c, 2.0, x) for x in np.geomspace(c[0] / 4, last, STAGES)]
    e, _ = likeliest(stages)
    if e.peak > usual.peak + math.log(STAGES):  # the best of so many places is by chance as much likelier
        yield True, e.log, "the reward rises in two stages"


def evidence(data: marginal.Data, noises: Sequence[marginal.Noise], family: Family) -> Evidence:
    """The evidence of a family, and its most likely curve."""
    integrated = integrate(data, noises, family)
    model, k = divmod(int(integrated.log_weight.argmax()), integrated.log_weight.shape[1])
    cells = integrated.cells[model]
    sse = marginal.NOISE_PRIOR_POINTS + max(float(cells.fit.sse[k]), 0.0)
    ends = float(cells.fit.R0[k]), float(np.clip(cells.fit.A[k], data.lowest_A, 1))
    return Evidence(
        integrated.log_evidence, noises[model].log_prior - 0.5 * cells.dof * math.log(sse),
        (*ends, *(float(x[k, 0]) for x in integrated.theta)),
    )  # fmt: skip
