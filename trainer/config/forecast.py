"""Settings by which a run ends itself, by the forecast of its own curve; scaling/forecast.py decides."""

import re
from dataclasses import dataclass

from trainer.config.values import ConfigError, PositiveInt


@dataclass(frozen=True, slots=True)
class StopRule:
    """`forecast.stop`, read."""

    text: str
    gain: float  # of reward: less than this is not worth the compute
    per_doubling: bool  # the gain of a doubling of the compute; False: of what is left until the planned end


@dataclass(frozen=True, kw_only=True, slots=True)
class ForecastConfig:
    stop: str = ""
    """Ends the run, as `pipeline.max_compute` does, once the forecast says with 90% probability that more compute gains less than a reward: `gain<0.005 per doubling` of the compute, or `gain<0.005 until the end` (the planned one). Empty: never (docs/curve.md)."""
    like: tuple[str, ...] = ()
    """Finished runs of the same kind, as folders: forecasts learn from them which law such runs follow and how far off forecasts of them were, as with `--like` of `python -m trainer.scaling`."""
    patience: PositiveInt = 3
    """Evaluations in a row whose forecasts must all say so before `stop` ends the run."""

    @property
    def rule(self) -> StopRule | None:
        """`stop`, read; None if it is empty. ConfigError: it is no such rule."""
        if not self.stop:
            return None
        match = re.fullmatch(r"gain *< *(0?\.\d*[1-9]\d*) (per doubling|until the end)", self.stop)
        if match is None:
            raise ConfigError(
                "forecast.stop: expected 'gain<NUMBER per doubling' or 'gain<NUMBER until the end' with a reward "
                f"between 0 and 1, such as 'gain<0.005 per doubling'; given {self.stop!r}"
            )
        return StopRule(self.stop, float(match[1]), match[2] == "per doubling")
