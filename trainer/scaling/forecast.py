"""The live forecast of a run: what its next evaluation should be, how it will end, and whether the rest pays.

Each evaluation is held against the interval that the evaluations before it gave for it. The run has left its
band when two in a row miss on the same side, or one misses by twice the interval: then the law no longer
describes it, and something in the training has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trainer.scaling.fit import EQUAL_ERROR, Estimate, Fit, estimate, fit_run
from trainer.scaling.points import EvalPoint

WORTH = 0.01  # a gain that is worth the compute: half of the margin between two ceilings (arXiv 2510.13786)
UNLIKELY = 0.1  # probability of that gain below which the hint is to stop
OVER = 1e-9  # of the end: less than this is left by rounding alone


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is known at one evaluation. `None`: too few evaluations to tell."""

    fit: Fit
    foreseen: Estimate | None = None  # this evaluation, as those before foretold it
    missed: int = 0  # evaluations in a row above (+) or below (−) what was foreseen
    far: bool = False  # this one by more than twice the interval
    end: Estimate | None = None  # the law at the run's end
    gain: Estimate | None = None  # of it, what is still to come
    worth: float | None = None  # probability that this is at least WORTH

    @property
    def alarm(self) -> bool:
        """The run has left its band."""
        return abs(self.missed) >= 2 or self.far

    @property
    def verdict(self) -> str:
        """ "left its band", "stop", "go on", or "" where there is nothing to say."""
        if self.alarm:
            return "left its band"
        if self.gain is None or self.worth is None:
            return ""
        return "stop" if self.worth < UNLIKELY else "go on" if self.gain.low >= WORTH else ""

    def metrics(self) -> dict[str, float]:
        """For metrics.jsonl; what is not known is left out."""
        line: dict[str, float] = {}
        estimates = {"foreseen": self.foreseen, "end": self.end, "gain": self.gain}
        if self.fit.identified:
            estimates["ceiling"] = self.fit.A
        for name, e in estimates.items():
            if e is not None:
                line |= {f"forecast/{name}": e.value, f"forecast/{name}_low": e.low}
                line[f"forecast/{name}_high"] = e.high
        if self.worth is not None:
            line["forecast/worth"] = self.worth
        if self.foreseen is not None:
            line["forecast/alarm"] = float(self.alarm)
        return line


def outlook(points: Sequence[EvalPoint], end: float, before: Outlook | None) -> Outlook:
    """The outlook after the last of `points`, in order; `end` is the compute at which the run will end."""
    fit, point = fit_run(points), points[-1]
    foreseen, missed, far = None, 0, False
    if before is not None and before.fit.draws is not None and point.compute > 0:
        foreseen = foresee(before.fit, replace(point, pass_rate_se=_error(points)))
        side = int(point.pass_rate > foreseen.high) - int(point.pass_rate < foreseen.low)
        missed = side + (before.missed if side * before.missed > 0 else 0)
        reach = foreseen.high - foreseen.value if side > 0 else foreseen.value - foreseen.low
        far = side != 0 and abs(point.pass_rate - foreseen.value) > 2 * reach
    if fit.draws is None or end * (1 - OVER) <= point.compute:
        return Outlook(fit, foreseen, missed, far)
    last = fit.draws.reward(end)
    gains = last - fit.draws.reward(point.compute)
    law = fit.law
    gain = estimate(float(law.reward(end) - law.reward(point.compute)), gains, fit.confidence)
    worth = float((gains >= WORTH).mean())
    return Outlook(fit, foreseen, missed, far, fit.at(end), gain, worth)


def _error(points: Sequence[EvalPoint]) -> float:
    """The last point's, as the fit takes it: 0 (a perfect score, or not told) is that of the surest point."""
    told = [p.pass_rate_se for p in points if p.compute > 0 and p.pass_rate_se > 0]
    return points[-1].pass_rate_se or min(told, default=EQUAL_ERROR)


def foresee(fit: Fit, point: EvalPoint) -> Estimate:
    """What an evaluation at the point's compute should give: the law's draws and its own noise."""
    if fit.draws is None:
        raise ValueError("the fit has too few points to foresee anything")
    law = fit.draws.reward(point.compute)
    noise = max(point.pass_rate_se, 1e-3) * max(1.0, fit.scatter)
    seen = law + noise * np.random.default_rng(0).standard_normal(len(law))
    return estimate(float(fit.law.reward(point.compute)), np.clip(seen, 0, 1), fit.confidence)


def hint(now: Outlook, unit: str, rest: float) -> str:
    """The verdict in words; empty where there is none. `rest`: compute still to be spent."""
    if now.verdict == "left its band" and now.foreseen is not None:
        side = "above" if now.missed > 0 else "below"
        band = f"{now.foreseen.low:.3f} to {now.foreseen.high:.3f}"
        return (
            f"the run has left its band ({side}: {band} was foreseen); the forecast no longer holds. "
            "Look at entropy, truncation and ρ"
        )
    if not now.verdict or now.gain is None:
        return ""
    won = f"{now.gain.value:+.3f} ({now.gain.low:+.3f} to {now.gain.high:+.3f})"
    if now.verdict == "stop":
        return f"stop? the rest ({rest:.3g} {unit}) is likely to win only {won}"
    return f"go on: the rest ({rest:.3g} {unit}) is likely to win {won}"
