"""Do recipes differ, and which of them is best at which budget.

There are two sources of uncertainty: that of the fits, and that two runs of one recipe differ (seeds.py).
An estimate of a recipe holds both. Of a pair, the intervals of the three differences (A, B, C_mid) hold
together with the confidence that was asked for (Bonferroni). The band of the difference of their curves, over
all computes searched, and the differences of all pairs at the end hold with the level of A. The parameters
are those of sigmoids; rewards at budgets and leads assume no law (budgets.py).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Literal

import numpy as np

from trainer.config import ConfigError
from trainer.scaling import budgets as ahead
from trainer.scaling.budgets import END_TOLERANCE, SHARES, Cost, Crossing, Curves, Lead, Standing
from trainer.scaling.curve.average import FURTHEST
from trainer.scaling.curve.fit import Fit, fit_curve, fit_with_draws
from trainer.scaling.curve.flags import HARMLESS, is_wide
from trainer.scaling.curve.sigmoid import Array, Curve, Draws, Estimate, Sigmoid, estimate, without_flops
from trainer.scaling.seeds import MARGIN, PARAMETERS, SeedVariance, pool, seed_variances

UNFIT = {"falling", "last-point-low", "poor-fit", "not-sigmoid"}  # flags: no sigmoid describes the run

Fitted = Mapping[str, Sequence[tuple[Curve, Fit]]]  # runs and their fits, by recipe
Verdict = Literal["different", "equivalent", "inconclusive"]
DIFFERENT: Verdict = "different"
EQUIVALENT: Verdict = "equivalent"
INCONCLUSIVE: Verdict = "inconclusive"


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """The runs of one recipe, which differ by their seed, and what they say together."""

    name: str
    curves: tuple[Curve, ...] = field(repr=False)
    fits: tuple[Fit, ...]
    used: tuple[int, ...]  # those that a sigmoid describes; all, if there is none
    sigmoid: Sigmoid  # the most likely one of a single run; with several, medians of `draws`
    draws: Draws = field(repr=False)  # of the recipe: with the variance over seeds
    runs: Draws = field(repr=False)  # of the weighted mean of the used runs
    doubts: tuple[str, ...]  # flags because of which the ceiling of the recipe is not identified
    cautions: tuple[str, ...]  # flags because of which B and C_mid are not

    @property
    def described(self) -> bool:
        """True if a sigmoid describes any of its runs."""
        return not set(self.doubts) & UNFIT

    @property
    def evaluations(self) -> int:
        """Number of evaluations of all runs, after the start."""
        return sum(fit.points for fit in self.fits)

    @property
    def forecasts(self) -> tuple[Fit, ...]:
        """The fits of the runs that have not fallen: only these give a reward at a budget."""
        return tuple(fit for fit in self.fits if "falling" not in fit.flags)

    @property
    def reach(self) -> float:
        """The largest budget at which it is compared with others."""
        if not any(fit.predictable for fit in self.forecasts):
            return END_TOLERANCE * self.last
        return (2 * END_TOLERANCE if self.doubts else FURTHEST) * self.last

    @property
    def last(self) -> float:
        """The last compute of its runs."""
        return max(fit.compute_range[1] for fit in self.forecasts or self.fits)

    def estimate(self, name: str) -> Estimate:
        """A parameter of the recipe."""
        return estimate(getattr(self.sigmoid, name), getattr(self.draws, name), self.fits[0].confidence)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two recipes compared: `a` less `b`, or `a` over `b`."""

    a: str
    b: str
    A: Estimate  # A_a − A_b
    A_runs: Estimate  # of the given runs, without the variance over seeds
    margin: float  # ceilings are equivalent within it: two runs of one recipe differ as much
    verdict: Verdict  # on A
    doubts: tuple[str, ...]  # flags of the recipes; with any of them the verdict is inconclusive
    cautions: tuple[str, ...]  # flags because of which B and C_mid are not compared
    common_A: float | None  # the ceiling at which B and C_mid are compared; None: each at its own
    B: tuple[Estimate, Estimate]
    B_ratio: Estimate
    B_differs: bool  # by more than fits and seeds explain
    C_mid: tuple[Estimate, Estimate]
    C_mid_ratio: Estimate
    C_mid_differs: bool
    searched: tuple[float, float]  # range of compute searched for crossings and leads
    crossings: tuple[Crossing, ...]
    leads: tuple[Lead, ...]
    reward: Estimate | None = None  # R_a − R_b at the end; None: one of them is not ranked there

    @property
    def ahead(self) -> str:
        """The recipe with the higher reward there, if it is by more than fits and seeds explain."""
        if self.reward is None or not excludes(self.reward, 0):
            return ""
        return self.a if self.reward.value > 0 else self.b


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """The result of a comparison of some recipes by their runs."""

    recipes: tuple[Recipe, ...]
    pairs: tuple[Pair, ...]
    spread: dict[str, Estimate]  # standard deviation over seeds of A, log B, log C_mid and the reward
    confidence: float
    incomparable: str = ""  # why there are no pairs and no ranking
    budgets: tuple[tuple[float, tuple[Standing, ...]], ...] = ()  # none of these, if all runs have fallen
    end: tuple[float, tuple[Standing, ...]] | None = None  # as a rule, what all have data to; the best first
    costs: tuple[tuple[float, tuple[Cost, ...]], ...] = ()  # of two rewards
    reward_margin: float = math.nan  # at the end, between two runs of one recipe


