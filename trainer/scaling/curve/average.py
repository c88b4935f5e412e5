"""The draws of a run: of the sigmoid alone (`posterior`), and averaged over laws (`average`), its forecast.

The early part of a real curve can often be described by a sigmoid and by other laws alike, which then go
different ways. So a forecast is an average over models (Hoeting et al. 1999): each law has a prior
probability, the data change it by the law's evidence, and draws are taken from each in proportion. In
simulated sigmoids the sigmoid gets most of it, and the intervals are somewhat wider than its own.

Each law may also start with a transient x e^(−C/T): what a model learns in its first steps, such as the
format of the answers, does not follow the curve of the rest.

Where the data leave open how much is still gained, runs in general say it: draws are weighted by
exp(a d − d² / 2 s²), where d is what they gain from the last compute to three times as much, in log odds per
e-fold of compute. Runs also gain more or less than all laws say, unless they follow a sigmoid: the draws' log
odds are off by z e (1 − p) v x the median gain, where z is normal, p the probability of the sigmoid and v the
pace, the median gain of the last doubling of the compute in log odds: a run that gains fast can level off
soon. a and e are learned from finished runs of several sources: population.json says which, and
`python -m bench validation.sources` makes it.

The laws of the prior DEFAULT were chosen on the runs with seed 0 of docs/study.md. Earlier runs of the same
kind change it (earlier.py).
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, logit, softmax

from trainer.scaling.curve import families
from trainer.scaling.curve.axis import Axis, on_axis
from trainer.scaling.curve.marginal import CORRELATIONS, FEW_CORRELATIONS, Data, Noise, noise_models
from trainer.scaling.curve.sigmoid import DRAWS, Array, Draws, Sigmoid

# Of the sigmoid's B and C_mid; nats: with 8, a vague ceiling loses its upper tail
CELLS, KEEP_TAILS = (25, 41), 10.0
MIN_GAIN = 0.01  # a gain that is worth compute: half of the paper's margin between two ceilings
FURTHEST = 10.0  # multiple of the last compute up to which a curve is carried on
TRANSIENT_SD = 0.14  # of x, in rewards
GAIN_SPREAD, GAIN_REACH = 1.6, 3.0  # s of the weights above; the multiple of the last compute
EXTREME = 0.003  # rewards nearer to 0 or 1 are taken for these: their odds are hardly known
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
    # mean and sd of the forecast's error in log odds, per e-fold of C
    drift: tuple[float, float] = (0.0, 0.0)
    gain: float = 0.0  # a of the weights of draws; 0: they all count alike
    gain_error: float = 0.0  # e: sd of the error of a gain, as a share of it, at a pace of 1


# The last has a ceiling of 1: every prompt can be learned.
LAWS = ("a sigmoid", "a stretched approach", "a logistic of C^p", "a logistic of C^p to 1")
NEAR_1 = (0.0, 0.35)  # of log p: most runs are near an exponential or a logistic in compute
POPULATION = json.loads(Path(__file__).with_name("population.json").read_text())
DEFAULT = Prior(
    (LawPrior(0.4, None), LawPrior(0.1, NEAR_1), LawPrior(0.25, NEAR_1), LawPrior(0.25, NEAR_1)),
    (Transient(0.06, 0.25), Transient(0.2, 0.25)),
    gain=float(POPULATION["gain"]),
    gain_error=float(POPULATION["gain_error"]),
)


@dataclass(frozen=True, slots=True, eq=False)
class LawDraws:
    """Equally likely curves of one law; (n,) each."""

    family: families.Family
    R0: Array
    A: Array
    theta: tuple[Array, ...]  # parameters of s
    x: Array  # size of the transient
    T: Array

    def reward(self, compute: ArrayLike) -> Array:
        """R(C) of each draw: (n,) for a number, (n, m) for m of them."""
        c = np.asarray(compute, np.float64)[..., None]
        rewards = self.family.reward(c, self.R0, self.A, *self.theta) + self.x * np.exp(-c / self.T)
        return np.moveaxis(rewards, -1, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Average:
    """Draws of all laws, each as often as it is probable."""

    parts: tuple[LawDraws | Draws, ...]
    sigmoid_prob: float  # probability that the run follows a sigmoid
    last: float  # the largest compute of the data
    drift: Array  # (n,) of each draw: log odds per e-fold of compute beyond the data
    axis: Axis | None = None  # of work, where the curves are over that; None: they are over compute
    gain_error: ArrayLike = 0.0  # (n,) of each draw, as a share of the median gain ahead times the pace

    def reward(self, compute: ArrayLike) -> Array:
        """R(C) of each draw: (n,) for a number, (n, m) for m of them."""
        return self.axis.reward(self._on_axis, compute) if self.axis else self._on_axis(compute)

    def _on_axis(self, compute: ArrayLike) -> Array:
        rewards = self._of_laws(compute)
        if not (self.drift.any() or np.any(self.gain_error)):
            return rewards
        ahead = np.log(np.maximum(np.asarray(compute, np.float64) / self.last, 1))
        odds = logit(rewards)
        middle, (before, now) = _middle(odds), _middle(logit(self._of_laws([self.last / 2, self.last])))
        gain, pace = np.maximum(middle - now, 0), max(now - before, 0.0)
        error = np.multiply.outer(self.gain_error, pace * gain * (ahead > 0))
        odds = odds + error - (_middle(odds + error) - middle)  # an error of spread alone
        return expit(odds + np.multiply.outer(self.drift, ahead))

    def _of_laws(self, compute: ArrayLike) -> Array:
        return np.clip(np.concatenate([part.reward(compute) for part in self.parts]), 0, 1)

    def compute_for(self, reward: float) -> Array:
        """C at which each draw first reaches `reward`: 0 if it starts there, infinite if it never does."""
        compute = self.last * SOUGHT
        first = first_reached(compute, self.reward(compute), reward)
        return np.where(first > compute[0], first, np.where(self.reward(0.0) >= reward, 0.0, first))


def _middle(odds: Array) -> Array:
    """The median over draws of their log odds."""
    return np.clip(np.median(odds, axis=0), logit(EXTREME), -logit(EXTREME))


def gain_errors(e: float, sigmoid_prob: float) -> Array:
    """The error of each draw, (n,), as a share of gain times pace; the same every time."""
    return np.asarray(e * (1 - sigmoid_prob) * np.random.default_rng(1).standard_normal(DRAWS))


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
class Mixture:
    """All laws, integrated over their parameters, the noise and the transient."""

    data: Data
    components: tuple[families.Integrated, ...]
    noises: tuple[Noise, ...]  # of the integrals: as many with each of `directions`
    directions: tuple[tuple[float, Array], ...]  # T, and `size` e^(−C/T) at R0 and the points; first 0: none
    size: float  # TRANSIENT_SD in units of the noise


def mixture(data: Data, prior: Prior = DEFAULT) -> Mixture:
    """The probability of each law, given the data. An R0 that is given exactly has no transient."""
    weight, overdispersion, _ = families.robust(data)
    data = replace(data, R0_se=data.start_error(overdispersion))
    base = noise_models(data, weight, FEW_CORRELATIONS)
    unit = prior.unit or float(data.compute[-1])
    seen = [t for t in prior.transients if t.T * unit >= families.reach(data)[0]]
    transients = [] if data.exact else seen
    none = Transient(math.inf, 1 - sum(t.probability for t in transients))
    size = TRANSIENT_SD / (max(overdispersion, 1.0) if data.sd_known else overdispersion)
    noises, directions = list[Noise](), []
    for transient in (none, *transients):
        T, extra = transient.T * unit, math.log(transient.probability)
        h = size * data.prepend_R0(np.exp(-data.compute / T), 1.0) * (transient is not none)
        directions.append((T, h))
        noises += [replace(n, log_prior=n.log_prior + extra) for n in (noise.plus(h) for noise in base)]
    integrals = [families.integrate(data, noises, family) for family in _families(data, prior)]
    p = softmax([math.log(x.family.probability) + x.log_evidence for x in integrals]).tolist()
    components = tuple(replace(x, probability=share) for x, share in zip(integrals, p, strict=True))
    return Mixture(data, components, tuple(noises), tuple(directions), size)


def average(data: Data, prior: Prior = DEFAULT) -> Average:
    """The laws' draws; the same for the same data and prior."""
    data, axis = on_axis(data)
    mixed, last = mixture(data, prior), float(data.compute[-1])
    rng = np.random.default_rng(0)
    shares = np.cumsum([law.probability for law in mixed.components])
    total = 3 * DRAWS if prior.gain else DRAWS  # of which DRAWS are taken by their weights
    counts = np.diff(np.rint(total * np.append(0.0, shares / shares[-1])).astype(int)).tolist()
    parts = [draw(mixed, law, n, rng) for law, n in zip(mixed.components, counts, strict=True) if n]
    if prior.gain:
        parts = resampled(parts, gain_weights(parts, last, prior.gain))
    mean, sd = prior.drift
    drift = mean + sd * rng.standard_normal(DRAWS)
    sigmoids = sum(len(part.A) for part in parts if part.family.law == 0)
    p = sigmoids / DRAWS
    return Average(tuple(parts), p, last, drift, axis, gain_errors(prior.gain_error, p))


