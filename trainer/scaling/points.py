"""A run's reward over compute: what is fitted."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from trainer.config import ConfigError


@dataclass(frozen=True, slots=True)
class EvalPoint:
    """An evaluation: C in the ledger's unit, mean@k with its standard error (0: not known)."""

    step: int
    compute: float
    pass_rate: float
    pass_rate_se: float


@dataclass(frozen=True, slots=True)
class Curve:
    """The evaluations of one run, and its reward at zero compute."""

    name: str
    unit: str  # of compute: "GPU-hours", "core-hours", "FLOPs", "steps", or the column's name
    points: tuple[EvalPoint, ...]  # ascending in compute, which is > 0
    R0: EvalPoint | float | None  # measured (at compute 0), given, or unknown


def curve_of(name: str, unit: str, points: Iterable[EvalPoint]) -> Curve:
    """A run's evaluations, in any order, as a curve; the one at compute 0, if there is one, is R0.

    Equal ones are one. ConfigError: two rewards at one compute, or a compute that is none.
    """
    unique = {(p.compute, p.pass_rate): p for p in points}
    for p in unique.values():
        if not 0 <= p.compute < math.inf:
            raise ConfigError(f"step {p.step}: compute is {p.compute:g}; expected a number of at least 0")
    ordered = sorted(unique.values(), key=lambda p: p.compute)
    for one, other in pairwise(ordered):
        if one.compute == other.compute:
            raise ConfigError(
                f"two rewards at compute {one.compute:g}: {one.pass_rate:g} and {other.pass_rate:g}; "
                "expected one: average them, or split what holds several runs"
            )
    start = next((p for p in ordered if p.compute == 0), None)
    return Curve(name, unit, tuple(p for p in ordered if p.compute > 0), start)
