"""Curricula: how many prompts are open, easiest first, and how long completions may be, by optimizer step.

With t = min(1, step / steps), what grows from a share `start` to all of it has at that step the share

    start + (1 − start) · t    linear
    start^(1 − t)              exponential
"""

import math
from collections.abc import Iterable

from trainer.config import ConfigError, CurriculumConfig
from trainer.controller.sources import RowError, value_at
from trainer.types import Prompt


def open_count(config: CurriculumConfig, start: float, most: int, step: int) -> int:
    """The part of `most` that is open at an optimizer step (from 0), rounded up."""
    t = min(1.0, step / config.steps)
    share = {"none": 1.0, "linear": start + (1 - start) * t, "exponential": start ** (1 - t)}[config.kind]
    return math.ceil(round(share * most, 6))  # a product such as .1 · 30 is a little above 3


def completion_limit(config: CurriculumConfig, most: int, step: int | None) -> int:
    """Tokens of the longest completion, which the engine limits to `most`; an evaluation has no step."""
    return most if step is None else open_count(config, config.length_start, most, step)


def difficulties(prompts: Iterable[Prompt], column: str) -> dict[str, float]:
    """The number in a column of each prompt's row, by prompt id; `a.b` is column b within column a.

    ConfigError, with the row, where there is none.
    """
    numbers: dict[str, float] = {}
    for prompt in prompts:
        place = f"curriculum.by is {column!r}; {prompt.place or repr(prompt.text[:60])}"
        try:
            value = value_at(prompt.metadata, column)
        except RowError as e:
            raise ConfigError(f"{place}: {e}") from e
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(
                f"{place} has {value!r} there; expected a number, which is small for an easy prompt"
            )
        numbers[prompt.prompt_id] = float(value)
    return numbers
