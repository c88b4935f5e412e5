"""Stops recipes that will hardly win, at shares of the budget, by what the fits so far predict of its end.

At each rung every recipe has a probability to be the best at the whole budget, other seeds allowed for. Those
with the least are stopped, as many as together have at most RISK: so the winner is lost with that probability
at most, if the fits are right, and near-equals all go on. All runs reach a rung before any goes beyond it.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from trainer.scaling.budgets import recipe_curves
from trainer.scaling.fit import Fit, fit_curve
from trainer.sweep.results import read
from trainer.sweep.spec import Status, Sweep

RUNGS = (0.25, 0.5)  # shares of the budget
RISK = 0.01  # probability at each rung that the best recipe is stopped


def chances(fits: Mapping[str, Sequence[Fit]], budget: float) -> dict[str, float]:
    """The probability of each recipe to have the highest reward at a budget, by the fits of its runs.

    Without recipes of which a run has fallen: there is no forecast of them, and they are not stopped.
    """
    known = {
        name: [fit for fit in runs if fit.averaged_draws is not None]
        for name, runs in fits.items()
        if all(fit.predictable for fit in runs)
    }
    if not known:
        return {}
    near = np.array([0.9, 1.0, 1.1]) * budget  # the slope there is part of the prior
    best = np.argmax([x[:, 1] for x in recipe_curves(list(known.values()), near)[0]], axis=0)
    return {name: float((best == i).mean()) for i, name in enumerate(known)}


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
    going = {k: [fit_curve(r.curve) for r in of] for k, of in groups.items() if k not in status.stopped}
    stop = least_likely(chances(going, sweep.budget), RISK)
    status.stopped |= {name: {"share": share, "probability": p} for name, p in stop.items()}
    status.decided.append(share)
    status.write()
