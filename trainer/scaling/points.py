"""A run's reward over compute: what is fitted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

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
    points: tuple[EvalPoint, ...]  # compute is > 0 and never falls
    R0: EvalPoint | float | None  # measured (at compute 0), given, or unknown


def curve_of(name: str, unit: str, points: Iterable[EvalPoint]) -> Curve:
    """A run's evaluations, in any order, as a curve; what was measured at compute 0, if anything, is R0.

    Equal ones are one. Two versions may lie at one compute: steps can be faster than the books. ConfigError:
    a compute that is none.
    """
    unique = {(p.compute, p.pass_rate): p for p in points}
    for p in unique.values():
        if not 0 <= p.compute < math.inf:
            raise ConfigError(f"step {p.step}: compute is {p.compute:g}; expected a number of at least 0")
    ordered = sorted(unique.values(), key=lambda p: p.compute)
    starts = [p for p in ordered if p.compute == 0]
    return Curve(name, unit, tuple(ordered[len(starts) :]), _mean(starts) if starts else None)


def _mean(points: Sequence[EvalPoint]) -> EvalPoint:
    """Of evaluations of the same weights."""
    n = len(points)
    reward = math.fsum(p.pass_rate for p in points) / n
    return replace(
        points[0], pass_rate=reward, pass_rate_se=math.hypot(*(p.pass_rate_se for p in points)) / n
    )
