"""What earlier runs of the same kind say of a new one: `--like`.

The beginning of a run leaves open which way it will bend. Finished runs of the same kind show it: which law
they follow, how steep it is (B or p) and whether they start with a transient. Each of these is a random
effect: its mean and its spread over recipes are estimated, and the new run's prior is what a run of another
recipe would have. Seeds of one recipe say much the same, so that together they count as one run.

All laws can be wrong in the same way. So each earlier run is also forecast from its beginning, as the new run
will be, with what the others say, and its end tells how far off such a forecast is, in log odds per e-fold of
compute. The mean of that over runs corrects the forecast, its spread beyond what the forecasts themselves
allow for widens it: both grow with how far ahead it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean

import numpy as np
from numpy.typing import NDArray
from scipy.special import logit, softmax

from trainer.config import ConfigError
from trainer.scaling.curve.average import DEFAULT, LawPrior, Mixture, Prior, average, mixture
from trainer.scaling.curve.fit import MIN_FORECAST
from trainer.scaling.curve.points import averaged, checked
from trainer.scaling.curve.sigmoid import Curve, EvalPoint
from trainer.scaling.random_effects import effects, mixture_moments

Array = NDArray[np.float64]

MIN_LEARNED = 2 * MIN_FORECAST  # evaluations beyond R0 of a run from which something is learned
SEEN_SHARE = 0.5  # of their compute, from which finished runs are forecast; the unit of T, too
ANY_B = (0.5, 1.0)  # of log B, before any run
NO_DRIFT = (0.0, 0.15)  # before any run: forecasts are right on average, to so much
LIKELY = 0.02  # probability from which a law says something of its shape
EXTREME = 0.003  # rewards nearer to 0 or 1 are taken for these: their odds are hardly known
SPREADS, USUAL_SPREAD = np.geomspace(0.03, 1.0, 15), 0.3  # between runs: log-uniform times a half-normal


@dataclass(frozen=True, slots=True, eq=False)
class Past:
    """A finished run, and what it says."""

    group: str  # runs that say the same, such as seeds of one recipe
    curve: Curve
    laws: tuple[float, ...]  # probabilities, in the order of Prior.laws
    shapes: tuple[tuple[float, float], ...]  # mean and sd of log B or log p under each law
    transients: tuple[float, ...]  # probability of each of the prior's


@dataclass(frozen=True, slots=True)
class Earlier:
    """Finished runs of one kind."""

    runs: tuple[Past, ...]
    prior: Prior  # without them
    unit: str  # of compute

    def groups(self) -> list[list[Past]]:
        """The runs of each group, which count as one."""
        names = dict.fromkeys(past.group for past in self.runs)
        return [[past for past in self.runs if past.group == name] for name in names]

    def without(self, curve: Curve) -> Earlier:
        """Without the groups that hold this run, a part of it, or a run that it is a part of."""
        points = set(curve.points)
        same = {past.group for past in self.runs if _is_part(points, set(past.curve.points))}
        return replace(self, runs=tuple(past for past in self.runs if past.group not in same))

    def without_run(self, run: Past) -> Earlier:
        """Without its group; if there is no other one, without the run alone."""
        others = tuple(past for past in self.runs if past.group != run.group)
        return replace(self, runs=others or tuple(past for past in self.runs if past is not run))


def _is_part(one: set[EvalPoint], other: set[EvalPoint]) -> bool:
    """Whether all points of the shorter are in the longer."""
    return bool(one) and len(one & other) == min(len(one), len(other))


def learn(groups: Mapping[str, Sequence[Curve]], seen: float = SEEN_SHARE) -> Earlier:
    """What finished runs say, by recipe or another group. ConfigError: too few evaluations, two units.

    `seen`: the share of their compute from which runs will be forecast at most, the unit of transients.
    """
    curves = [(group, curve) for group, runs in groups.items() for curve in runs]
    if not curves:
        raise ConfigError("--like: there are no runs; expected one or more that have ended")
    for _, curve in curves:
        if curve.R0 is None or len(curve.points) < MIN_LEARNED:
            raise ConfigError(
                f"--like {curve.name}: it has {len(curve.points)} evaluations beyond R0, R0 "
                f"{'unknown' if curve.R0 is None else 'known'}; expected R0 and at least {MIN_LEARNED}"
            )
    if len(units := {curve.unit for _, curve in curves}) > 1:
        raise ConfigError(f"--like: compute is in {' and '.join(sorted(units))}; expected one unit")
    unit = seen * float(np.median([curve.points[-1].compute for _, curve in curves]))
    sigmoid, stretched, logistic, solved = (replace(law, shape=None) for law in DEFAULT.laws)
    prior = Prior(sigmoid, stretched, logistic, solved, DEFAULT.transients, unit)  # what a run itself says
    runs = (_past(group, curve, mixture(averaged(checked(curve)), prior), prior) for group, curve in curves)
    return Earlier(tuple(runs), replace(DEFAULT, unit=unit), units.pop())


def prior_after(earlier: Earlier, run: Curve) -> Prior:
    """What to expect of a run, from the earlier ones that are not its own. ConfigError: another unit."""
    if run.unit != earlier.unit:
        raise ConfigError(
            f"{run.name}: its compute is in {run.unit}, that of --like in {earlier.unit}; expected one unit"
        )
    others = earlier.without(run)
    if not others.runs or not run.points:
        return earlier.prior
    last = run.points[-1].compute
    errors = [[_error(others, past, _cut(past, last)) for past in group] for group in others.groups()]
    known = [[error for error in group if error is not None] for group in errors]
    return replace(prior_of_kind(others), drift=_random_effect(known, NO_DRIFT) if any(known) else NO_DRIFT)


def describe_prior(prior: Prior, earlier: Earlier) -> str:
    """What the earlier runs say, as sentences."""
    groups, count = len({past.group for past in earlier.runs}), len(earlier.runs)
    laws = ("a sigmoid", "a stretched approach", "a logistic of C^p", "a logistic of C^p to 1")
    law, name = max(zip(prior.laws, laws, strict=True), key=lambda pair: pair[0].probability)
    shape = ""
    if law.shape:
        mean, sd = law.shape
        low, high = math.exp(mean - 1.645 * sd), math.exp(mean + 1.645 * sd)
        shape = f", {'B' if law is prior.sigmoid else 'p'} {math.exp(mean):.2f} ({low:.2f} to {high:.2f})"
    mean, sd = prior.drift
    if not count:
        return "All runs of --like are of this run's own recipe: nothing was learned from them."
    off = f"Such forecasts are off by {mean:+.2f} ± {sd:.2f} in log odds per e-fold of compute, by theirs"
    if prior.drift == NO_DRIFT:
        off = f"How far off such forecasts are is assumed (± {sd:.2f} in log odds per e-fold of compute)"
    return (
        f"From {count} earlier runs of {groups} recipes: such a run follows {name} with {law.probability:.0%}"
        f"{shape}. {off}, which is allowed for."
    )


def _past(group: str, curve: Curve, found: Mixture, prior: Prior) -> Past:
    laws, shapes, models = [], [], np.zeros(len(found.base) * (1 + len(found.directions)))
    for law in range(len(prior.laws)):
        theta, weight = [np.zeros(0)], [np.zeros(0)]
        for component in found.components:
            if component.law == law:
                p = component.probability * softmax(component.integrated.log_weight, axis=None)
                theta.append(np.log(component.integrated.theta[0][:, 0]))
                weight.append(p.sum(0))
                models += p.sum(1)
        x, w = np.concatenate(theta), np.concatenate(weight)
        mean = float(w @ x / max(w.sum(), 1e-300))
        laws.append(float(w.sum()))
        shapes.append((mean, math.sqrt(float(w @ (x - mean) ** 2 / max(w.sum(), 1e-300)))))
    by_T = {
        T: float(p)
        for (T, _), p in zip(found.directions, models.reshape(-1, len(found.base)).sum(1)[1:], strict=True)
    }
    transients = tuple(by_T.get(t.T * (prior.unit or 0), t.probability) for t in prior.transients)
    return Past(group, curve, tuple(laws), tuple(shapes), transients)


@lru_cache(maxsize=256)
def prior_of_kind(earlier: Earlier) -> Prior:
    """The prior that another run of the kind has, without a correction of its forecast."""
    groups = earlier.groups()

    def share(before: float, found: Sequence[Sequence[float]]) -> float:
        return (before + sum(map(fmean, found))) / (1 + len(groups))  # the prior counts as one recipe

    laws = []
    for i, law in enumerate(earlier.prior.laws):
        known = [[past.shapes[i] for past in runs if past.laws[i] > LIKELY] for runs in groups]
        shape = _random_effect(known, law.shape or ANY_B) if any(known) else law.shape
        found = [[past.laws[i] for past in runs] for runs in groups]
        laws.append(LawPrior(share(law.probability, found), shape))
    transients = tuple(
        replace(t, probability=share(t.probability, [[p.transients[i] for p in runs] for runs in groups]))
        for i, t in enumerate(earlier.prior.transients)
    )
    sigmoid, stretched, logistic, solved = laws
    return Prior(sigmoid, stretched, logistic, solved, transients, earlier.prior.unit)


def _random_effect(
    known: Sequence[Sequence[tuple[float, float]]], before: tuple[float, float]
) -> tuple[float, float]:
    """Mean and sd of another group's value, from means and sds in some groups; `before`: of the mean."""
    each = [_as_one(group) for group in known if group]
    by_spread = effects(each, SPREADS, known=before)
    return mixture_moments(by_spread, SPREADS, -0.5 * (SPREADS / USUAL_SPREAD) ** 2)


