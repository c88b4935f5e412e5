"""The logs and checkpoints of a run, and the compute at which a checkpoint is kept for good."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from trainer.config.values import ConfigError, NonNegativeInt, PositiveFloat, PositiveInt

NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggingConfig:
    checkpoint_every: NonNegativeInt = 25
    """Steps between checkpoints; there is always one at the end and on Ctrl-C. 0: only those."""
    keep_checkpoints: PositiveInt = 2
    """Checkpoints kept; older ones are deleted once a newer one is complete."""
    keep_at: tuple[PositiveFloat, ...] | str = ()
    """Device-hours (the ledger's total) whose checkpoints are kept for good, to evaluate a curve's points again (`python -m trainer.evaluate RUN`) or to branch from them: a list, `every 0.5`, or `every 2x from 0.5` (0.5, 1, 2, 4 ...). Each is written with the first step after."""
    samples_per_step: NonNegativeInt = 2
    """Groups whose completions are written to samples.jsonl at each step."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    wandb: bool = False
    """Log to Weights & Biases as well (needs `pip install wandb`)."""
    trackio: bool = False
    """Log to Trackio as well, samples and forecasts included (needs `pip install trackio`): `trackio show` shows them, and TRACKIO_SPACE_ID puts them into a Space."""

    @property
    def next_kept(self) -> Callable[[float], float]:
        """`keep_at`, read: the first chosen compute after a given one; infinity if there is none."""
        if not isinstance(points := self.keep_at, str):
            return lambda compute: min((point for point in points if point > compute), default=math.inf)
        equal = re.fullmatch(f"every {NUMBER}", points)
        growing = re.fullmatch(f"every {NUMBER}x from {NUMBER}", points)
        numbers = [float(number) for match in (equal or growing,) if match for number in match.groups()]
        if not numbers or min(numbers) <= 0 or (growing and numbers[0] <= 1):
            raise ConfigError(
                "logging.keep_at: expected a list of device-hours, 'every NUMBER' or 'every NUMBERx from "
                f"NUMBER' with a factor above 1, such as 'every 2x from 0.5'; given {points!r}"
            )
        if equal:
            return lambda compute: (math.floor(compute / numbers[0]) + 1) * numbers[0]

        def grown(compute: float) -> float:
            factor, point = numbers
            while point <= compute:
                point *= factor
            return point

        return grown
