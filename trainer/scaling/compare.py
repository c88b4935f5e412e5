"""Do recipes differ, and which of them is best at which budget: from the draws of their fits.

There are two sources of uncertainty: that of the fits (the draws), and that two runs of one recipe differ.
What is said of "the runs" holds for those given; "the recipe" includes what other seeds could have given.
The standard deviation τ of the ceiling over seeds is estimated. Its prior, known to a factor of two, comes
from the paper: three independent runs moved A by up to .015, so two ceilings differ only beyond ±.02 (arXiv
2510.13786). The given runs update it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import ndtr

from trainer.scaling.fit import HARMLESS, Estimate, Fit, estimate, fit_with_draws
from trainer.scaling.posterior import DRAWS, Draws
from trainer.scaling.sigmoid import Curve, Sigmoid

Array = NDArray[np.float64]

CONFIDENCE = 0.9
SEARCH_REACH = 10.0  # crossings are sought up to this multiple of the last compute
GRID_STEPS = 160  # of the grid on which they are sought
MARGIN = 0.02  # between the ceilings of two single runs of one recipe, 90 %
MARGIN_IN_MEDIANS = 3.3117  # that margin over the median of τ, where log2 τ has the standard deviation 1
TAU_LEVELS = np.linspace(-4, 6, 121)  # log2 of τ over the prior's median

Verdict = Literal["different", "equivalent", "inconclusive"]
DIFFERENT: Verdict = "different"
EQUIVALENT: Verdict = "equivalent"
INCONCLUSIVE: Verdict = "inconclusive"


@dataclass(frozen=True, slots=True, eq=False)
class SeedVariance:
    """The posterior of τ: levels and their probabilities."""

    tau: Array  # (levels,)
    weight: Array  # (levels,) sums to 1

    @property
    def middle(self) -> float:
        """The geometric mean."""
        return float(np.exp(self.weight @ np.log(self.tau)))

    def draw(self, n: int, rng: np.random.Generator) -> Array:
        """(n,)"""
        return rng.choice(self.tau, n, p=self.weight)

    def margin(self, runs_a: int, runs_b: int, confidence: float) -> float:
        """The largest likely difference between the mean ceilings of so many runs each of one recipe."""
        sd = self.tau * (1 / runs_a + 1 / runs_b) ** 0.5

        def excess(x: float) -> float:
            return float(self.weight @ (2 * ndtr(x / sd) - 1)) - confidence

        return float(brentq(excess, 0.0, 10 * float(sd[-1])))


def seed_variance(recipes: Sequence[Sequence[tuple[float, float]]], margin: float = MARGIN) -> SeedVariance:
    """τ from the runs of some recipes: (A, variance of its fit) of each run.

    A_run ~ N(A_recipe, τ² + variance). A_recipe has a flat prior and is integrated out, so that a recipe of
    one run says nothing about τ.
    """
    tau = margin / MARGIN_IN_MEDIANS * 2**TAU_LEVELS
    log_weight = -(TAU_LEVELS**2) / 2
    for runs in recipes:
        A, variance = np.asarray(runs, np.float64).T
        w = 1 / (tau[:, None] ** 2 + variance)  # (levels, runs)
        mean = (w @ A) / w.sum(1)
        log_weight += 0.5 * np.log(w).sum(1) - 0.5 * np.log(w.sum(1))
        log_weight -= 0.5 * (w * (A - mean[:, None]) ** 2).sum(1)
    weight = np.exp(log_weight - log_weight.max())
    return SeedVariance(tau, weight / weight.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """The runs of one recipe, which differ by their seed; the draws of different runs are independent."""

    name: str
    curves: tuple[Curve, ...]
    fits: tuple[Fit, ...]
    draws: tuple[Draws, ...]
    shift: Array  # (draws,) from the mean ceiling of the runs to that of all possible seeds

    @property
    def doubts(self) -> tuple[str, ...]:
        """The flags because of which the ceiling of a run is not identified."""
        return tuple(dict.fromkeys(f for fit in self.fits for f in fit.flags if f not in HARMLESS))

    def mean(self, name: str) -> Estimate:
        """The mean of a parameter over the runs; for B and C_mid the geometric mean."""
        value = _mean([getattr(fit.sigmoid, name) for fit in self.fits], name)
        return estimate(float(value), self.draws_of(name), CONFIDENCE)

    def draws_of(self, name: str) -> Array:
        """(draws,) of that mean."""
        return _mean([getattr(d, name) for d in self.draws], name)

    def reward(self, compute: ArrayLike) -> Array:
        """R(C), mean of the most likely sigmoids of the runs; has the shape of `compute`."""
        return np.mean([fit.sigmoid.reward(compute) for fit in self.fits], axis=0)

    def reward_draws(self, compute: ArrayLike) -> Array:
        """R(C) of the recipe, with other seeds: (draws,) for a number, (draws, m) for m of them."""
        return np.mean([replace(d, A=d.A + self.shift).reward(compute) for d in self.draws], axis=0)

    def runs_draws(self, compute: ArrayLike) -> Array:
        """R(C) of the given runs."""
        return np.mean([d.reward(compute) for d in self.draws], axis=0)


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where one curve overtakes the other."""

    compute: Estimate  # interval over the draws that have such a crossing
    winner: str  # ahead beyond it
    share: float  # of the draws that have it