def compare(
    groups: Mapping[str, Curve | Sequence[Curve]],
    budgets: Sequence[float] = (),
    confidence: float = 0.9,
    within: float | None = None,
) -> Comparison:
    """Compare two or more recipes, each of one or more runs, all in one unit of compute.

    `budgets`: where to compare rewards (default: ¼, ½, 1 and 2 times what all have data to).
    `confidence`, `within`: as in `fit_curve`. ConfigError: too few points.
    """
    named = groups if isinstance(groups, Mapping) else {}
    curves = {k: list(runs) if isinstance(runs, Sequence) else [runs] for k, runs in named.items()}
    if not curves or not all(runs and all(isinstance(c, Curve) for c in runs) for runs in curves.values()):
        raise ConfigError("compare: expected {NAME: [RUN, ...], ...}, each RUN a Curve, as of curve(...)")
    curves = {k: list(map(without_flops, runs)) for k, runs in curves.items()}
    fits = {k: [(c, fit_with_draws(c, confidence, within)[0]) for c in v] for k, v in curves.items()}
    return compare_fits(fits, budgets)


def compare_fits(groups: Fitted, budgets: Sequence[float] = (), end: float | None = None) -> Comparison:
    """`compare`, of runs that have been fitted already, all with the same confidence and `within`.

    `end`: where they are ranked (default: what all have data to).
    """
    confidence = next(iter(groups.values()))[0][1].confidence
    recipes, variances = pooled_recipes(groups)
    curves = curves_of(recipes, budgets, end)
    equivalent = min(MARGIN, variances["A"].margin(confidence))  # seeds far apart make no two recipes alike
    comparison = Comparison(
        tuple(recipes),
        tuple(_pair(a, b, equivalent, confidence, curves) for a, b in combinations(recipes, 2)),
        spread={name: variance.estimate(confidence) for name, variance in variances.items()},
        confidence=confidence,
    )
    if curves is None:
        return comparison
    ranked = sorted(ahead.standings(curves, curves.end), key=lambda s: (s.range_alone, -s.reward.value))
    gaps, of_reward = ahead.gaps(curves), curves.spread[np.searchsorted(curves.compute, curves.end)]
    R0 = float(np.median([fit.R0.value for recipe in recipes for fit in recipe.forecasts]))
    return replace(
        comparison,
        pairs=tuple(replace(pair, reward=gaps.get((pair.a, pair.b))) for pair in comparison.pairs),
        budgets=tuple((x, ahead.standings(curves, x)) for x in budgets or [x * curves.end for x in SHARES]),
        end=(curves.end, tuple(ranked)),
        costs=tuple((x, ahead.costs(curves, x, ranked[0].recipe)) for x in ahead.targets(curves, R0)),
        spread=comparison.spread | {"reward": of_reward.estimate(confidence)},
        reward_margin=of_reward.margin(confidence),
    )


