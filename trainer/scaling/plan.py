"""How much of a pilot, and evaluated how often, until the ceiling is known: simulated and fitted.

A law is drawn (from a prior, or from what a pilot leaves possible), evaluations of it are made up to a
budget, with noise, and the fit that a user would make of them says how near it knows A. Seeds are fixed.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.stats import qmc

from trainer.config import ConfigError
from trainer.scaling.fit import FLAGS, HARMLESS, MOST_POINTS, Fit, averaged, checked, fit_curve
from trainer.scaling.points import Curve, EvalPoint
from trainer.scaling.sigmoid import Sigmoid

Array = NDArray[np.float64]

WITHIN = 0.02  # A is known when its interval reaches no further than this from its value
CHANCE = 0.8  # of that, from which a plan is good enough
NO_NOISE = 1e-4  # no evaluation has so little: a pass rate of ten million samples
WANDERS = 0.5  # probability from which errors are simulated to
OUTLIER = 3.0  # standard deviations from which a residual tells nothing of the noise
HOPELESS = {  # flags of a pilot after which anything may come
    "falling": "mend the run, then plan",
    "flat": "nothing tells where its rise would be: train on until it rises, evaluate with less noise, or "
    "plan without it (--c-mid, --r0)",
    "misfit": "a law that does not describe the pilot foresees nothing: look at its points",
}
A_RANGE, B_RANGE = (0.5, 0.75), (1.1, 2.5)  # arXiv 2510.13786, Table 1: A .585 to .71, B 1.09 to 2.44


@dataclass(frozen=True, slots=True)
class Prospect:
    """What may come: laws, equally likely, and how they will be seen."""

    laws: tuple[Sigmoid, ...]
    seen: Curve  # what there is already: R0 and, with a pilot, its points
    noise: float  # standard deviation of an evaluation
    error: float  # standard error that the fit is told; 0: none
    C_mid: float  # of the likeliest law, for orientation
    memory: float = 0.0  # compute after which errors correlate by 1/e; 0: they are independent


@dataclass(frozen=True, slots=True)
class Cell:
    """A plan, and how it went in the simulations."""

    budget: float
    evaluations: int  # with a pilot: beyond it
    cost: float  # in compute, evaluations included; with a pilot: beyond it
    chance: float  # that A is known
    doubt: float  # standard error of that share, by the number of simulations
    error: float  # median |Â − A|


def prior(
    C_mid: float,
    R0: float,
    noise: float,
    runs: int,
    A: tuple[float, float] = A_RANGE,
    B: tuple[float, float] = B_RANGE,
) -> Prospect:
    """Laws with A and B uniform over their ranges (a Latin square); R0 will be measured before step 1."""
    unit = qmc.LatinHypercube(d=2, rng=np.random.default_rng(0)).random(runs)
    laws = tuple(
        Sigmoid(R0, A[0] + a * (A[1] - A[0]), B[0] + b * (B[1] - B[0]), C_mid) for a, b in unit.tolist()
    )
    return Prospect(laws, Curve("", "", (), EvalPoint(0, 0.0, R0, noise)), noise, noise, C_mid)


def after_pilot(pilot: Curve, runs: int, noise: float | None = None) -> tuple[Prospect, Fit]:
    """Laws that the pilot's fit leaves possible, evenly over their A; its noise, unless that is given."""
    pilot = _thinned(pilot)
    fit = fit_curve(pilot)
    if fit.draws is None:
        raise ConfigError(f"{pilot.name}: {FLAGS['too-few-points']}; give --c-mid, --r0 and --noise instead")
    for flag, reason in HOPELESS.items():
        if flag in fit.flags:
            raise ConfigError(f"{pilot.name}: {FLAGS[flag]}; {reason}")
    order = np.argsort(fit.draws.A, kind="stable")
    chosen = order[((np.arange(runs) + 0.5) / runs * len(order)).astype(int)]
    columns = (fit.draws.R0, fit.draws.A, fit.draws.B, fit.draws.C_mid)
    laws = tuple(Sigmoid(*(float(x[i]) for x in columns)) for i in chosen)
    data = checked(pilot)
    told = float(np.median(data.sd)) if data.sd_known else 0.0
    scatter = _scatter(pilot, fit, told)
    noise, given = noise or max(told, scatter), noise is not None
    if noise < NO_NOISE and not given:
        raise ConfigError(
            f"{pilot.name}: its evaluations lie on the curve to {noise:.1g}, and no errors are told: how "
            "uncertain an evaluation is cannot be seen; give --noise"
        )
    memory = 0.0
    if fit.wander > WANDERS and scatter > told / 2:  # else they hardly err at all
        memory = -float(np.median(np.diff(data.compute))) / math.log(fit.correlation)
    return Prospect(laws, pilot, noise, told, fit.C_mid.value, memory), fit