def gain_weights(parts: Iterable[LawDraws | Draws], last: float, a: float) -> Array:
    """The weight of each draw, (n,), by its gain from the `last` compute to three times as much."""
    rewards = np.concatenate([part.reward([last, GAIN_REACH * last]) for part in parts])
    d = np.diff(logit(np.clip(rewards, EXTREME, 1 - EXTREME)))[:, 0] / math.log(GAIN_REACH)
    return np.round(np.exp(a * d - 0.5 * (d / GAIN_SPREAD) ** 2), 6)  # the last bits choose no draws


def resampled(parts: Sequence[LawDraws], weight: Array) -> list[LawDraws]:
    """DRAWS of the draws, in proportion to their weights, (n,)."""
    sizes, total = np.array([len(part.A) for part in parts]), weight.cumsum()
    ends = sizes.cumsum()
    k = np.searchsorted(total, (np.arange(DRAWS) + 0.5) / DRAWS * total[-1])
    taken = [
        i - start for i, start in zip(np.split(k, np.searchsorted(k, ends[:-1])), ends - sizes, strict=True)
    ]
    return [
        LawDraws(part.family, part.R0[i], part.A[i], tuple(v[i] for v in part.theta), part.x[i], part.T[i])
        for part, i in zip(parts, taken, strict=True)
        if len(i)
    ]