def pooled_recipes(groups: Fitted) -> tuple[list[Recipe], dict[str, SeedVariance]]:
    """The runs of each recipe pooled, and the variance over seeds of A, log B and log C_mid of all.

    C_mid of a run that is fitted to FLOPs is not the compute that it took, so it is fitted to that again.
    """
    groups = {k: [(c, _to_compute(c, fit)) for c, fit in runs] for k, runs in groups.items()}
    used = {k: _used([fit for _, fit in runs]) for k, runs in groups.items()}
    draws = {k: [x for i in used[k] if (x := runs[i][1].draws)] for k, runs in groups.items()}
    variances = seed_variances(list(draws.values()))
    rng = np.random.default_rng(0)
    levels = np.stack([variances[name].draw(rng) for name in PARAMETERS])
    pooled = {k: pool(runs, variances, levels, rng) for k, runs in draws.items()}
    return [_recipe(k, runs, used[k], pooled[k]) for k, runs in groups.items()], variances


def curves_of(recipes: Sequence[Recipe], budgets: Sequence[float], end: float | None) -> Curves | None:
    """The curves of recipes on a grid with `budgets` and the SHARES of the end; None: all have fallen."""
    known = [recipe for recipe in recipes if recipe.forecasts]
    if not known:
        return None
    last, reach = ({r.name: getattr(r, name) for r in known} for name in ("last", "reach"))
    fits = [recipe.forecasts for recipe in known]
    low = min(fit.compute_range[0] for runs in fits for fit in runs)
    end, high = end or min(last.values()), max(FURTHEST * max(last.values()), *reach.values())
    grid = np.unique([*np.geomspace(low, high, 120), *(x * end for x in SHARES), *budgets])
    drawn, spread = ahead.recipe_curves([[fit.forecast for fit in runs] for runs in fits], grid)
    return Curves(grid, dict(zip(last, drawn, strict=True)), last, reach, spread, end, fits[0][0].confidence)


def without_ranking(comparison: Comparison, why: str) -> Comparison:
    """Each recipe for itself, where the rewards are not the same metric; `why` is empty where they are."""
    if not why:
        return comparison
    order = [recipe.name for recipe in comparison.recipes]

    def unranked(x: float, row: Sequence[Standing]) -> tuple[float, tuple[Standing, ...]]:
        return x, tuple(sorted((replace(s, best=None) for s in row), key=lambda s: order.index(s.recipe)))

    budgets = tuple(unranked(*row) for row in comparison.budgets)
    end = unranked(*comparison.end) if comparison.end else None
    return replace(comparison, pairs=(), budgets=budgets, end=end, costs=(), incomparable=why)


def excludes(e: Estimate, value: float) -> bool:
    """True if a value is outside the interval."""
    return e.low > value or e.high < value


def at_ceiling(sigmoid: Sigmoid, draws: Draws, A: float) -> tuple[Sigmoid, Draws]:
    """The sigmoid and its draws with the ceiling held at A.

    Along the ridge of sigmoids that fit equally well, log B, log C_mid and R0 are linear in A, so each is
    moved by its regression on A over the draws. For a run, within .01 of A, this agrees with least squares
    with A held to a percent of B.
    """
    spread = draws.A - draws.A.mean()
    per_A = spread / max(float(spread @ spread), 1e-300)

    def moved(x: Array, value: float) -> tuple[float, Array]:
        slope = float(per_A @ x)
        return value + slope * (A - sigmoid.A), x + slope * (A - draws.A)

    log_B, log_B_draws = moved(np.log(draws.B), np.log(sigmoid.B))
    log_mid, log_mid_draws = moved(np.log(draws.C_mid), np.log(sigmoid.C_mid))
    R0, R0_draws = (np.clip(x, 0, A) for x in moved(draws.R0, sigmoid.R0))
    fixed = Draws(R0_draws, np.full_like(draws.A, A), np.exp(log_B_draws), np.exp(log_mid_draws))
    return Sigmoid(float(R0), A, float(np.exp(log_B)), float(np.exp(log_mid))), fixed


