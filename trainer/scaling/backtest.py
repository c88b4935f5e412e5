"""Would the forecast have held? A curve's first half foretells its end, and what came is held against it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from trainer.scaling.fit import LEAST_POINTS, Estimate, fit_curve
from trainer.scaling.points import Curve
from trainer.scaling.text import amount, paragraph

SHARE = 0.5  # of the compute


@dataclass(frozen=True, slots=True)
class Backtest:
    """A forecast from the points up to `seen`, and what came at `end`."""

    seen: float  # compute
    end: float
    foretold: Estimate  # the law's reward at `end`
    came: float  # the last evaluation
    came_se: float  # 0: not known
    identified: bool  # whether the first part told the ceiling

    @property
    def error(self) -> float:
        """What came beyond what was foretold."""
        return self.came - self.foretold.value


def backtest(curve: Curve, share: float = SHARE) -> Backtest | None:
    """None where the first part has too few points for a fit, or holds them all."""
    last = curve.points[-1] if curve.points else None
    early = tuple(p for p in curve.points if last and p.compute <= share * last.compute)
    if last is None or len(early) < LEAST_POINTS:
        return None
    fit = fit_curve(replace(curve, points=early))
    seen = float(np.max([p.compute for p in early]))
    return Backtest(
        seen, last.compute, fit.at(last.compute), last.pass_rate, last.pass_rate_se, fit.identified
    )


def backtest_words(test: Backtest | None, unit: str) -> str:
    """For a terminal; empty where there is nothing to say."""
    if test is None:
        return ""
    e = test.foretold
    return paragraph(
        f"From the first {amount(test.seen)} {unit} alone, where the ceiling was "
        f"{'' if test.identified else 'not yet '}identified, the end was foretold as {e.value:.3f} "
        f"({e.low:.3f} to {e.high:.3f}); it came to {test.came:.3f}."
    )