def _families(data: Data, prior: Prior) -> Iterator[families.Family]:
    """The families of each law, with their prior probabilities.

    The logistics' q takes three values from A / R0 − 1 for the largest reward to that for a ceiling of 1: a q
    below .3 is the stretched approach, and an R0 below .02 makes no difference to the curve. With a ceiling
    of 1, where the curve starts is R0 or .12 above it, after a transient.
    """
    sigmoid, *others = prior.laws
    yield replace(families.sigmoids(data, prior=sigmoid.shape), probability=sigmoid.probability)
    R0 = max(float(data.reward[0]) if data.R0 is None else data.R0, 0.02)
    low = max(float(data.reward.max()) / R0 - 1, 0.3)
    free = np.geomspace(low, max(1 / R0 - 1, low), 3).tolist()
    to_1 = [1 / min(R0 + start, 0.95) - 1 for start in (0.0, 0.12)]
    qs, ceilings = ([0.0], free, to_1), (None, None, 1.0)
    for law, (its, values, ceiling) in enumerate(zip(others, qs, ceilings, strict=True), start=1):
        axes = (families.Axis(0.3, 3.0, 11, normal=its.shape), families.Axis(*families.reach(data), 21))
        for q in values:
            name, fraction, p = f"q = {q:.3g}", families.logistic_of_power(q), its.probability / len(values)
            yield families.Family(name, fraction, axes, ceiling=ceiling, law=law, probability=p)


def draw(mixed: Mixture, law: families.Integrated, count: int, rng: np.random.Generator) -> LawDraws:
    """Curves of a law, in proportion to their probability; the transient's size is the most likely one."""
    data, (model, (R0, A, *theta)) = mixed.data, law.draw(mixed.data, count, rng)
    x, T = np.zeros(count), np.ones(count)
    s = law.family.fraction(data.prepend_R0(data.compute, 0.0), *(v[:, None] for v in theta))
    rest = data.prepend_R0(data.reward, data.R0 or 0.0) - R0[:, None] * (1 - s) - A[:, None] * s
    for which in np.unique(model):
        here, W = model == which, mixed.noises[which].whiten
        T[here], h = mixed.directions[which * len(mixed.directions) // len(mixed.noises)]
        x[here] = mixed.size * rest[here] @ W.T @ (W @ h)
    return LawDraws(law.family, R0, A, tuple(theta), x, T)


@dataclass(frozen=True, slots=True, eq=False)
class Posterior:
    """The most likely sigmoid, draws, and the noise."""

    sigmoid: Sigmoid
    draws: Draws
    autocorrelated_prob: float  # probability that the errors of neighbouring points are correlated
    autocorrelation: float  # their correlation, if they are: its mean over CORRELATIONS
    weight: Array  # (n,) of each point, below 1 for outliers
    scale: float  # size of the residuals, in standard errors
    outliers: NDArray[np.bool_]  # (n,): points off the curve; if many, they count


def posterior(data: Data, draws: int = DRAWS) -> Posterior:
    """The draws of the sigmoid, with the size of the noise integrated out; the same for the same data.

    For given B and C_mid, marginal.py integrates over R0, A and the noise; B and C_mid, with flat priors of
    their logarithms, are integrated on a grid (families.py). Outliers are down-weighted first.
    docs/validation.md shows how often the intervals cover the truth.
    """
    weight, overdispersion, outliers = families.robust(data)
    data = replace(data, R0_se=data.start_error(overdispersion))
    noises, family = noise_models(data, weight), families.sigmoids(data, CELLS)
    integrated = families.integrate(data, noises, family, KEEP_TAILS)
    by_noise = softmax(integrated.log_weight, axis=None).sum(1)
    rng = np.random.default_rng(0)
    _, (R0, A, *cells) = integrated.draw(data, draws, rng)
    B, C_mid = (
        x * math.exp(axis.step) ** (rng.random(draws) - 0.5)  # anywhere in the cell
        for x, axis in zip(cells, integrated.axes, strict=True)
    )
    k = int(np.logaddexp.reduce(integrated.log_weight).argmax())  # the most likely cell over all noises
    model = int(integrated.log_weight[:, k].argmax())
    linear = integrated.cells[model].fit
    start = np.array([linear.R0[k], linear.A[k], *(x[k, 0] for x in integrated.theta)])
    _, likeliest = families.polished(data, family, noises[model].whiten, start)
    return Posterior(
        Sigmoid(*likeliest), Draws(R0, A, B, C_mid), float(1 - by_noise[0]),
        float(by_noise[1:] @ CORRELATIONS / max(by_noise[1:].sum(), 1e-300)),
        weight, overdispersion, outliers,
    )  # fmt: skip
