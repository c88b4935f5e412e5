"""What makes a comparison of runs doubtful before any curve is fitted: what they do not share."""

from collections.abc import Mapping, Sequence

from trainer.config import ConfigError
from trainer.scaling.curve.sigmoid import EvalPoint
from trainer.scaling.reading.columns import alike
from trainer.scaling.reading.read import Reading
from trainer.scaling.reading.settings import SETTINGS

Groups = Mapping[str, Sequence[Reading]]
HELD_OUT = "held-out set"
METRIC = (HELD_OUT, "scorer")  # settings without which rewards are not the same metric


def warnings(groups: Groups) -> list[str]:
    """Whole sentences about what the runs of some recipes do not share, as far as their files say it."""
    found = []
    if differ := _differ(_columns(groups)):
        found.append(
            f"The rewards are of different columns: {differ}. The comparison holds only if they are the same "
            "metric on the same held-out prompts."
        )
    for key in SETTINGS:
        if differ := _differ(_known(groups, key)):
            found.append(f"The runs differ in the {key}: {differ}.")
    starts = {name: sorted({_start(r) for r in readings}) for name, readings in groups.items()}
    if differ := _differ(starts, quote=""):
        found.append(f"R0, on which B and C_mid depend, is not known alike: {differ}.")
    readings = [r for runs in groups.values() for r in runs]
    if len(readings) > 1 and any(r.curve.unit == "steps" for r in readings):
        found.append("Compute is in steps: comparable only if a step costs the same in all runs.")
    return found


def incomparable(groups: Groups, same_metric: bool) -> str:
    """Why the rewards do not say which recipe is better; empty if they do."""
    differing = [f"{key}s" for key in METRIC if _differ(_known(groups, key))]
    if _differ(_columns(groups)):
        differing.insert(0, "columns")
    if same_metric or not differing:
        return ""
    return (
        f"The rewards are of different {' and '.join(differing)}: the numbers below do not say which recipe "
        "is better. If they are the same metric on the same prompts, give --same-metric."
    )


def _columns(groups: Groups) -> Mapping[str, Sequence[str]]:
    return {name: sorted({alike(r.reward_column) for r in readings}) for name, readings in groups.items()}


def _known(groups: Groups, key: str) -> Mapping[str, Sequence[str]]:
    """The values of a setting by recipe, where any is known."""
    values = {
        name: sorted({r.settings[key] for r in readings if key in r.settings})
        for name, readings in groups.items()
    }
    return {name: known for name, known in values.items() if known}


def check_seeds(groups: Groups) -> None:
    """ConfigError: the runs of one recipe do not have the same reward, so they are not its seeds."""
    for name, readings in groups.items():
        for key, values in (
            ("reward column", [alike(r.reward_column) for r in readings]),
            (HELD_OUT, [r.settings[HELD_OUT] for r in readings if HELD_OUT in r.settings]),
        ):
            if len(set(values)) > 1:
                one, other = list(dict.fromkeys(values))[:2]
                raise ConfigError(
                    f"{name}: its runs differ in the {key} ({one!r}, {other!r}); expected one for all seeds "
                    "of a recipe: name them as recipes of their own, or choose the column (--reward-column)"
                )


def _start(reading: Reading) -> str:
    R0 = reading.curve.R0
    return "unknown" if R0 is None else "measured" if isinstance(R0, EvalPoint) else "given"


def _differ(values: Mapping[str, Sequence[str]], quote: str = "'") -> str:
    """`'x' (a), 'y' (b and c)`; empty if all names have the same values."""
    names: dict[str, list[str]] = {}
    for name, several in values.items():
        for value in several:
            names.setdefault(value, []).append(name)
    if len(names) < 2:
        return ""
    return ", ".join(f"{quote}{value}{quote} ({' and '.join(who)})" for value, who in names.items())