@dataclass(frozen=True, slots=True)
class Lead:
    """A range of compute in which one recipe is ahead with 90 % or more, with other seeds allowed for."""

    winner: str
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Pair:
    """Two recipes compared: `a` less `b`, or `a` over `b`."""

    a: str
    b: str
    A: Estimate  # A_a − A_b of the runs
    A_recipes: Estimate  # of the recipes: with the variance over seeds added
    margin: float  # as many runs of a single recipe differ by at most this, 90 %
    verdict: Verdict  # on A
    doubts: tuple[str, ...]  # flags of their fits; with any of them the verdict is inconclusive
    B_ratio: Estimate  # as fitted
    C_mid_ratio: Estimate
    common_A: float  # the mean over the runs of both
    B_held: tuple[Estimate, Estimate]  # refitted with A held at common_A
    B_held_ratio: Estimate
    searched: tuple[float, float]  # range of compute searched for crossings and leads
    crossings: tuple[Crossing, ...]
    leads: tuple[Lead, ...]


@dataclass(frozen=True, slots=True)
class Standing:
    """One recipe at a budget."""

    recipe: str
    reward: Estimate  # of its runs
    best: float  # probability that it is the best of the recipes, with other seeds allowed for


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """What the runs say about some recipes."""

    recipes: tuple[Recipe, ...]
    pairs: tuple[Pair, ...]
    budgets: tuple[tuple[float, tuple[Standing, ...]], ...]
    seeds: int  # runs beyond the first of each recipe, from which τ is estimated
    spread: Estimate  # τ


def compare(
    groups: Mapping[str, Sequence[Curve]], budgets: Sequence[float] = (), margin: float = MARGIN
) -> Comparison:
    """Compare two or more recipes, each of one or more runs, all in one unit of compute.

    `budgets`: where to compare rewards (default: the last compute, twice and ten times as much).
    `margin`: between two single runs of one recipe, 90 %. ConfigError: too few points.
    """
    fitted = {name: [fit_with_draws(c, CONFIDENCE) for c in curves] for name, curves in groups.items()}
    runs = [fit for pairs in fitted.values() for fit, _ in pairs]
    variance = seed_variance(
        [[(float(d.A.mean()), float(d.A.var())) for _, d in pairs] for pairs in fitted.values()], margin
    )
    rng = np.random.default_rng(0)
    tau = variance.draw(DRAWS, rng)
    recipes = []
    for name, pairs in fitted.items():
        shuffled = tuple(_shuffled(draws, rng) for _, draws in pairs)
        shift = tau * rng.standard_normal(len(tau)) / len(pairs) ** 0.5
        recipes.append(Recipe(name, tuple(groups[name]), tuple(fit for fit, _ in pairs), shuffled, shift))
    last = max(fit.compute_range[1] for fit in runs)
    return Comparison(
        tuple(recipes),
        tuple(_pair(a, b, variance) for a, b in combinations(recipes, 2)),
        tuple((at, _standings(recipes, at)) for at in budgets or (last, 2 * last, 10 * last)),
        seeds=len(runs) - len(fitted),
        spread=estimate(variance.middle, tau, CONFIDENCE),
    )


def at_ceiling(sigmoid: Sigmoid, draws: Draws, A: float) -> tuple[Sigmoid, Draws]:
    """The sigmoid and its draws refitted with the ceiling held at A.

    Along the ridge of sigmoids that fit equally well, log B, log C_mid and R0 are linear in A, so each is
    moved by its regression on A over the draws. Within .01 of A this agrees with least squares with A held
    to a percent of B.
    """
    spread = draws.A - draws.A.mean()
    per_A = spread / max(float(spread @ spread), 1e-300)

    def moved(x: Array, value: float) -> tuple[Array, float]:
        slope = float(per_A @ x)
        return x + slope * (A - draws.A), value + slope * (A - sigmoid.A)

    log_B, B = moved(np.log(draws.B), np.log(sigmoid.B))
    log_mid, mid = moved(np.log(draws.C_mid), np.log(sigmoid.C_mid))
    R0, start = moved(draws.R0, sigmoid.R0)
    held = Draws(np.clip(R0, 0, A), np.full_like(R0, A), np.exp(log_B), np.exp(log_mid))
    return Sigmoid(float(np.clip(start, 0, A)), A, float(np.exp(B)), float(np.exp(mid))), held