def _thinned(pilot: Curve) -> Curve:
    """As the fit sees it: neighbours of a long series averaged, which new evaluations shall not be."""
    if len(pilot.points) <= MOST_POINTS:
        return pilot
    data = averaged(checked(pilot))
    errors = data.sd if data.sd_known else np.zeros(len(data.sd))
    rows = zip(data.compute.tolist(), data.reward.tolist(), errors.tolist(), strict=True)
    return replace(pilot, points=tuple(EvalPoint(0, *row) for row in rows))


def is_known(fit: Fit, within: float) -> bool:
    """Whether A's interval reaches no further than that from its value, and nothing else is in doubt."""
    doubts = set(fit.flags) - HARMLESS - {"wide"}  # how wide is what is asked here
    return max(fit.A.high - fit.A.value, fit.A.value - fit.A.low) <= within and not doubts


def simulate(
    prospect: Prospect,
    budgets: Sequence[float],  # all of the run's compute, ascending
    evaluations: Sequence[int],  # at least LEAST_POINTS, with the pilot's
    eval_cost: float = 0.0,  # of an evaluation, in compute
    within: float = WITHIN,
    workers: int = 1,
    progress: Callable[[], None] = lambda: None,  # called after each fit
) -> list[Cell]:
    """A cell for every budget and number of evaluations; the same for any number of workers."""
    spent = prospect.seen.points[-1].compute if prospect.seen.points else 0.0
    plans = [(budget, n) for budget in budgets for n in evaluations]
    tasks = [(prospect, i, budget, n, within) for budget, n in plans for i in range(len(prospect.laws))]
    outcomes = []
    if workers == 1:
        for task in tasks:
            outcomes.append(_trial(task))
            progress()
    else:
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            for outcome in pool.map(_trial, tasks, chunksize=4):
                outcomes.append(outcome)
                progress()
    cells = []
    for k, (budget, n) in enumerate(plans):
        known, error = np.array(outcomes[k * len(prospect.laws) : (k + 1) * len(prospect.laws)]).T
        p = float(known.mean())
        doubt = (max(p * (1 - p), 1 / len(known)) / len(known)) ** 0.5  # nor is all or none ever certain
        cells.append(Cell(budget, n, budget - spent + eval_cost * n, p, doubt, float(np.median(error))))
    return cells


def cheapest(cells: Sequence[Cell], chance: float = CHANCE) -> Cell | None:
    """The plan of least cost that reaches a chance, as do all longer ones evaluated as often."""
    good = [
        cell
        for cell in cells
        if all(
            c.chance >= chance for c in cells if c.evaluations == cell.evaluations and c.budget >= cell.budget
        )
    ]
    return min(good, key=lambda cell: cell.cost, default=None)


def _trial(task: tuple[Prospect, int, float, int, float]) -> tuple[bool, float]:
    """One law seen up to a budget: whether its A is known then, and how far off its value is."""
    prospect, i, budget, n, within = task
    law, seen = prospect.laws[i], prospect.seen
    rng = np.random.default_rng([i, n])  # the same luck at every budget: less noise between cells
    start = seen.points[-1].compute if seen.points else 0.0
    compute = np.linspace(start, budget, n + 1)[1:]
    reward = np.clip(law.reward(compute) + _errors(prospect, law, compute, rng), 0, 1)
    points = [EvalPoint(0, float(c), float(r), prospect.error) for c, r in zip(compute, reward, strict=True)]
    R0 = seen.R0
    if isinstance(R0, EvalPoint) and not seen.points:  # with a pilot it has been measured
        R0 = replace(R0, pass_rate=float(np.clip(law.R0 + rng.normal(0, prospect.noise), 0, 1)))
    found = fit_curve(Curve("", "", (*seen.points, *points), R0))
    return is_known(found, within), abs(found.A.value - law.A)


def _errors(prospect: Prospect, law: Sigmoid, compute: Array, rng: np.random.Generator) -> Array:
    """(n,), of evaluations at equal distances; where a pilot wanders they wander on from its last point."""
    errors = rng.normal(0, prospect.noise, len(compute))
    if prospect.memory:
        last = prospect.seen.points[-1]
        likely = 2 * prospect.noise  # the last may be an outlier
        before = float(np.clip(last.pass_rate - law.reward(last.compute), -likely, likely))
        rho = math.exp(-(compute[0] - last.compute) / prospect.memory)
        for i, fresh in enumerate(errors):
            errors[i] = before = rho * before + (1 - rho**2) ** 0.5 * fresh
    return errors


def _scatter(pilot: Curve, fit: Fit, told: float) -> float:
    """Standard deviation of the points around their law, without outliers."""
    off = np.array([p.pass_rate - float(fit.law.reward(p.compute)) for p in pilot.points])
    off = off[np.abs(off) <= OUTLIER * max(told, 1.4826 * float(np.median(np.abs(off))))]
    return float(np.sqrt(np.sum(off**2) / max(1, len(off) - 3)))
