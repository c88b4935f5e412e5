"""Runs that were resumed from a checkpoint: of steps made twice, the later rows count."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trainer.scaling.reading.columns import LABELS, matching
from trainer.scaling.reading.values import Row, Values, is_known


@dataclass(frozen=True, slots=True)
class Survivors:
    """The rows of a run, sorted by step, without those that a resumed run made again."""

    rows: list[Row]
    steps: Values  # (rows,)
    resumed: NDArray[np.bool_]  # (rows,): the first row after a resumption
    notes: tuple[str, ...]


def survivors(rows: Sequence[Row], steps: Values) -> Survivors:
    """Sort by step; where a resumed run went back to a step, the earlier rows from it on are dropped."""
    starts = _resumptions(rows, steps)
    keep = np.ones(len(rows), bool)
    resumed = np.zeros(len(rows), bool)
    notes = []
    for start in starts:
        replaced = keep[:start] & (steps[:start] >= steps[start])
        keep[:start] &= ~replaced
        resumed[start] = True
        last = steps[:start][replaced].max()
        text = (
            f"Steps {steps[start]:g} to {last:g} were made twice, because the run was resumed; the later "
            f"rows count, {replaced.sum()} earlier ones are left out, and their compute is not counted."
        )
        if steps[start] <= np.nanmin(steps):
            text += " If the file holds several runs instead, split it, or add a column 'run'."
        notes.append(text)
    order = np.flatnonzero(keep)
    order = order[np.argsort(np.nan_to_num(steps[order], nan=-np.inf), kind="stable")]
    return Survivors([rows[i] for i in order], steps[order], resumed[order], tuple(notes))


def _resumptions(rows: Sequence[Row], steps: Values) -> list[int]:
    """The rows where a step and most of its columns come again, and the steps after it, too.

    Rows of training and of evaluation may share some columns. A value that is logged late (an evaluation
    beside the training) or once more (an evaluation of an old checkpoint) is no resumption.
    """
    known = np.flatnonzero(~np.isnan(steps)).tolist()
    if not any(steps[a] > steps[b] for a, b in pairwise(known)):
        return []
    labels = set(matching(LABELS, dict.fromkeys(c for row in rows for c in row)))
    later = dict(zip(known, _next_steps(steps[known].tolist()), strict=True))
    seen: dict[float, set[str]] = {}
    last, starts = -np.inf, []
    for i in known:
        step = float(steps[i])
        columns = {c for c, value in rows[i].items() if is_known(value)} - labels
        again = 2 * len(columns & seen.get(step, set())) > len(columns)
        if again and step < last and step < later[i] <= last:
            starts.append(i)
            seen = {s: c for s, c in seen.items() if s < step}
            last = step
        seen.setdefault(step, set()).update(columns)
        last = max(last, step)
    return starts


def _next_steps(steps: Sequence[float]) -> list[float]:
    """For each row, the step of the first row after it that has another step; infinite: there is none."""
    result = [np.inf] * len(steps)
    for i in range(len(steps) - 2, -1, -1):
        result[i] = steps[i + 1] if steps[i + 1] != steps[i] else result[i + 1]
    return result
