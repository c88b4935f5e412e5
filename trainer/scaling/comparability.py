"""Differences between runs that make a comparison doubtful before any curve is fitted."""

from collections.abc import Mapping, Sequence

from trainer.config import ConfigError
from trainer.scaling.curve.sigmoid import EvalPoint
from trainer.scaling.reading.columns import alike
from trainer.scaling.reading.read import Reading
from trainer.scaling.reading.settings import SETTINGS

Groups = Mapping[str, Sequence[Reading]]
HELD_OUT = "held-out set"
COLUMN, START = "column", "R0"  # known of every run, beside its settings
METRIC = (COLUMN, HELD_OUT, "scorer")  # where these differ, rewards are not the same metric


def warnings(groups: Groups) -> list[str]:
    """Whole sentences about what the runs of some recipes do not share, as far as their files say it."""
    sentences = []
    if differ := _differ(groups, COLUMN):
        sentences.append(
            f"The rewards are of different columns: {differ}. The comparison holds only if they are the same "
            "metric on the same held-out prompts."
        )
    for key in SETTINGS:
        if differ := _differ(groups, key):
            sentences.append(f"The runs differ in the {key}: {differ}.")
    if differ := _differ(groups, START).replace("'", ""):
        sentences.append(f"R0, on which B and C_mid depend, is not known alike: {differ}.")
    readings = [r for runs in groups.values() for r in runs]
    if len(readings) > 1 and any(r.curve.unit == "steps" for r in readings):
        sentences.append("Compute is in steps: comparable only if a step costs the same in all runs.")
    return sentences


def incomparable(groups: Groups, same_metric: bool) -> str:
    """The reason why the rewards do not say which recipe is better; empty if they do."""
    differing = [f"{key}s" for key in METRIC if _differ(groups, key)]
    if same_metric or not differing:
        return ""
    return (
        f"The rewards are of different {' and '.join(differing)}: the numbers below do not say which recipe "
        "is better. If they are the same metric on the same prompts, give --same-metric."
    )


def check_seeds(groups: Groups) -> None:
    """ConfigError: the runs of one recipe do not have the same reward, so they are not its seeds."""
    for name, readings in groups.items():
        for key, named in ((COLUMN, "reward column"), (HELD_OUT, HELD_OUT)):
            values = list(dict.fromkeys(v for r in readings if (v := _value(r, key)) is not None))
            if len(values) > 1:
                raise ConfigError(
                    f"{name}: its runs differ in the {named} ({values[0]!r}, {values[1]!r}); expected one "
                    "for all seeds of a recipe: name them as recipes of their own, or choose the column "
                    "(--reward-column)"
                )


def _value(reading: Reading, key: str) -> str | None:
    """A setting of a run, the name of its rewards, or how its R0 is known; None: its files do not say it."""
    if key == START:
        R0 = reading.curve.R0
        return "unknown" if R0 is None else "measured" if isinstance(R0, EvalPoint) else "given"
    return alike(reading.reward_column) if key == COLUMN else reading.settings.get(key)


def _differ(groups: Groups, key: str) -> str:
    """`'x' (a), 'y' (b and c)`; empty if all recipes have the same values."""
    names: dict[str, list[str]] = {}
    for name, readings in groups.items():
        for value in sorted({v for r in readings if (v := _value(r, key)) is not None}):
            names.setdefault(value, []).append(name)
    if len(names) < 2:
        return ""
    return ", ".join(f"'{value}' ({' and '.join(who)})" for value, who in names.items())
