"""The rows of a run in the order of its steps; of steps made twice by a resumed run, the later rows count."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trainer.scaling.reading import columns as names
from trainer.scaling.reading.options import ReadOptions
from trainer.scaling.reading.values import Row, Values, filled, is_known, numbers

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Log:
    """A run, sorted by step, without rows that were made again."""

    rows: list[Row]
    columns: list[str]  # with any value, in the order of the file
    reward: str  # column of R
    step: str | None  # column of the steps
    steps: Values  # (rows,)
    resumed: Mask  # (rows,): the first row after a resumption
    notes: list[str]  # what is left out, assumed or chosen while reading it: whole sentences

    @property
    def has_reward(self) -> Mask:
        """(rows,): True where there was an evaluation."""
        return np.array([is_known(row.get(self.reward)) for row in self.rows])


def log_of(rows: Sequence[Row], columns: list[str], reward: str, options: ReadOptions) -> Log:
    """Find the steps, sort by them, and drop the earlier rows where a resumed run went back to a step."""
    notes: list[str] = []
    step, steps = _steps(rows, columns, reward, options, notes)
    keep, resumed = np.ones(len(rows), bool), np.zeros(len(rows), bool)
    for start in _resumptions(rows, steps):
        replaced = keep[:start] & (steps[:start] >= steps[start])
        keep[:start] &= ~replaced
        resumed[start] = True
        text = (
            f"Steps {steps[start]:g} to {steps[:start][replaced].max():g} were made twice, because the run "
            f"was resumed; the later rows count, {replaced.sum()} earlier ones are left out, and their "
            "compute is not counted."
        )
        if steps[start] <= np.nanmin(steps):
            text += " If the file holds several runs instead, split it, or add a column 'run'."
        notes.append(text)
    order = np.flatnonzero(keep)
    order = order[np.argsort(np.nan_to_num(steps[order], nan=-np.inf), kind="stable")]
    return Log([rows[i] for i in order], columns, reward, step, steps[order], resumed[order], notes)


def _steps(
    rows: Sequence[Row], columns: Sequence[str], reward: str, options: ReadOptions, notes: list[str]
) -> tuple[str | None, Values]:
    """The name of the column of steps, and the step of each row (NaN: unknown)."""
    known = [c for name in names.STEPS for c in names.matching(name, columns)]
    if options.compute_column in known or (options.compute_column and options.gpu_hours_per_step):
        known.insert(0, names.existing(options.compute_column, columns, "--compute-column"))
    if not known:
        return None, np.full(len(rows), np.nan)
    step, *others = known
    steps = numbers(rows, step)
    for other in others:
        values = numbers(rows, other)
        lacks, has_other = np.isnan(steps), ~np.isnan(values)
        both = ~lacks & has_other
        if both.any() and (lacks & has_other).any() and (steps[both] == values[both]).all():
            steps = np.where(lacks, values, steps)
            notes.append(f"Where {step!r} is missing, {other!r} is used, which is equal everywhere else.")
    steps = filled(steps)
    evaluated = np.array([row.get(reward) not in (None, "") for row in rows])
    before = np.flatnonzero(np.isnan(steps) & evaluated)
    if len(before) == 1 and len(steps) > 1 and not np.isnan(steps).all():
        steps[: before[0] + 1] = 0.0
        notes.append(f"The first reward, without {step!r}, is taken to be from before step 1.")
    return step, steps


def _resumptions(rows: Sequence[Row], steps: Values) -> list[int]:
    """The rows where a step and most of its columns come again, and the steps after it, too.

    Rows of training and of evaluation may share some columns. A value that is logged late (an evaluation
    beside the training) or once more (an evaluation of an old checkpoint) is no resumption.
    """
    known = np.flatnonzero(~np.isnan(steps)).tolist()
    if not any(steps[a] > steps[b] for a, b in pairwise(known)):
        return []
    labels = set(names.matching(names.LABELS, dict.fromkeys(c for row in rows for c in row)))
    following = {known[-1]: np.inf}  # by row: the step of the first row after it that has another step
    for i, after in reversed(list(pairwise(known))):
        following[i] = following[after] if steps[i] == steps[after] else float(steps[after])
    seen: dict[float, set[str]] = {}
    last, starts = -np.inf, []
    for i in known:
        step = float(steps[i])
        columns = {c for c, value in rows[i].items() if is_known(value)} - labels
        again = 2 * len(columns & seen.get(step, set())) > len(columns)
        if again and step < last and step < following[i] <= last:
            starts.append(i)
            seen = {s: c for s, c in seen.items() if s < step}
            last = step
        seen.setdefault(step, set()).update(columns)
        last = max(last, step)
    return starts
