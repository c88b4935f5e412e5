"""The curves of a run's tasks, or of its held-out prompts by difficulty, and what they share: `fit --by`.

The parts of a run have its compute axis, and one start: what a model learns in its first steps, such as the
format of the answers, fades at one pace in all of them. So the transient's T is inferred from all parts
together: p(T | all) ∝ p(T) Π p(part | T). Law and steepness are inferred for each part alone.

Prompts are sorted by difficulty for each evaluation anew, by their pass rates in all others. Sorted by the
same evaluation, or by the first, hard prompts would be the unlucky ones, and would seem to improve
(regression to the mean).
"""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import numpy as np

from trainer.config import ConfigError
from trainer.scaling.curve.average import DEFAULT, Prior
from trainer.scaling.curve.families import reach
from trainer.scaling.curve.points import MIN_POINTS, checked
from trainer.scaling.curve.sigmoid import Array, Curve, EvalPoint, curve_of
from trainer.scaling.earlier import evidence
from trainer.scaling.reading.columns import part_columns
from trainer.scaling.reading.held_out import read_worth
from trainer.scaling.reading.options import ReadOptions, expand
from trainer.scaling.reading.read import Reading, column_names, read_inputs

BUCKETS = ("hard", "medium", "easy")


def by_task(text: str, options: ReadOptions) -> dict[str, Reading]:
    """The curve of each task or held-out set of a run. ConfigError: it has one alone."""
    source = expand(text, options)[0]
    columns = part_columns(column_names(Path(source.runs[0])), source.options.reward_column)
    if len(columns) < 2:
        raise ConfigError(
            f"{text}: --by task needs the rewards of several tasks; expected columns such as "
            f"eval/NAME/pass_rate, or --reward-column with the text that they share; found {len(columns)}"
        )
    split = [column.split("/") for column in columns]
    first, last = _shared(split), _shared([words[::-1] for words in split])
    parts = {}
    for column, words in zip(columns, split, strict=True):
        name = "/".join(words[first : len(words) - last]) or words[first - 1]  # math beside math/aime
        parts[name] = _only(text, replace(source.options, reward_column=column))
    return parts


def _shared(names: Sequence[Sequence[str]]) -> int:
    """The number of words with which all names begin."""
    return len(list(takewhile(lambda words: len(set(words)) == 1, zip(*names, strict=False))))


def _only(text: str, options: ReadOptions) -> Reading:
    """The one run of an input."""
    readings = read_inputs([text], options)
    if len(readings) > 1:
        names = ", ".join(reading.curve.name for reading in readings[:3])
        raise ConfigError(
            f"{text} holds {len(readings)} runs ({names}, …), and --by is of one: give it alone"
        )
    return readings[0]


def by_difficulty(text: str, options: ReadOptions) -> tuple[Reading, dict[str, Curve]]:
    """A run of ours, and the curve of each third of its held-out prompts. ConfigError: too few of them."""
    reading = _only(text, options)
    name = re.fullmatch(r"eval/(?:(.+)/)?pass_rate", reading.reward_column)
    if not name:
        raise ConfigError(
            f"{text}: --by difficulty needs pass rates by prompt, which run folders of ours have of "
            f"eval/pass_rate or eval/NAME/pass_rate, not of {reading.reward_column}"
        )
    points = {point.step: point for point in reading.curve.evaluations}
    worth = read_worth(reading.path, name[1], {step: p.compute for step, p in points.items()})[0]
    evaluations, _, prompts = worth.by_prompt.shape
    if evaluations <= MIN_POINTS or prompts < len(BUCKETS):
        raise ConfigError(
            f"{text}: {evaluations} evaluations of {prompts} prompts; expected more than {MIN_POINTS} of "
            f"{len(BUCKETS)} or more"
        )
    at = sorted(points.values(), key=lambda p: p.compute)
    curves = buckets(worth.by_prompt[:, 0], worth.ns[-1], [p for p in at if p.compute in worth.compute])
    unit = reading.curve.unit
    reading = replace(reading, error="of the completions of each prompt")
    return reading, {k: curve_of(f"{reading.curve.name}, {k}", unit, p) for k, p in curves.items()}


def buckets(rates: Array, samples: int, points: Sequence[EvalPoint]) -> dict[str, list[EvalPoint]]:
    """The evaluations of each third of the prompts, hardest first, by the rates in all other evaluations.

    `rates`, (evaluations, prompts), of `samples` each, were measured at `points`, (evaluations,).
    """
    total, curves = rates.sum(0), dict[str, list[EvalPoint]]()
    for now, point in zip(rates, points, strict=True):
        order = np.argsort(total - now, kind="stable")
        for name, chosen in zip(BUCKETS, np.array_split(order, len(BUCKETS)), strict=True):
            p = now[chosen]
            variance = float((p * (1 - p)).sum()) / (samples - 1) if samples > 1 else 0.0
            part = replace(point, pass_rate=float(p.mean()), pass_rate_se=math.sqrt(variance) / len(p))
            curves.setdefault(name, []).append(part)
    return curves


def shared_start(curves: Sequence[Curve]) -> list[Prior]:
    """The prior of each part of a run: of the transient's T, with what the other parts say of it."""
    last, first = curves[0].points[-1].compute, reach(checked(curves[0]))[0]
    seen = tuple(t for t in DEFAULT.transients if t.T * last >= first)
    before = replace(DEFAULT, transients=seen, unit=last)
    p0, *each = (_starts(prior) for prior in (before, *(evidence(curve, before) for curve in curves)))
    priors = []
    for i in range(len(curves)):
        p = p0 * np.prod([p / p0 for j, p in enumerate(each) if j != i], axis=0)
        shares = (p / p.sum()).tolist()
        chosen = (replace(t, probability=share) for t, share in zip(seen, shares, strict=False))
        priors.append(replace(before, transients=tuple(chosen)))
    return priors


def _starts(prior: Prior) -> Array:
    """The probability of each transient, and last of none."""
    p = [t.probability for t in prior.transients]
    return np.maximum([*p, 1 - sum(p)], 1e-6)
