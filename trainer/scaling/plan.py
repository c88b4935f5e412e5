"""Simulations of how long and how often evaluated a pilot must be to identify the ceiling.

Sigmoids are drawn from a prior or from the posterior of a pilot. Noisy evaluations of each are simulated up
to a budget and fitted as a user would fit them, and the fit says how precisely A is known. Seeds are fixed.
"""

import math
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from trainer.config import ConfigError
from trainer.scaling.curve.families import OUTLIER
from trainer.scaling.curve.fit import HARMLESS, Fit, fit_curve, fit_with_draws
from trainer.scaling.curve.flags import is_wide
from trainer.scaling.curve.marginal import MIN_SD
from trainer.scaling.curve.points import MAX_POINTS, averaged, checked
from trainer.scaling.curve.sigmoid import Curve, EvalPoint, Sigmoid, without_flops
from trainer.scaling.seeds import MARGIN
from trainer.scaling.simulate import autocorrelated, simulated

WITHIN = MARGIN  # A is known if its interval reaches no further than this from its value
CHANCE = 0.8  # the probability of that at which a plan is good enough
UNUSABLE_PILOT = {  # flags of a pilot from which nothing can be predicted
    "falling": "fix the run before planning",
    "last-point-low": "evaluate it again before planning (python -m trainer.evaluate)",
    "flat": "it cannot be said when the reward will rise: train until it does, evaluate with less noise, or "
    "plan without the pilot (--c-mid, --r0)",
    "poor-fit": "a sigmoid does not describe this pilot and cannot predict the rest: look at its points",
}
A_RANGE, B_RANGE = (0.5, 0.75), (1.1, 2.5)  # arXiv 2510.13786, Table 1: A .585 to .71, B 1.09 to 2.44


@dataclass(frozen=True, slots=True)
class Prospect:
    """The possible futures of a run: equally likely sigmoids, and how they will be evaluated."""

    sigmoids: tuple[Sigmoid, ...]
    seen: Curve  # what has been measured: R0 and, with a pilot, its points
    noise: float  # standard deviation of an evaluation
    reported_se: float  # standard error given to the fit; 0: none
    C_mid: float  # of the most likely sigmoid; of several pilots the median, without one the middle assumed
    correlation_length: float = 0.0  # compute after which errors correlate by 1/e; 0: independent errors
    autocorrelation: float = 0.0  # of neighbouring evaluations, at any distance; without a pilot


@dataclass(frozen=True, slots=True)
class Cell:
    """A plan and its result in the simulations; after a pilot, evaluations and cost are those to come."""

    budget: float
    evaluations: int
    cost: float  # in compute, evaluations included
    chance: float  # share of the simulations in which A is known
    chance_se: float  # its standard error
    error: float  # median |Â − A|


def prior(
    C_mid: tuple[float, float], R0: float, noise: float, runs: int,
    A: tuple[float, float] = A_RANGE, B: tuple[float, float] = B_RANGE, autocorrelation: float = 0.0,
) -> Prospect:  # fmt: skip
    """Sigmoids with A, B and log C_mid uniform over their ranges, evenly (a Latin hypercube).

    R0 is measured before step 1. `autocorrelation`: of the errors of neighbouring evaluations.
    """
    rng = np.random.default_rng(0)
    ranks = np.stack([rng.permutation(runs) for _ in range(3)])
    a, b, c = (ranks + rng.random((3, runs))) / runs
    columns = A[0] + a * (A[1] - A[0]), B[0] + b * (B[1] - B[0]), C_mid[0] * (C_mid[1] / C_mid[0]) ** c
    sigmoids = tuple(Sigmoid(R0, *row) for row in np.stack(columns, 1).tolist())
    start = Curve("", "", (), EvalPoint(0, 0.0, R0, noise))
    middle = C_mid[0] * (C_mid[1] / C_mid[0]) ** 0.5
    return Prospect(sigmoids, start, noise, noise, middle, autocorrelation=autocorrelation)


def after_pilot(pilot: Curve, runs: int, noise: float | None = None) -> tuple[Prospect, Fit]:
    """Draws of the pilot's fit, at equal steps of the quantiles of A; its noise, unless that is given."""
    pilot = _thinned(pilot)
    fit, draws = fit_with_draws(pilot)
    for flag, reason in UNUSABLE_PILOT.items():
        if flag in fit.flags:
            raise ConfigError(f"{pilot.name}: {fit.describe(flag)}; {reason}")
    order = np.argsort(draws.A, kind="stable")
    chosen = order[((np.arange(runs) + 0.5) / runs * len(order)).astype(int)]
    columns = (draws.R0, draws.A, draws.B, draws.C_mid)
    sigmoids = tuple(Sigmoid(*(float(x[i]) for x in columns)) for i in chosen)
    data = checked(pilot)
    reported = float(np.median(data.sd)) if data.sd_known else 0.0
    residual_sd = _residual_sd(pilot, fit, reported)
    noise, is_assumed = noise or max(reported, residual_sd), noise is not None
    if noise < MIN_SD and not is_assumed:
        raise ConfigError(
            f"{pilot.name}: its evaluations are within {noise:.1g} of the curve and have no standard errors, "
            "so the noise of an evaluation is unknown; give --noise"
        )
    length = 0.0
    if fit.autocorrelated_prob > 1 / 2 and residual_sd > reported / 2:  # else there is little noise
        length = -data.gap / math.log(fit.autocorrelation)
    return Prospect(sigmoids, pilot, noise, reported, fit.C_mid.value, length), fit


