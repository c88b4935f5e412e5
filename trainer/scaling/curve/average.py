"""The forecast of a run, averaged over the laws that its data allow.

The early part of a real curve can often be described by a sigmoid and by other laws alike, which then go
different ways. So a forecast is an average over models (Hoeting et al. 1999): each law has a prior
probability, the data change it by the law's evidence, and draws are taken from each in proportion. In
simulated sigmoids the sigmoid gets most of it, and the intervals are somewhat wider than its own.

Each law may also start with a transient x e^(−C/T): what a model learns in its first steps, such as the
format of the answers, does not follow the curve of the rest.

The prior is DEFAULT, chosen on the runs with seed 0 of docs/study.md, or what earlier runs say (earlier.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, logit, softmax

from trainer.scaling.curve.families import (
    Axis,
    Family,
    Integrated,
    integrate,
    logistic_of_power,
    reach,
    robust,
    sigmoids,
)
from trainer.scaling.curve.marginal import FEW_CORRELATIONS, Data, Noise, noise_models
from trainer.scaling.curve.sigmoid import DRAWS, Draws, add_axes

Array = NDArray[np.float64]

MIN_GAIN = 0.01  # a gain that is worth compute: half of the paper's margin between two ceilings
FURTHEST = 10.0  # multiple of the last compute up to which a curve is carried on
P_RANGE = (0.3, 3.0)  # of the laws of C^p
TRANSIENT_SD = 0.14  # of x, in rewards
SOUGHT = np.geomspace(1e-3, 1e6, 400)  # multiples of the last compute at which a reward is sought


@dataclass(frozen=True, slots=True)
class LawPrior:
    """A law's probability, and the normal prior (mean, sd) of its log B or log p; None: a flat one."""

    probability: float
    shape: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Transient:
    """Transients that fade with e^(−C/T), and their probability."""

    T: float  # in units of the last compute that is fitted; of the prior's `unit`, if that is set
    probability: float


@dataclass(frozen=True, slots=True)
class Prior:
    """The beliefs about a run before it is seen."""

    laws: tuple[LawPrior, ...]  # in the order of LAWS
    transients: tuple[Transient, ...]
    unit: float | None = None  # compute in which T is given
    drift: tuple[float, float] = (
        0.0,
        0.0,
    )  # mean and sd of the forecast's error in log odds, per e-fold of C


# The last has a ceiling of 1: every prompt can be learned.
LAWS = ("a sigmoid", "a stretched approach", "a logistic of C^p", "a logistic of C^p to 1")
NEAR_1 = (0.0, 0.35)  # of log p: most runs are near an exponential or a logistic in compute
DEFAULT = Prior(
    (LawPrior(0.4, None), LawPrior(0.1, NEAR_1), LawPrior(0.25, NEAR_1), LawPrior(0.25, NEAR_1)),
    (Transient(0.06, 0.25), Transient(0.2, 0.25)),
)


@dataclass(frozen=True, slots=True, eq=False)
class LawDraws:
    """Equally likely curves of one law; (n,) each."""

    family: Family
    R0: Array
    A: Array
    theta: tuple[Array, ...]  # parameters of s
    x: Array  # size of the transient
    T: Array

    def reward(self, compute: ArrayLike) -> Array:
        """R(C) of each draw: (n,) for a number, (n, m) for m of them."""
        c = np.asarray(compute, np.float64)
        R0, A, x, T, *theta = add_axes(c.ndim, self.R0, self.A, self.x, self.T, *self.theta)
        s = self.family.fraction(c, *theta)
        return R0 + (A - R0) * s + x * np.exp(-c / T)


@dataclass(frozen=True, slots=True, eq=False)
class Average:
    """Draws of all laws, each as often as it is probable."""

    parts: tuple[LawDraws | Draws, ...]
    sigmoid_prob: float  # probability that the run follows a sigmoid
    last: float  # the largest compute of the data
    drift: Array  # (n,) of each draw: log odds per e-fold of compute beyond the data

    def reward(self, compute: ArrayLike) -> Array:
        """R(C) of each draw: (n,) for a number, (n, m) for m of them."""
        rewards = np.clip(np.concatenate([part.reward(compute) for part in self.parts]), 0, 1)
        if not self.drift.any():
            return rewards
        ahead = np.log(np.maximum(np.asarray(compute, np.float64) / self.last, 1))
        return expit(logit(rewards) + np.multiply.outer(self.drift, ahead))

    @classmethod
    def of_sigmoids(cls, draws: Draws, last: float) -> Average:
        """The draws of the sigmoid alone."""
        return cls((draws,), math.nan, last, np.zeros(len(draws.A)))

    def compute_for(self, reward: float) -> Array:
        """C at which each draw first reaches `reward`: 0 if it starts there, infinite if it never does."""
        compute = self.last * SOUGHT
        first = first_reached(compute, self.reward(compute), reward)
        return np.where(first > compute[0], first, np.where(self.reward(0.0) >= reward, 0.0, first))


def first_reached(compute: Array, rewards: Array, reward: float) -> Array:
    """(n,): where each row of `rewards`, (n, m) at `compute`, first is at `reward`; infinite if nowhere."""
    reached = rewards >= reward
    k, row = reached.argmax(1), np.arange(len(rewards))
    before = np.maximum(k - 1, 0)
    rise = rewards[row, k] - rewards[row, before]
    share = np.where(rise > 0, (reward - rewards[row, before]) / np.where(rise > 0, rise, 1), 1)
    log_c = np.log(compute)
    first = np.exp(log_c[before] + share * (log_c[k] - log_c[before]))
    return np.where(reached.any(1), np.where(k > 0, first, compute[0]), np.inf)