def _as_one(group: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Mean and variance of a run of a group: its runs share most of their error: more do not reduce it."""
    mean, sd = np.array(group).T
    return float(mean.mean()), float((sd**2).mean())


def _cut(past: Past, last: float) -> int:
    """How many points of an earlier run to forecast it from, for a run that is known up to `last`."""
    points = past.curve.points
    return sum(p.compute <= min(last, SEEN_SHARE * points[-1].compute) for p in points)


@lru_cache(maxsize=4096)
def _error(earlier: Earlier, past: Past, points: int) -> tuple[float, float] | None:
    """The error of an earlier run's forecast from so many points, with what the others say; and its sd.

    In log odds, for each e-fold of compute. None: there are too few points, or no other run.
    """
    if points < MIN_FORECAST:
        return None
    others = earlier.without_run(past)
    if not others.runs:  # its forecast would know nothing of such runs, as that of the new run does
        return None
    prior = prior_of_kind(others)
    seen, end = past.curve.points[:points], past.curve.points[-1]
    draws = average(averaged(checked(replace(past.curve, points=seen))), prior).reward(end.compute)
    odds = logit(np.clip(draws, EXTREME, 1 - EXTREME))
    measured = min(max(end.pass_rate, EXTREME), 1 - EXTREME)
    ahead = math.log(end.compute / seen[-1].compute)
    measured_sd = end.pass_rate_se / (measured * (1 - measured))
    error = float(logit(measured) - np.median(odds))
    return error / ahead, math.hypot(float(odds.std()), measured_sd) / ahead
