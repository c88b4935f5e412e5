"""Do recipes differ, and which of them wins at which budget: from the draws of their fits.

Two kinds of doubt: the fits' own (draws), and that two runs of one recipe differ (seeds.py). "The runs" are
those there are; "the recipe" is what other seeds could have made of it, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainer.config import ConfigError
from trainer.scaling.fit import FLAGS, HARMLESS, Estimate, Fit, estimate, fit_curve
from trainer.scaling.points import Curve
from trainer.scaling.posterior import Draws
from trainer.scaling.seeds import MARGIN, Spread, run_spread
from trainer.scaling.sigmoid import Sigmoid

Array = NDArray[np.float64]

CONFIDENCE = 0.9
AHEAD = 10.0  # crossings are sought up to this multiple of the last compute
STEPS = 160  # of the grid on which they are sought

DIFFER, SAME, UNTOLD = "differ", "do not differ", "cannot be told"


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """One run of a recipe, or several that differ by their seed; draws of different runs are independent."""

    name: str
    curves: tuple[Curve, ...]
    fits: tuple[Fit, ...]
    draws: tuple[Draws, ...]
    shift: Array  # (draws,) of the runs' mean ceiling from that of all runs the recipe could have

    @property
    def doubts(self) -> tuple[str, ...]:
        """The flags for which the ceiling of a run is not identified."""
        return tuple(dict.fromkeys(f for fit in self.fits for f in fit.flags if f not in HARMLESS))

    def mean(self, name: str) -> Estimate:
        """The mean of a number over the runs; of B and C_mid the geometric one."""
        value = _mean([getattr(fit.law, name) for fit in self.fits], name)
        return estimate(float(value), self.draws_of(name), CONFIDENCE)

    def draws_of(self, name: str) -> Array:
        """(draws,) of that mean."""
        return _mean([getattr(d, name) for d in self.draws], name)

    def reward(self, compute: ArrayLike) -> Array:
        """R(C), the runs' mean, by the likeliest laws; the shape of `compute`."""
        return np.mean([fit.law.reward(compute) for fit in self.fits], axis=0)

    def reward_draws(self, compute: ArrayLike) -> Array:
        """R(C) of the recipe, seeds allowed for: (draws,) for a number, (draws, m) for m of them."""
        return np.mean([replace(d, A=d.A + self.shift).reward(compute) for d in self.draws], axis=0)

    def runs_draws(self, compute: ArrayLike) -> Array:
        """R(C) of the runs there are."""
        return np.mean([d.reward(compute) for d in self.draws], axis=0)


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where one curve overtakes the other."""

    compute: Estimate  # interval over the draws that have such a crossing
    winner: str  # ahead from there on
    share: float  # of the draws that have it


@dataclass(frozen=True, slots=True)
class Lead:
    """Computes at which one recipe is ahead with 90 % or more, the spread over seeds allowed for."""

    winner: str
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Pair:
    """Two recipes: `a` less `b`, or `a` over `b`."""

    a: str
    b: str
    A: Estimate  # A_a − A_b of the runs
    A_recipes: Estimate  # of the recipes: the same, with the spread over seeds
    margin: float  # A_a − A_b of as many runs of one recipe is within ± this, 90 %
    verdict: str  # DIFFER, SAME or UNTOLD, on A
    doubts: tuple[str, ...]  # flags; with any of them it cannot be told
    B_ratio: Estimate  # as fitted
    C_mid_ratio: Estimate
    common_A: float  # the mean over the runs of both
    B_held: tuple[Estimate, Estimate]  # refitted with A held there
    B_held_ratio: Estimate
    searched: tuple[float, float]  # range of compute of crossings and leads
    crossings: tuple[Crossing, ...]
    leads: tuple[Lead, ...]


@dataclass(frozen=True, slots=True)
class Standing:
    """A recipe at a budget."""

    recipe: str
    reward: Estimate  # of its runs
    best: float  # probability that it is the best of the recipes, the spread over seeds allowed for


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """What can be said of some recipes."""

    recipes: tuple[Recipe, ...]
    pairs: tuple[Pair, ...]
    budgets: tuple[tuple[float, tuple[Standing, ...]], ...]
    seeds: int  # runs beyond the first of their recipe: what the spread is estimated from
    spread: Estimate  # τ


def compare(
    groups: Mapping[str, Sequence[Curve]], budgets: Sequence[float] = (), margin: float = MARGIN
) -> Comparison:
    """Compare recipes, each of one or more runs, at least two recipes, all in one unit of compute.

    `budgets`: where to say who is best (default: the last compute, twice and ten times as much).
    `margin`: what two single runs of one recipe differ by at 90 %. ConfigError: too few points.
    """
    fits = {name: tuple(_fit(curve) for curve in curves) for name, curves in groups.items()}
    runs = [fit for some in fits.values() for fit in some]
    ceilings = [[_draws(fit).A for fit in some] for some in fits.values()]
    spread = run_spread([[(float(A.mean()), float(A.var())) for A in some] for some in ceilings], margin)
    rng = np.random.default_rng(0)
    tau = spread.draw(len(ceilings[0][0]), rng)
    recipes = []
    for name, some in fits.items():
        shuffled = tuple(_shuffled(_draws(fit), rng) for fit in some)
        shift = tau * rng.standard_normal(len(tau)) / len(some) ** 0.5
        recipes.append(Recipe(name, tuple(groups[name]), some, shuffled, shift))
    last = max(fit.compute_range[1] for fit in runs)
    return Comparison(
        tuple(recipes),
        tuple(_pair(a, b, spread) for a, b in combinations(recipes, 2)),
        tuple((at, _standings(recipes, at)) for at in budgets or (last, 2 * last, 10 * last)),
        seeds=len(runs) - len(fits),
        spread=estimate(spread.middle, tau, CONFIDENCE),
    )


def at_ceiling(law: Sigmoid, draws: Draws, A: float) -> tuple[Sigmoid, Draws]:
    """The law and its draws refitted with the ceiling held at A.

    Along the ridge of laws that fit alike, log B, log C_mid and R0 are linear in A: each is moved by its
    regression on A over the draws. Within .01 of A that is least squares with A held, to a percent of B,
    and, where neighbouring points err together, as near to it as they allow.
    """
    spread = draws.A - draws.A.mean()
    per_A = spread / max(float(spread @ spread), 1e-300)

    def moved(x: Array, value: float) -> tuple[Array, float]:
        slope = float(per_A @ x)
        return x + slope * (A - draws.A), value + slope * (A - law.A)

    log_B, B = moved(np.log(draws.B), np.log(law.B))
    log_mid, mid = moved(np.log(draws.C_mid), np.log(law.C_mid))
    R0, start = moved(draws.R0, law.R0)
    held = Draws(np.clip(R0, 0, A), np.full_like(R0, A), np.exp(log_B), np.exp(log_mid))
    return Sigmoid(float(np.clip(start, 0, A)), A, float(np.exp(B)), float(np.exp(mid))), held


def find_crossings(a: Recipe, b: Recipe, compute: Array, gaps: Array) -> tuple[Crossing, ...]:
    """Where R_a − R_b changes sign on a logarithmic grid, by the likeliest laws.

    `gaps`: (draws, len(compute)), that difference under each draw, which gives the intervals.
    """
    x = np.log(compute)
    gap = a.reward(compute) - b.reward(compute)
    found = []
    for i in np.flatnonzero(gap[:-1] * gap[1:] < 0):
        at = x[i] + (x[i + 1] - x[i]) * gap[i] / (gap[i] - gap[i + 1])
        up = 1.0 if gap[i + 1] > 0 else -1.0  # 1: a overtakes
        same = (up * gaps[:, :-1] <= 0) & (up * gaps[:, 1:] > 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            theirs = x[:-1] + (x[1] - x[0]) * gaps[:, :-1] / (gaps[:, :-1] - gaps[:, 1:])
        nearest = np.where(same, np.abs(theirs - at), np.inf).argmin(1)
        has = same.any(1)
        places = np.exp(theirs[np.arange(len(gaps)), nearest][has]) if has.any() else np.exp([at])
        winner = (a if up > 0 else b).name
        found.append(Crossing(estimate(float(np.exp(at)), places, CONFIDENCE), winner, float(has.mean())))
    return tuple(found)


def find_leads(a: Recipe, b: Recipe, compute: Array, gaps: Array) -> tuple[Lead, ...]:
    """The stretches of a grid over which one of the two is ahead in 90 % of the draws."""
    wins = (gaps > 0).mean(0)
    leads = []
    for name, sure in ((a.name, wins >= CONFIDENCE), (b.name, wins <= 1 - CONFIDENCE)):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], sure.astype(int), [0]])))
        leads += [
            Lead(name, float(compute[i]), float(compute[j - 1]))
            for i, j in zip(edges[::2], edges[1::2], strict=True)
        ]
    return tuple(sorted(leads, key=lambda lead: lead.low))


def _pair(a: Recipe, b: Recipe, spread: Spread) -> Pair:
    def ratio(top: Array, bottom: Array, value: float) -> Estimate:
        return estimate(value, top / bottom, CONFIDENCE)

    value = a.mean("A").value - b.mean("A").value
    apart = a.draws_of("A") - b.draws_of("A")
    runs, recipes = (estimate(value, x, CONFIDENCE) for x in (apart, apart + a.shift - b.shift))
    margin = spread.margin(len(a.fits), len(b.fits), CONFIDENCE)
    doubts = tuple(dict.fromkeys(a.doubts + b.doubts))
    own = {
        name: ratio(a.draws_of(name), b.draws_of(name), a.mean(name).value / b.mean(name).value)
        for name in ("B", "C_mid")
    }
    common = float(np.mean([fit.A.value for fit in a.fits + b.fits]))
    (B_a, all_a), (B_b, all_b) = (_held_B(recipe, common) for recipe in (a, b))
    low = max(fit.compute_range[0] for fit in a.fits + b.fits)
    high = AHEAD * max(fit.compute_range[1] for fit in a.fits + b.fits)
    grid = np.geomspace(low, high, STEPS)
    gaps = a.reward_draws(grid) - b.reward_draws(grid)
    return Pair(
        a.name, b.name, runs, recipes, margin, _verdict(runs, recipes, margin, doubts), doubts,
        own["B"], own["C_mid"], common,
        B_held=(estimate(B_a, all_a, CONFIDENCE), estimate(B_b, all_b, CONFIDENCE)),
        B_held_ratio=ratio(all_a, all_b, B_a / B_b),
        searched=(low, high),
        crossings=find_crossings(a, b, grid, gaps),
        leads=find_leads(a, b, grid, gaps),
    )  # fmt: skip


def _verdict(runs: Estimate, recipes: Estimate, margin: float, doubts: Sequence[str]) -> str:
    """Differ: beyond what fits and seeds leave open. Do not: at most by what runs of one recipe differ by."""
    if doubts:
        return UNTOLD
    if recipes.low > 0 or recipes.high < 0:
        return DIFFER
    return SAME if -margin <= runs.low and runs.high <= margin else UNTOLD


def _held_B(recipe: Recipe, A: float) -> tuple[float, Array]:
    held = [at_ceiling(fit.law, d, A) for fit, d in zip(recipe.fits, recipe.draws, strict=True)]
    return float(_mean([law.B for law, _ in held], "B")), _mean([d.B for _, d in held], "B")


def _standings(recipes: Sequence[Recipe], budget: float) -> tuple[Standing, ...]:
    best = np.argmax([r.reward_draws(budget) for r in recipes], axis=0)
    return tuple(
        Standing(
            r.name,
            estimate(float(r.reward(budget)), r.runs_draws(budget), CONFIDENCE),
            float((best == i).mean()),
        )
        for i, r in enumerate(recipes)
    )


def _mean(values: Sequence[ArrayLike], name: str) -> Array:
    """Over runs; what is positive and spread over decades by its logarithm."""
    x = np.asarray(values, np.float64)
    result: Array = np.exp(np.log(x).mean(0)) if name in ("B", "C_mid") else np.asarray(x.mean(0))
    return result


def _shuffled(draws: Draws, rng: np.random.Generator) -> Draws:
    """In another order: every fit draws by the same seed, and by equal ranks two runs would move together."""
    order = rng.permutation(len(draws.A))
    return Draws(draws.R0[order], draws.A[order], draws.B[order], draws.C_mid[order])


def _fit(curve: Curve) -> Fit:
    fit = fit_curve(curve, CONFIDENCE)
    if fit.draws is None:
        raise ConfigError(f"{curve.name}: {FLAGS['too-few-points']}; leave it out, or evaluate it more often")
    return fit


def _draws(fit: Fit) -> Draws:
    assert fit.draws is not None  # _fit has seen to it
    return fit.draws