@dataclass(frozen=True, slots=True, eq=False)
class Component:
    """A family, integrated, with its share of the probability."""

    law: int  # its number in LAWS
    integrated: Integrated
    probability: float


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """All laws, integrated over their parameters, the noise and the transient."""

    data: Data
    components: tuple[Component, ...]
    base: tuple[Noise, ...]  # without a transient; the integrals have these, then those with each transient
    directions: tuple[tuple[float, Array], ...]  # T, and e^(−C/T) at R0 and the points, times `size`
    size: float  # TRANSIENT_SD in units of the noise


def mixture(data: Data, prior: Prior = DEFAULT) -> Mixture:
    """The probability of each law, given the data. An R0 that is given exactly has no transient."""
    weight, overdispersion = robust(data)
    data = replace(data, R0_se=data.start_error(overdispersion))
    base = tuple(noise_models(data, weight, FEW_CORRELATIONS))
    unit = prior.unit or float(data.compute[-1])
    seen = [t for t in prior.transients if t.T * unit >= reach(data)[0]]
    transients = [] if data.exact else seen
    none = 1 - sum(t.probability for t in transients)
    noises = [replace(noise, log_prior=noise.log_prior + math.log(none)) for noise in base]
    size = TRANSIENT_SD / (max(overdispersion, 1.0) if data.sd_known else overdispersion)
    directions = []
    for transient in transients:
        T = transient.T * unit
        h = size * data.prepend_R0(np.exp(-data.compute / T), 1.0)
        directions.append((T, h))
        extra = math.log(transient.probability)
        noises += [replace(n, log_prior=n.log_prior + extra) for n in (noise.plus(h) for noise in base)]
    laws, probabilities, families = zip(*_families(data, prior), strict=True)
    integrals = [integrate(data, noises, family) for family in families]
    p = softmax(np.log(probabilities) + [x.log_evidence for x in integrals]).tolist()
    return Mixture(data, tuple(map(Component, laws, integrals, p)), base, tuple(directions), size)


def average(data: Data, prior: Prior = DEFAULT, seed: int = 0) -> Average:
    """The laws' draws; the same for the same data, prior and seed."""
    mixed = mixture(data, prior)
    rng = np.random.default_rng(seed)
    shares = np.cumsum([component.probability for component in mixed.components])
    counts = np.diff(np.rint(DRAWS * np.append(0.0, shares / shares[-1])).astype(int))
    parts = tuple(
        draw(mixed, component.integrated, int(count), rng)
        for component, count in zip(mixed.components, counts, strict=True)
        if count
    )
    mean, sd = prior.drift
    drift = mean + sd * rng.standard_normal(DRAWS)
    sigmoid_prob = sum(component.probability for component in mixed.components if component.law == 0)
    return Average(parts, sigmoid_prob, float(data.compute[-1]), drift)


def _families(data: Data, prior: Prior) -> Iterator[tuple[int, float, Family]]:
    """The number of the law, its prior probability, and the family.

    The logistics' q takes three values from A / R0 − 1 for the largest reward to that for a ceiling of 1: a q
    below .3 is the stretched approach, and an R0 below .02 makes no difference to the curve. With a ceiling
    of 1, where the curve starts is R0 or .12 above it, after a transient.
    """
    sigmoid, *others = prior.laws
    yield 0, sigmoid.probability, sigmoids(data, prior=sigmoid.shape)
    R0 = max(float(data.reward[0]) if data.R0 is None else data.R0, 0.02)
    low = max(float(data.reward.max()) / R0 - 1, 0.3)
    free = np.geomspace(low, max(1 / R0 - 1, low), 3).tolist()
    to_1 = [1 / min(R0 + start, 0.95) - 1 for start in (0.0, 0.12)]
    for law, (its, values) in enumerate(zip(others, ([0.0], free, to_1), strict=True), start=1):
        axes, ceiling = (
            (Axis(*P_RANGE, 11, normal=its.shape), Axis(*reach(data), 21)),
            1.0 if law == 3 else None,
        )
        for q in values:
            family = Family(f"q = {q:.3g}", logistic_of_power(q), axes, ceiling=ceiling)
            yield law, its.probability / len(values), family


def draw(mixed: Mixture, law: Integrated, count: int, rng: np.random.Generator) -> LawDraws:
    """Curves of a law, in proportion to their probability; the transient's size is the most likely one."""
    data, bases = mixed.data, len(mixed.base)
    model, (R0, A, *theta) = law.draw(data, count, rng)
    x, T = np.zeros(count), np.ones(count)
    s = law.family.fraction(data.prepend_R0(data.compute, 0.0), *(v[:, None] for v in theta))
    rest = data.prepend_R0(data.reward, data.R0 or 0.0) - R0[:, None] * (1 - s) - A[:, None] * s
    for which in np.unique(model[model >= bases]):
        (T_here, h), base = mixed.directions[which // bases - 1], mixed.base[which % bases]
        here, u = model == which, base.whiten @ h
        T[here] = T_here
        x[here] = mixed.size * (rest[here] @ base.whiten.T @ u) / (1 + u @ u)
    return LawDraws(law.family, R0, A, tuple(theta), x, T)