def like_pilots(pilots: Sequence[Curve], runs: int, noise: float | None = None) -> tuple[Prospect, list[Fit]]:
    """A new run like several pilots: sigmoids of each in equal parts, so that it differs as they do."""
    each = [after_pilot(pilot, -(-runs // len(pilots)), noise) for pilot in pilots]
    sigmoids = [sigmoid for same in zip(*(p.sigmoids for p, _ in each), strict=True) for sigmoid in same]
    rows = [(p.C_mid, p.noise, p.reported_se, fit.R0.value) for p, fit in each]
    middle, sd, reported, R0 = np.median(rows, axis=0).tolist()
    correlated = [fit.autocorrelation if p.correlation_length else 0.0 for p, fit in each]
    start = Curve("", "", (), EvalPoint(0, 0.0, R0, reported))
    prospect = Prospect(
        tuple(sigmoids[:runs]), start, sd, reported, middle, autocorrelation=float(np.median(correlated))
    )
    return prospect, [fit for _, fit in each]


def _thinned(pilot: Curve) -> Curve:
    """The pilot with neighbours averaged as the fit does, so that new evaluations are not averaged; without
    its FLOPs, which those do not have."""
    if len(pilot.points) <= MAX_POINTS:
        return without_flops(pilot)
    data = averaged(checked(pilot))
    errors = data.sd if data.sd_known else np.zeros(len(data.sd))
    rows = zip(data.compute.tolist(), data.reward.tolist(), errors.tolist(), strict=True)
    return replace(pilot, points=tuple(EvalPoint(0, *row) for row in rows))


def is_known(fit: Fit, within: float) -> bool:
    """True if A's interval reaches no further than `within` from its value, and no other flag is raised."""
    doubts = set(fit.flags) - HARMLESS - {"wide"}  # `within` takes its place
    return not doubts and not is_wide(fit.A, 0.0, within)


def simulate(
    prospect: Prospect,
    budgets: Sequence[float],  # compute of the whole run, ascending
    evaluations: Sequence[int],  # with those of the pilot at least MIN_POINTS
    eval_cost: float = 0.0,  # of one evaluation, in compute
    within: float = WITHIN,
    workers: int = 1,
    progress: Callable[[], None] = lambda: None,  # called after each fit
) -> list[Cell]:
    """A cell for every budget and number of evaluations. Independent of the number of workers."""
    spent = prospect.seen.points[-1].compute if prospect.seen.points else 0.0
    plans = [(budget, n) for budget in budgets for n in evaluations]
    tasks = [(prospect, i, budget, n, within) for budget, n in plans for i in range(len(prospect.sigmoids))]
    outcomes = []
    context, ignored = multiprocessing.get_context("spawn"), (signal.SIGINT, signal.SIG_IGN)  # we end them
    with ProcessPoolExecutor(workers, context, signal.signal, ignored) as pool:  # starts on first use
        for outcome in map(_trial, tasks) if workers == 1 else pool.map(_trial, tasks, chunksize=4):
            outcomes.append(outcome)
            progress()
    cells = []
    for k, (budget, n) in enumerate(plans):
        known, error = np.array(outcomes[k * len(prospect.sigmoids) : (k + 1) * len(prospect.sigmoids)]).T
        p = float(known.mean())
        se = (max(p * (1 - p), 1 / len(known)) / len(known)) ** 0.5  # not 0 if all or none are known
        cells.append(Cell(budget, n, budget - spent + eval_cost * n, p, se, float(np.median(error))))
    return cells


def cheapest(cells: Sequence[Cell]) -> Cell | None:
    """The cheapest plan that reaches CHANCE, which all longer runs with as many evaluations reach, too."""

    def reached(plan: Cell) -> bool:
        longer = (c for c in cells if c.evaluations == plan.evaluations and c.budget >= plan.budget)
        return all(c.chance >= CHANCE for c in longer)

    return min(filter(reached, cells), key=lambda cell: cell.cost, default=None)


def _trial(task: tuple[Prospect, int, float, int, float]) -> tuple[bool, float]:
    """Simulate one sigmoid up to a budget: whether its A is then known, and the error of its value."""
    prospect, i, budget, n, within = task
    truth, seen = prospect.sigmoids[i], prospect.seen
    rng = np.random.default_rng([i, n])  # the same noise at every budget, for smoother tables
    start = seen.points[-1].compute if seen.points else 0.0
    compute = np.linspace(start, budget, n + 1)[1:]
    white, rho, before = rng.normal(0, prospect.noise, n), prospect.autocorrelation, None
    if prospect.correlation_length:  # errors go on from that of the pilot's last point
        likely = 2 * prospect.noise  # that point can be an outlier
        before = float(np.clip(seen.points[-1].pass_rate - truth.reward(start), -likely, likely))
        rho = math.exp(-(compute[0] - start) / prospect.correlation_length)
    new = simulated(truth.reward, compute, autocorrelated(white, rho, before), prospect.reported_se)
    R0 = seen.R0
    if isinstance(R0, EvalPoint) and not seen.points:  # with a pilot it has been measured
        R0 = replace(R0, pass_rate=float(np.clip(truth.R0 + rng.normal(0, prospect.noise), 0, 1)))
    fit = fit_curve(replace(new, points=(*seen.points, *new.points), R0=R0), prior=None)
    return is_known(fit, within), abs(fit.A.value - truth.A)


def _residual_sd(pilot: Curve, fit: Fit, reported: float) -> float:
    """Standard deviation of the points around their curve, without outliers."""
    residual = np.array([p.pass_rate - float(fit.sigmoid.reward(p.compute)) for p in pilot.points])
    typical = 1.4826 * float(np.median(np.abs(residual)))
    residual = residual[np.abs(residual) <= OUTLIER * max(reported, typical)]
    return float(np.sqrt(np.sum(residual**2) / max(1, len(residual) - 3)))
