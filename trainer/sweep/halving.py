"""Stops recipes that will hardly win, at shares of the budget, by what the runs so far predict of its end.

At each rung every recipe has a probability to be the best at the whole budget, other seeds allowed for. Those
with the least are stopped, as many as together have at most RISK, so near-equals all go on. All runs reach a
rung before any goes beyond it.

All runs of a sweep learn the same task, and mostly follow the same law. So each forecast knows the law, the
steepness and the transient that the other recipes' runs show (as `--like`, but of runs that go on, too).
"""

from collections.abc import Mapping, Sequence

import numpy as np

from trainer.scaling.budgets import recipe_curves
from trainer.scaling.curve.average import Average, average
from trainer.scaling.curve.fit import fit_curve
from trainer.scaling.curve.points import averaged, checked
from trainer.scaling.curve.sigmoid import Curve
from trainer.scaling.earlier import MIN_LEARNED, learn, prior_of_kind
from trainer.sweep.results import read
from trainer.sweep.spec import Status, Sweep

RUNGS = (0.25, 0.375, 0.5, 0.75)  # shares of the budget
RISK = 0.02  # probability at each rung that the best recipe is stopped, if the forecasts are right


def forecasts(groups: Mapping[str, Sequence[Curve]]) -> dict[str, list[Average]]:
    """The forecasts of each recipe's runs, with what those of the other recipes say.

    Without recipes of which a run has fallen, or has too few evaluations: they are not stopped.
    """
    known = {name: runs for name, runs in groups.items() if all(map(_is_predictable, runs))}
    if not known:
        return {}
    earlier = learn(known, seen=1.0)
    return {
        name: [average(averaged(checked(run)), prior_of_kind(earlier.without(run))) for run in runs]
        for name, runs in known.items()
    }


def _is_predictable(run: Curve) -> bool:
    return run.R0 is not None and len(run.points) >= MIN_LEARNED and fit_curve(run, prior=None).predictable


def chances(runs: Mapping[str, Sequence[Average]], budget: float) -> dict[str, float]:
    """The probability of each recipe to have the highest reward at a budget, by its runs' forecasts."""
    if not runs:
        return {}
    near = np.array([0.9, 1.0, 1.1]) * budget  # the slope there is part of the prior
    best = np.argmax([x[:, 1] for x in recipe_curves(list(runs.values()), near)[0]], axis=0)
    return {name: float((best == i).mean()) for i, name in enumerate(runs)}


def least_likely(best: Mapping[str, float], risk: float) -> dict[str, float]:
    """The recipes to stop, from the probability of each to be the best; never the likeliest."""
    stop, total = {}, 0.0
    for name, probability in sorted(best.items(), key=lambda item: item[1])[:-1]:
        total += probability
        if total > risk:
            break
        stop[name] = probability
    return stop


def stop_recipes(sweep: Sweep, share: float, status: Status) -> None:
    """Decide at a rung, and write down what was decided: a sweep that is started again does not ask again."""
    groups, _ = read(sweep)
    going = {k: [r.curve for r in runs] for k, runs in groups.items() if k not in status.stopped}
    stop = least_likely(chances(forecasts(going), sweep.budget), RISK)
    status.stopped |= {name: {"share": share, "probability": p} for name, p in stop.items()}
    status.decided.append(share)
    status.write()