def _to_compute(curve: Curve, fit: Fit) -> Fit:
    return fit_curve(without_flops(curve), fit.confidence, fit.within) if fit.axis else fit


def _used(fits: Sequence[Fit]) -> tuple[int, ...]:
    """The runs that a sigmoid describes; all, if there is none."""
    return tuple(i for i, fit in enumerate(fits) if not set(fit.flags) & UNFIT) or tuple(range(len(fits)))


def _recipe(
    name: str, runs: Sequence[tuple[Curve, Fit]], used: tuple[int, ...], pooled: tuple[Draws, Draws]
) -> Recipe:
    curves, all_fits = zip(*runs, strict=True)
    fits: list[Fit] = [all_fits[i] for i in used]
    draws, sigmoid = pooled[0], fits[0].sigmoid
    shared = [flag for flag in fits[0].flags if all(flag in fit.flags for fit in fits)]
    doubts: list[str] = [flag for flag in shared if flag not in HARMLESS]
    if len(fits) > 1:
        sigmoid = Sigmoid(*(float(np.median(x)) for x in (draws.R0, draws.A, draws.B, draws.C_mid)))
        unfit = [flag for fit in fits for flag in fit.flags if flag in UNFIT]
        doubts = [flag for flag in doubts if flag != "wide"] + unfit
        A = estimate(sigmoid.A, draws.A, fits[0].confidence)
        doubts += ["wide"] * is_wide(A, sigmoid.A - sigmoid.R0, fits[0].within)
    if any(fit.identified for fit in fits):  # the others add to what it says
        doubts = []
    cautions = tuple(flag for flag in shared if flag in HARMLESS)
    return Recipe(name, curves, all_fits, used, sigmoid, *pooled, tuple(dict.fromkeys(doubts)), cautions)


def pair_level(name: str, confidence: float) -> float:
    """The level of the interval of a pair's difference in one parameter: A has half of the errors allowed."""
    return 1 - (1 - confidence) / (2 if name == "A" else 4)


def _pair(a: Recipe, b: Recipe, margin: float, confidence: float, curves: Curves | None) -> Pair:
    A = a.sigmoid.A - b.sigmoid.A
    recipes = estimate(A, a.draws.A - b.draws.A, pair_level("A", confidence))
    runs = estimate(A, a.runs.A - b.runs.A, confidence)
    doubts, cautions = (tuple(dict.fromkeys(x)) for x in (a.doubts + b.doubts, a.cautions + b.cautions))
    verdict = _verdict(recipes, runs, margin, doubts)
    common = (a.sigmoid.A + b.sigmoid.A) / 2 if verdict == EQUIVALENT else None
    both = [(recipe.sigmoid, recipe.draws) for recipe in (a, b)]
    if common is not None:
        both = [at_ceiling(*one, common) for one in both]

    def compared(name: str) -> tuple[tuple[Estimate, Estimate], Estimate, bool]:
        (x, x_draws), (y, y_draws) = ((getattr(s, name), getattr(d, name)) for s, d in both)
        ratio = estimate(x / y, x_draws / y_draws, pair_level(name, confidence))
        two = estimate(x, x_draws, confidence), estimate(y, y_draws, confidence)
        return two, ratio, not doubts and not cautions and excludes(ratio, 1)

    low = max(fit.compute_range[0] for recipe in (a, b) for fit in recipe.fits)
    leads = ahead.who_leads(curves, a.name, b.name, low) if curves else ((low, low), (), ())
    return Pair(
        a.name, b.name, recipes, runs, margin, verdict, doubts, cautions, common,
        *compared("B"), *compared("C_mid"), *leads,
    )  # fmt: skip


def _verdict(recipes: Estimate, runs: Estimate, margin: float, doubts: Sequence[str]) -> Verdict:
    """Different: by more than fits and seeds explain. Equivalent: the given runs, within the margin."""
    if doubts:
        return INCONCLUSIVE
    if excludes(recipes, 0):
        return DIFFERENT
    return EQUIVALENT if -margin <= runs.low and runs.high <= margin else INCONCLUSIVE
