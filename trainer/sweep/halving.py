"""Stops recipes that will hardly win, at shares of the budget, by what the fits so far predict of its end.

At each rung every recipe has a probability to be the best at the whole budget, other seeds allowed for. Those
with the least are stopped, as many as together have at most RISK: so the winner is lost with that probability
at most, if the fits are right, and near-equals all go on. All runs reach a rung before any goes beyond it.
"""

from collections.abc import Mapping

from trainer.scaling.compare import compare
from trainer.sweep.results import inputs_of, read
from trainer.sweep.spec import Status, Sweep

RUNGS = (0.25, 0.5)  # shares of the budget
RISK = 0.02  # probability at each rung that the best recipe is stopped


def least_likely(best: Mapping[str, float], risk: float) -> dict[str, float]:
    """The recipes to stop, from the probability of each to be the best; never the likeliest."""
    stop, sum_ = {}, 0.0
    for name, probability in sorted(best.items(), key=lambda item: item[1])[: len(best) - 1]:
        sum_ += probability
        if sum_ > risk:
            break
        stop[name] = probability
    return stop


def stop_recipes(sweep: Sweep, share: float, status: Status) -> None:
    """Decide at a rung, and write down what was decided: a sweep that is started again does not ask again."""
    inputs, _ = inputs_of(sweep)
    groups = {k: [r.curve for r in of] for k, of in read(inputs).items() if k not in status.stopped}
    if len(groups) > 1:
        ((_, standings),) = compare(groups, [sweep.budget]).budgets
        stop = least_likely({s.recipe: s.best for s in standings}, RISK)
        status.stopped |= {name: {"share": share, "probability": p} for name, p in stop.items()}
    status.decided.append(share)
    status.write()
