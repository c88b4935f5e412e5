"""The recipe that is ahead at each budget, and the cost of a reward, whatever shape the curves have.

The curves are those of `Fit.forecast`, which averages over laws. Within the data a law only smooths the
evaluations; beyond them this is a forecast. A run's reward at a compute C is that of its recipe and a
deviation of its own, with a standard deviation τ(C) that is estimated from the runs given (random effects,
as in seeds.py):

    R_run(C) ~ N(R_recipe(C), τ(C)²),    τ: the prior of seeds.py, with its ceiling's sd and 7 % of compute

Errors of the evaluations are averaged out over runs; those of how a curve goes on are not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np

from trainer.scaling.curve.average import FURTHEST, MIN_GAIN, Average, first_reached
from trainer.scaling.curve.sigmoid import Array, Estimate, estimate, median
from trainer.scaling.seeds import MARGIN, MARGIN_IN_MEDIANS, SEED_SD, SeedVariance, seed_variance

SHARES = (0.25, 0.5, 1.0, 2.0)  # of what all have data to: the budgets at which recipes are compared
MIN_LEAD = 1.5  # a lead spans at least this factor of compute
END_TOLERANCE = 1.05  # a budget beyond the data by less is no forecast: another run just ended later


@dataclass(frozen=True, slots=True)
class Standing:
    """One recipe at a budget."""

    recipe: str
    reward: Estimate
    best: float | None  # probability that it is the best of the ranked; None: it is not, or not two are
    times_data: float  # the budget as a multiple of the recipe's last compute
    range_alone: bool  # it is so far beyond the data that no value is shown


@dataclass(frozen=True, slots=True)
class Cost:
    """The compute that a recipe needs for a reward."""

    recipe: str
    compute: Estimate  # infinite: not within FURTHEST times its data
    ratio: Estimate | None  # over that of the leading recipe; None: it is that one


@dataclass(frozen=True, slots=True)
class Crossing:
    """The compute at which one recipe overtakes the other."""

    compute: Estimate
    winner: str  # ahead beyond it


@dataclass(frozen=True, slots=True)
class Lead:
    """A range of compute in which one recipe is ahead. All leads of a pair hold together."""

    winner: str
    low: float
    high: float


@dataclass(frozen=True, slots=True, eq=False)
class Curves:
    """Equally likely curves of recipes, and how much runs of one recipe differ."""

    compute: Array  # (m,) ascending
    rewards: Mapping[str, Array]  # by recipe: (n, m)
    last: Mapping[str, float]  # the recipe's last compute
    reach: Mapping[str, float]  # the largest compute at which it is ranked
    spread: tuple[SeedVariance, ...]  # (m,) τ
    end: float  # the compute at which they are ranked first
    confidence: float

    @property
    def sure(self) -> float:
        """The level at which a recipe is said to be ahead; that of a difference of two ceilings, too."""
        return (1 + self.confidence) / 2

    def at(self, compute: float) -> dict[str, Array]:
        """(n,) rewards of each recipe at a compute of the grid."""
        i = int(np.argmin(np.abs(self.compute - compute)))
        return {name: x[:, i] for name, x in self.rewards.items()}

    def ranked_at(self, compute: float) -> dict[str, Array]:
        """The same of the recipes that are ranked there."""
        return {name: x for name, x in self.at(compute).items() if compute <= self.reach[name]}


def recipe_curves(
    groups: Sequence[Sequence[Average]], compute: Array
) -> tuple[list[Array], tuple[SeedVariance, ...]]:
    """Equally likely curves (n, m) of each recipe, from those of its runs; and τ (m,).

    `compute`, (m,), is ascending, two or more.
    """
    rng = np.random.default_rng(0)
    drawn = [[_by_growth(run, compute, rng) for run in runs] for runs in groups]
    moments = [[(x.mean(0), x.var(0)) for x in runs] for runs in drawn]
    slope = np.mean([np.gradient(m, np.log(compute)) for runs in moments for m, _ in runs], axis=0)
    prior = np.hypot(MARGIN / MARGIN_IN_MEDIANS, SEED_SD * slope)
    spread = tuple(
        seed_variance([[(float(m[i]), float(v[i])) for m, v in runs] for runs in moments], float(prior[i]))
        for i in range(len(compute))
    )
    u = rng.random(len(drawn[0][0]))  # one for all computes, at which a run differs alike
    levels = [np.minimum(np.searchsorted(s.weight.cumsum(), u), len(s.tau) - 1) for s in spread]
    tau = np.stack([s.tau[i] for s, i in zip(spread, levels, strict=True)], axis=1)  # (n, m)
    curves = []
    for runs, known in zip(drawn, moments, strict=True):
        order = rng.permutation(len(u))
        total, weights = np.zeros_like(tau), np.zeros_like(tau)
        for x, (_, variance) in zip(runs, known, strict=True):
            weight = 1 / (tau**2 + variance)
            total += weight * (x[order] + tau * rng.standard_normal((len(u), 1)))
            weights += weight
        curves.append(total / weights)
    return curves, spread


def _by_growth(run: Average, compute: Array, rng: np.random.Generator) -> Array:
    """The curves of a run at `compute`, (n, m), in the order of their gain beyond its data, up to twice them.

    How a recipe goes on is the same for all its runs, so that more runs make a forecast no more certain.
    """
    end, twice = run.reward(np.array([run.last, 2 * run.last])).T
    shuffled = rng.permutation(len(end))  # all fits use the same seed, and curves can gain alike
    return run.reward(compute)[shuffled[np.argsort((twice - end)[shuffled])]]


def standings(curves: Curves, budget: float) -> tuple[Standing, ...]:
    """The recipes at a budget, those that are ranked with their probability of being the best."""
    ranked, chances = curves.ranked_at(budget), dict[str, float]()
    if len(ranked) > 1:
        best = np.argmax(list(ranked.values()), axis=0)
        chances = {name: float((best == i).mean()) for i, name in enumerate(ranked)}
    return tuple(
        Standing(
            name, median(np.clip(x, 0, 1), curves.confidence), chances.get(name),
            budget / curves.last[name], name not in ranked,
        )
        for name, x in curves.at(budget).items()
    )  # fmt: skip


def gaps(curves: Curves) -> dict[tuple[str, str], Estimate]:
    """The difference of every two ranked recipes at the end; their intervals are sure together."""
    rewards = curves.ranked_at(curves.end)
    pairs = list(combinations(rewards, 2))
    if not pairs:
        return {}
    x = np.stack([rewards[a] - rewards[b] for a, b in pairs], axis=1)
    ends = np.stack([np.median(x, axis=0), *simultaneous_band(x, curves.sure)], axis=1).tolist()
    return {pair: Estimate(*one) for pair, one in zip(pairs, ends, strict=True)}


def targets(curves: Curves, R0: float) -> tuple[float, ...]:
    """Two rewards: at half and at nine tenths of the gain from R0 that three quarters of the recipes reach.

    At the end itself, where many are almost level, the cost is hardly determined.
    """
    ends = [np.median(curves.at(end)[name]) for name, end in curves.last.items()]
    gain = float(np.quantile(ends, 0.25, method="lower")) - R0
    if gain < MIN_GAIN:
        return ()
    digits = int(np.ceil(-np.log10(gain / 10)))
    return tuple(round(R0 + share * gain, digits) for share in (0.5, 0.9))


def costs(curves: Curves, reward: float, leader: str) -> tuple[Cost, ...]:
    """The compute that each recipe needs for a reward."""
    rng, start, needed, rows = np.random.default_rng(0), curves.compute[0], dict[str, Array](), list[Cost]()
    for name, rewards in curves.rewards.items():
        x = first_reached(curves.compute, rewards, reward)
        x = np.where(x > start, x, start * rng.random(len(x)))  # before the first evaluation it is anywhere
        needed[name] = np.where(x <= FURTHEST * curves.last[name], x, np.inf)
    for name, x in needed.items():
        both = np.isfinite(x) | np.isfinite(needed[leader])
        ratio = x[both] / needed[leader][both] if both.any() else np.full(1, np.inf)
        over_leader = None if name == leader else median(ratio, curves.confidence)
        rows.append(Cost(name, median(x, curves.confidence), over_leader))
    return tuple(rows)


def simultaneous_band(x: Array, confidence: float) -> tuple[Array, Array]:
    """The ends (m,) of the band that holds a share `confidence` of the rows of x, (n, m), in all columns.

    The supremum-t band: medians, and everywhere the same multiple of the half-width of the interval there.
    """
    tail = (1 - confidence) / 2
    low, middle, high = np.quantile(x, [tail, 0.5, 1 - tail], axis=0)
    half = np.maximum((high - low) / 2, 1e-12)
    multiple = np.quantile((np.abs(x - middle) / half).max(1), confidence)
    return middle - multiple * half, middle + multiple * half


def find_leads(names: tuple[str, str], compute: Array, low: Array, high: Array) -> tuple[Lead, ...]:
    """The ranges of a grid over which the band of R_a − R_b excludes 0, if they span MIN_LEAD or more."""
    leads = []
    for name, ahead in zip(names, (low > 0, high < 0), strict=True):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], ahead.astype(int), [0]])))
        ranges = zip(compute[edges[::2]].tolist(), compute[edges[1::2] - 1].tolist(), strict=True)
        leads += [Lead(name, *ends) for ends in ranges if ends[1] >= MIN_LEAD * ends[0]]
    return tuple(sorted(leads, key=lambda lead: lead.low))


def who_leads(
    curves: Curves, a: str, b: str, low: float
) -> tuple[tuple[float, float], tuple[Crossing, ...], tuple[Lead, ...]]:
    """The range of compute searched, from `low` on, and the crossings and leads there.

    Curves cross where R_a − R_b changes sign between a lead of one and the next lead, of the other.
    """
    high = max(low, min(curves.reach.get(name, 0) for name in (a, b)))
    inside = (curves.compute >= low) & (curves.compute <= high)
    if not {a, b} <= set(curves.rewards) or not inside.any():
        return (low, high), (), ()
    grid, gaps = curves.compute[inside], (curves.rewards[a] - curves.rewards[b])[:, inside]
    leads = find_leads((a, b), grid, *simultaneous_band(gaps, curves.sure))
    gap, crossings = np.median(gaps, axis=0), []
    for one, other in pairwise(leads):
        between = (grid >= one.high) & (grid <= other.low)
        x, up = np.log(grid[between]), np.sign(gap[grid >= other.low][0])
        if one.winner != other.winner:
            place, *drawn = np.exp([np.interp(0, up * g[between], x) for g in (gap, *gaps)]).tolist()
            crossings.append(Crossing(estimate(place, np.array(drawn), curves.confidence), other.winner))
    return (low, high), tuple(crossings), leads