def find_crossings(a: Recipe, b: Recipe, compute: Array, gaps: Array) -> tuple[Crossing, ...]:
    """Where R_a − R_b of the most likely sigmoids changes sign on a logarithmic grid.

    `gaps`: (draws, len(compute)), that difference under each draw, for the intervals.
    """
    x = np.log(compute)
    gap = a.reward(compute) - b.reward(compute)
    crossings = []
    for i in np.flatnonzero(gap[:-1] * gap[1:] < 0):
        at = x[i] + (x[i + 1] - x[i]) * gap[i] / (gap[i] - gap[i + 1])
        up = 1.0 if gap[i + 1] > 0 else -1.0  # 1: a overtakes
        same = (up * gaps[:, :-1] <= 0) & (up * gaps[:, 1:] > 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            theirs = x[:-1] + (x[1] - x[0]) * gaps[:, :-1] / (gaps[:, :-1] - gaps[:, 1:])
        nearest = np.where(same, np.abs(theirs - at), np.inf).argmin(1)
        has = same.any(1)
        drawn = np.exp(theirs[np.arange(len(gaps)), nearest][has]) if has.any() else np.exp([at])
        winner = (a if up > 0 else b).name
        crossings.append(Crossing(estimate(float(np.exp(at)), drawn, CONFIDENCE), winner, float(has.mean())))
    return tuple(crossings)


def find_leads(a: Recipe, b: Recipe, compute: Array, gaps: Array) -> tuple[Lead, ...]:
    """The ranges of a grid in which one of the two is ahead in 90 % of the draws."""
    wins = (gaps > 0).mean(0)
    leads = []
    for name, sure in ((a.name, wins >= CONFIDENCE), (b.name, wins <= 1 - CONFIDENCE)):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], sure.astype(int), [0]])))
        ranges = zip(compute[edges[::2]].tolist(), compute[edges[1::2] - 1].tolist(), strict=True)
        leads += [Lead(name, low, high) for low, high in ranges]
    return tuple(sorted(leads, key=lambda lead: lead.low))


def _pair(a: Recipe, b: Recipe, variance: SeedVariance) -> Pair:
    def ratio(name: str) -> Estimate:
        value = a.mean(name).value / b.mean(name).value
        return estimate(value, a.draws_of(name) / b.draws_of(name), CONFIDENCE)

    value = a.mean("A").value - b.mean("A").value
    apart = a.draws_of("A") - b.draws_of("A")
    runs, recipes = (estimate(value, x, CONFIDENCE) for x in (apart, apart + a.shift - b.shift))
    margin = variance.margin(len(a.fits), len(b.fits), CONFIDENCE)
    doubts = tuple(dict.fromkeys(a.doubts + b.doubts))
    common = float(np.mean([fit.A.value for fit in a.fits + b.fits]))
    (B_a, all_a), (B_b, all_b) = (_held_B(recipe, common) for recipe in (a, b))
    low = max(fit.compute_range[0] for fit in a.fits + b.fits)
    high = SEARCH_REACH * max(fit.compute_range[1] for fit in a.fits + b.fits)
    grid = np.geomspace(low, high, GRID_STEPS)
    gaps = a.reward_draws(grid) - b.reward_draws(grid)
    return Pair(
        a.name, b.name, runs, recipes, margin, _verdict(runs, recipes, margin, doubts), doubts,
        ratio("B"), ratio("C_mid"), common,
        B_held=(estimate(B_a, all_a, CONFIDENCE), estimate(B_b, all_b, CONFIDENCE)),
        B_held_ratio=estimate(B_a / B_b, all_a / all_b, CONFIDENCE),
        searched=(low, high),
        crossings=find_crossings(a, b, grid, gaps),
        leads=find_leads(a, b, grid, gaps),
    )  # fmt: skip


def _verdict(runs: Estimate, recipes: Estimate, margin: float, doubts: Sequence[str]) -> Verdict:
    """Different: by more than fits and seeds explain. Equivalent: by no more than runs of one recipe are."""
    if doubts:
        return INCONCLUSIVE
    if recipes.low > 0 or recipes.high < 0:
        return DIFFERENT
    return EQUIVALENT if -margin <= runs.low and runs.high <= margin else INCONCLUSIVE


def _held_B(recipe: Recipe, A: float) -> tuple[float, Array]:
    held = [at_ceiling(fit.sigmoid, d, A) for fit, d in zip(recipe.fits, recipe.draws, strict=True)]
    return float(_mean([sigmoid.B for sigmoid, _ in held], "B")), _mean([d.B for _, d in held], "B")


def _standings(recipes: Sequence[Recipe], budget: float) -> tuple[Standing, ...]:
    best = np.argmax([r.reward_draws(budget) for r in recipes], axis=0)
    rewards = [estimate(float(r.reward(budget)), r.runs_draws(budget), CONFIDENCE) for r in recipes]
    return tuple(
        Standing(r.name, reward, float((best == i).mean()))
        for i, (r, reward) in enumerate(zip(recipes, rewards, strict=True))
    )


def _mean(values: Sequence[ArrayLike], name: str) -> Array:
    """Over runs; geometric for B and C_mid, which are positive and vary over decades."""
    x = np.asarray(values, np.float64)
    result: Array = np.exp(np.log(x).mean(0)) if name in ("B", "C_mid") else np.asarray(x.mean(0))
    return result


def _shuffled(draws: Draws, rng: np.random.Generator) -> Draws:
    """The draws in another order: all fits use the same seed, which would make runs look correlated."""
    order = rng.permutation(len(draws.A))
    return Draws(draws.R0[order], draws.A[order], draws.B[order], draws.C_mid[order])
