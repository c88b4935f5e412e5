"""A run's reward over compute: what is fitted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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
    """A run's evaluations as a curve; the one at compute 0, if there is one, is R0."""
    ordered = sorted(points, key=lambda p: p.compute)
    start = next((p for p in ordered if p.compute == 0), None)
    return Curve(name, unit, tuple(p for p in ordered if p.compute > 0), start)
