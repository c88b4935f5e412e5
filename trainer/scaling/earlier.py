"""Priors for a new run, learned from earlier runs of the same kind: `--like`.

The beginning of a run leaves open which way it will bend. Finished runs of the same kind show it: which law
they follow, how steep it is (B or p) and whether they start with a transient. Each of these is a random
effect: its mean and its spread over recipes are estimated, and the new run's prior is what a run of another
recipe would have. Seeds of one recipe say much the same, so that together they count as one run. A run that
has fallen from its peak says nothing, unless all have: no law falls, and its error would widen each forecast.

All laws can be wrong in the same way. So each earlier run is also forecast from its beginning, as the new run
will be, with what the others say, and its end tells how far off such a forecast is, in log odds per e-fold of
compute. The mean of that over runs corrects the forecast, its spread beyond what the forecasts themselves
allow for widens it: both grow with how far ahead it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from scipy.special import logit, softmax

from trainer.config import ConfigError
from trainer.scaling.curve.average import DEFAULT, EXTREME, LAWS, LawPrior, Prior, average, mixture
from trainer.scaling.curve.axis import on_axis
from trainer.scaling.curve.flags import has_fallen
from trainer.scaling.curve.points import MIN_FORECAST, averaged, checked
from trainer.scaling.curve.sigmoid import Curve
from trainer.scaling.layout import grouped
from trainer.scaling.random_effects import effects, mixture_moments

MIN_LEARNED = 2 * MIN_FORECAST  # evaluations beyond R0 of a run from which something is learned
SEEN_SHARE = 0.5  # of their compute, from which finished runs are forecast; the unit of T, too
ANY_B = (0.5, 1.0)  # of log B, before any run
NO_DRIFT = (0.0, 0.15)  # before any run: forecasts are right on average, to so much
LIKELY = 0.02  # probability from which a law says something of its shape; without it forecasts are worse
SPREADS, USUAL_SPREAD = np.geomspace(0.03, 1.0, 15), 0.3  # between runs: log-uniform times a half-normal


@dataclass(frozen=True, slots=True, eq=False)
class Past:
    """A finished run, and what it says."""

    group: str  # runs that say the same, such as seeds of one recipe
    curve: Curve
    says: Prior  # probabilities of the laws and transients, mean and sd of log B or log p under each law
    fallen: bool = False  # from its peak: no run is forecast to do that, so nothing is learned from it


@dataclass(frozen=True, slots=True)
class Earlier:
    """Finished runs of one kind."""

    runs: tuple[Past, ...]
    prior: Prior  # without them
    unit: str  # of compute
    all_fallen: bool = False  # then they count all the same

    def groups(self) -> list[list[Past]]:
        """The runs of each group, which count as one, without those that have fallen."""
        return list(grouped((past.group, past) for past in self.runs if not past.fallen).values())

    def without(self, curve: Curve) -> Earlier:
        """The runs without the groups that hold this run, a part of it, or a run that it is a part of."""
        points, same = set(curve.points), set[str]()
        for past in self.runs:
            other = set(past.curve.points)
            if points and len(points & other) == min(len(points), len(other)):
                same.add(past.group)
        return replace(self, runs=tuple(past for past in self.runs if past.group not in same))

    def without_run(self, run: Past) -> Earlier:
        """The runs without this one's group; if there is no other group, without the run alone."""
        others = tuple(past for past in self.runs if past.group != run.group and not past.fallen)
        return replace(self, runs=others or tuple(past for past in self.runs if past is not run))


def learn(groups: Mapping[str, Sequence[Curve]], seen: float = SEEN_SHARE) -> Earlier:
    """Learn from finished runs, by recipe or another group. ConfigError: too few evaluations, two units.

    `seen`: the share of their compute from which runs will be forecast at most, the unit of transients.
    """
    curves = [(group, curve) for group, runs in groups.items() for curve in runs]
    if not curves:
        raise ConfigError("--like: there are no runs; expected one or more that have ended")
    for _, curve in curves:
        if len(curve.points) < MIN_LEARNED:
            count = f"{len(curve.points)} evaluations beyond R0"
            raise ConfigError(f"--like {curve.name}: it has {count}; expected at least {MIN_LEARNED}")
    if len(units := {curve.unit for _, curve in curves}) > 1:
        raise ConfigError(f"--like: compute is in {' and '.join(sorted(units))}; expected one unit")
    unit = seen * float(np.median([curve.points[-1].compute for _, curve in curves]))
    prior, checks = replace(DEFAULT, unit=unit), [checked(curve) for _, curve in curves]
    fallen = [has_fallen(data.reward, data.sd) for data in checks]
    counted = [fell and not all(fallen) for fell in fallen]
    says = [evidence(curve, prior) for _, curve in curves]
    runs = (Past(g, c, said, fell) for (g, c), said, fell in zip(curves, says, counted, strict=True))
    return Earlier(tuple(runs), prior, units.pop(), all(fallen))


def prior_after(earlier: Earlier, run: Curve) -> Prior:
    """The prior of a run, by the earlier ones of other recipes. ConfigError: another unit."""
    if run.unit != earlier.unit:
        raise ConfigError(
            f"{run.name}: its compute is in {run.unit}, that of --like in {earlier.unit}; expected one unit"
        )
    others = earlier.without(run)
    if not others.groups() or not run.points:
        return earlier.prior
    last = run.points[-1].compute
    errors = [[_error(others, past, _cut(past, last)) for past in group] for group in others.groups()]
    known = [[error for error in group if error is not None] for group in errors]
    return replace(prior_of_kind(others), drift=_random_effect(known, NO_DRIFT) if any(known) else NO_DRIFT)


