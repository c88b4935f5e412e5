"""What a run will do, averaged over the laws that its data allow.

The early part of a real curve can often be described by a sigmoid and by other laws alike, which then go
different ways. So a forecast is an average over models (Hoeting et al. 1999): each law has a prior
probability, the data change it by the law's evidence, and draws are taken from each in proportion. In
simulated sigmoids the sigmoid gets most of it, and the intervals are somewhat wider than its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import softmax

from trainer.scaling.laws import (
    FEW_CORRELATIONS,
    Axis,
    Integrated,
    Law,
    integrate,
    logistic_compute_for,
    logistic_of_power,
    sigmoids,
)
from trainer.scaling.marginal import Data, noise_models
from trainer.scaling.posterior import DRAWS, Draws, Posterior, draw_ends, full_box, robust

Array = NDArray[np.float64]

SIGMOID_PRIOR = 2 / 3  # probability that a run follows a sigmoid; the stretched approach and the ...
LOGISTIC_PRIOR = 1 / 6  # ... logistics of C^p, which share this, have the rest
LOGISTICS = 3  # values of q
P_RANGE = (0.3, 3.0)
MAX_TAU = 30.0  # τ is sought up to this multiple of the largest compute
LEAST_R0 = 0.02  # a smaller start makes no difference to the curve: its q is large
LEAST_Q = 0.3  # with a smaller one it is the stretched approach


@dataclass(frozen=True, slots=True, eq=False)
class LogisticDraws:
    """Equally likely curves of one q; (n,) each."""

    q: float
    R0: Array
    A: Array
    p: Array
    tau: Array

    def reward(self, compute: ArrayLike) -> Array:
        """R(C) of each draw: (n,) for a number, (n, m) for m of them."""
        c = np.asarray(compute, np.float64)
        lift = (slice(None),) + (None,) * c.ndim
        R0, A, p, tau = (x[lift] for x in (self.R0, self.A, self.p, self.tau))
        result: Array = R0 + (A - R0) * logistic_of_power(self.q)(c, p, tau)
        return result

    def compute_for(self, reward: float) -> Array:
        """C at which each draw reaches `reward`: 0 if that is at most R0, infinite from A on."""
        s = (reward - self.R0) / np.maximum(self.A - self.R0, 1e-12)
        inside = logistic_compute_for(np.clip(s, 0, 1 - 1e-12), self.q, self.p, self.tau)
        return np.where(s <= 0, 0.0, np.where(s >= 1, np.inf, inside))


@dataclass(frozen=True, slots=True, eq=False)
class Average:
    """Draws of all laws, each as often as it is probable."""

    parts: tuple[Draws | LogisticDraws, ...]
    sigmoid_prob: float  # probability that the run follows a sigmoid

    def reward(self, compute: ArrayLike) -> Array:
        """R(C) of each draw: (n,) for a number, (n, m) for m of them."""
        return np.concatenate([part.reward(compute) for part in self.parts])

    def compute_for(self, reward: float) -> Array:
        """C at which each draw reaches `reward`: 0 if that is at most R0, infinite from A on."""
        return np.concatenate([part.compute_for(reward) for part in self.parts])


def average(data: Data, found: Posterior, seed: int = 0) -> Average:
    """The laws' draws, given the posterior of the sigmoid; the same for the same data and seed."""
    weight, overdispersion = robust(data)
    data = replace(data, R0_se=data.start_error(overdispersion))
    noises = noise_models(data, weight, FEW_CORRELATIONS)
    others = _others(data)
    sigmoid = integrate(data, noises, sigmoids(full_box(data)))
    integrated = [integrate(data, noises, law) for _, _, law in others]
    log_prior = [math.log(SIGMOID_PRIOR), *(math.log(prior) for _, prior, _ in others)]
    p = softmax(np.add(log_prior, [law.log_evidence for law in (sigmoid, *integrated)]))
    rng = np.random.default_rng(seed)
    counts = np.diff(np.rint(DRAWS * np.append(0.0, p.cumsum())).astype(int))
    parts: list[Draws | LogisticDraws] = [_first(found.draws, int(counts[0]))]
    for (q, _, _), law, count in zip(others, integrated, counts[1:], strict=True):
        if count:
            parts.append(_draw(data, q, law, int(count), rng))
    return Average(tuple(parts), float(p[0]))


def _others(data: Data) -> list[tuple[float, float, Law]]:
    """q, the prior probability and the family of all but the sigmoid.

    q takes values from A / R0 − 1 for the largest reward to that for a ceiling of 1.
    """
    R0 = max(float(data.reward[0]) if data.R0 is None else data.R0, LEAST_R0)
    low = max(float(data.reward.max()) / R0 - 1, LEAST_Q)
    high = max(1 / R0 - 1, low)
    tau = Axis(float(data.compute[0]) / 3, MAX_TAU * float(data.compute[-1]), 31)  # as for C_mid
    priors = [(0.0, 1 - SIGMOID_PRIOR - LOGISTIC_PRIOR)]
    priors += [(float(q), LOGISTIC_PRIOR / LOGISTICS) for q in np.geomspace(low, high, LOGISTICS)]
    axes = (Axis(*P_RANGE, 13), tau)
    return [(q, prior, Law(f"q = {q:.3g}", logistic_of_power(q), axes)) for q, prior in priors]


def _first(draws: Draws, count: int) -> Draws:
    """Some of the draws, which are in random order."""
    return Draws(draws.R0[:count], draws.A[:count], draws.B[:count], draws.C_mid[:count])


def _draw(data: Data, q: float, law: Integrated, count: int, rng: np.random.Generator) -> LogisticDraws:
    total = softmax(law.log_weight, axis=None).ravel().cumsum()
    k = np.searchsorted(total / total[-1], (np.arange(count) + 0.5) / count)
    model, cell = np.divmod(rng.permutation(np.minimum(k, total.size - 1)), law.log_weight.shape[1])
    R0, A = draw_ends(data, law.cells, model, cell, rng)
    p, tau = (x[cell, 0] for x in law.theta)  # those that R0 and A belong to
    return LogisticDraws(q, R0, A, p, tau)
