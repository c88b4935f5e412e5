"""Whether a run may end by itself (`forecast.stop`), decided from its recorded evaluations alone.

A run ends where each of its last `patience` forecasts, one an evaluation, gives a probability of 90 % or
more, averaged over laws, that further compute gains less than the rule says. No forecast counts of a run that
has not risen or has fallen, or that raises an alarm.

The flags not-sigmoid and other-shape do not count: they doubt a sigmoid's ceiling, and the average has other
laws (docs/curve.md has the numbers).
"""

from collections.abc import Sequence

from trainer.config.forecast import StopRule
from trainer.scaling.curve.fit import median
from trainer.scaling.curve.shape import UNLIKELY
from trainer.scaling.curve.sigmoid import EvalPoint
from trainer.scaling.earlier import Earlier
from trainer.scaling.forecast import Forecast, forecast, is_over


def reason_to_stop(
    points: Sequence[EvalPoint],
    now: Forecast,
    end: float,
    unit: str,
    rule: StopRule,
    patience: int,
    like: Earlier | None = None,
) -> str:
    """What a run forgoes that ends after the last of `points`, as a sentence; empty: it goes on.

    `now` is the forecast after that point; `end` is the compute of the whole run, as planned; `like`, what
    earlier runs say.
    """
    compute, look, says = points[-1].compute, None, list[bool]()
    if is_over(compute, end) or not says_stop(now, compute, end, rule):
        return ""
    for n in range(max(1, len(points) - patience - 1), len(points) + 1):  # an alarm takes two evaluations
        look = forecast(points[:n], 0.0, look, like)
        says.append(says_stop(look, points[n - 1].compute, end, rule))
    if len(says) < patience or not all(says[-patience:]):
        return ""
    rewards = now.fit.forecast.reward([compute, 2 * compute, end])
    gains = [median(rewards[:, i] - rewards[:, 0], now.fit.confidence) for i in (1, 2)]
    doubled, forgone = (f"{e.value:+.3f} ({e.low:+.3f} to {e.high:+.3f})" for e in gains)
    return (
        f"a doubling of the compute would probably gain {doubled} [{rule.text} for {patience} evaluations "
        f"in a row]; forgone until the planned end: {forgone}, about {end - compute:.3g} {unit} saved"
    )


def says_stop(look: Forecast, compute: float, end: float, rule: StopRule) -> bool:
    """Whether a forecast made at this compute is one to act on and says that more gains too little."""
    if not look.fit.predictable or look.alarm:
        return False
    rewards = look.fit.forecast.reward([compute, 2 * compute if rule.per_doubling else end])
    return float((rewards[:, 1] - rewards[:, 0] >= rule.gain).mean()) < UNLIKELY