def describe_prior(prior: Prior, earlier: Earlier) -> str:
    """The information in the earlier runs, as sentences."""
    groups, count = len(earlier.groups()), sum(map(len, earlier.groups()))
    law, name = max(zip(prior.laws, LAWS, strict=True), key=lambda pair: pair[0].probability)
    shape = ""
    if law.shape:
        mean, sd = law.shape
        low, high = math.exp(mean - 1.645 * sd), math.exp(mean + 1.645 * sd)
        shape = f", {'B' if name == LAWS[0] else 'p'} {math.exp(mean):.2f} ({low:.2f} to {high:.2f})"
    mean, sd = prior.drift
    fallen = ", ".join(past.curve.name for past in earlier.runs if past.fallen)
    about = f"Nothing is learned from {fallen}: the reward has fallen from its peak." if fallen else ""
    if not count:
        return about or "All runs of --like are of this run's own recipe: nothing was learned from them."
    if earlier.all_fallen:
        about = "All of them have fallen from their peak, and count all the same."
    off = f"Such forecasts are off by {mean:+.2f} ± {sd:.2f} in log odds per e-fold of compute, by theirs"
    if prior.drift == NO_DRIFT:
        off = f"How far off such forecasts are is assumed (± {sd:.2f} in log odds per e-fold of compute)"
    return (
        f"From {count} earlier runs of {groups} recipes: such a run follows {name} with {law.probability:.0%}"
        f"{shape}. {off}, which is allowed for. {about}"
    ).strip()


def evidence(curve: Curve, before: Prior) -> Prior:
    """The evidence of one run on the laws, with flat priors of their shapes, and on the transients."""
    flat = replace(before, laws=tuple(replace(law, shape=None) for law in before.laws))
    data, _ = on_axis(averaged(checked(curve)))
    mixed, laws = mixture(data, flat), []
    models = np.zeros(len(mixed.noises))
    for law in range(len(LAWS)):
        parts = [part for part in mixed.components if part.family.law == law]
        weights = [part.probability * softmax(part.log_weight, axis=None) for part in parts]
        models += np.sum([p.sum(1) for p in weights], axis=0)
        w = np.concatenate([p.sum(0) for p in weights])
        x = np.log(np.concatenate([part.theta[0][:, 0] for part in parts]))
        share = w / max(w.sum(), 1e-300)
        mean = float(share @ x)
        laws.append(LawPrior(float(w.sum()), (mean, math.sqrt(float(share @ (x - mean) ** 2)))))
    probabilities = models.reshape(len(mixed.directions), -1).sum(1).tolist()
    by_T = dict(zip((T for T, _ in mixed.directions), probabilities, strict=True))
    transients = tuple(
        replace(t, probability=by_T.get(t.T * (before.unit or 0), t.probability)) for t in before.transients
    )
    return replace(before, laws=tuple(laws), transients=transients)


@lru_cache(maxsize=256)
def prior_of_kind(earlier: Earlier) -> Prior:
    """The prior that another run of the kind has, without a correction of its forecast."""
    groups, before = [[past.says for past in runs] for runs in earlier.groups()], earlier.prior

    def shares(probabilities: Callable[[Prior], list[float]]) -> list[float]:
        """Means over the recipes, of which the prior counts as one."""
        means = [np.mean([probabilities(says) for says in runs], axis=0) for runs in groups]
        return list(np.mean([probabilities(before), *means], axis=0).tolist())

    laws, of_laws = [], shares(lambda prior: [law.probability for law in prior.laws])
    for i, law in enumerate(before.laws):
        said = [[says.laws[i] for says in runs] for runs in groups]
        shapes = [[one.shape for one in runs if one.shape and one.probability > LIKELY] for runs in said]
        shape = _random_effect(shapes, law.shape or ANY_B) if any(shapes) else law.shape
        laws.append(LawPrior(of_laws[i], shape))
    of_transients = shares(lambda prior: [t.probability for t in prior.transients])
    transients = (replace(t, probability=p) for t, p in zip(before.transients, of_transients, strict=True))
    prior = replace(before, laws=tuple(laws), transients=tuple(transients))
    less = 1 / (1 + len(groups))  # they say themselves how runs like them go on
    return replace(prior, gain=before.gain * less, gain_error=before.gain_error * less)


def _random_effect(
    known: Sequence[Sequence[tuple[float, float]]], before: tuple[float, float]
) -> tuple[float, float]:
    """Mean and sd of another group's value, from means and sds in some groups; `before`: of the mean."""
    # The runs of a group share most of their error: more of them do not reduce it, so it has that of one.
    units = [(mean.mean(), (sd**2).mean()) for mean, sd in (np.array(group).T for group in known if group)]
    by_spread = effects(units, SPREADS, known=before)
    return mixture_moments(by_spread, SPREADS, -0.5 * (SPREADS / USUAL_SPREAD) ** 2)


def _cut(past: Past, last: float) -> int:
    """The number of points from which to forecast an earlier run, for a run that is known up to `last`."""
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
    if not others.groups():  # its forecast would know nothing of such runs, as that of the new run does
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
