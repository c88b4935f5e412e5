"""Finds the columns of compute, reward, standard error and time by the names that trainers use."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from trainer.config import ConfigError

HELD_OUT = r"(?:eval|evaluation|val|valid|validation|test|held_?out)"
SCORE = r"(?:pass_rate|reward|accuracy|acc|score|solve_rate|success_rate|pass@1|pass_at_1|pass1)"
REWARD = (  # from the most to the least specific name; lower case
    r"eval/pass_rate",  # ours
    rf"{HELD_OUT}[/_. -](?:mean_|avg_)?{SCORE}(?:[/_]mean)?",  # eval/reward, val_accuracy
    rf"(?:.+/)?val-core/.+/mean@\d+|{HELD_OUT}/.+/(?:avg|mean)@\d+",  # verl; prime-rl
    rf"(?:eval/)?eval_.+_pass1|val/test_score/.+|{HELD_OUT}[/_].*{SCORE}s?(?:[/_]mean)?",  # OpenRLHF; TRL
    rf"(?:mean_|avg_)?{SCORE}(?:[/_]mean)?|mean@\d+|value",  # value: TensorBoard's CSV
)
TRAINING = rf"(?:train|training|critic|rollout|reward|rewards)[/_].*{SCORE}?s?(?:[/_]mean)?"
STEPS = (
    r"steps?", r"global_step", r"(?:train|training|trainer|eval)/global_step", r"_step",
    r"train(?:ing)?_step", r"iteration",
)  # fmt: skip
COMPUTE = (  # with the unit
    (r"compute/total", "compute/total"),  # of our runs: the ledger has its unit
    (r"(?:.+/)?(?:(?:total|train|cum|cumulative)[_ -])?gpu[_ -]?(?:hours?|hrs?|h)", "GPU-hours"),
    (r"(?:.+/)?(?:(?:total|train|cum|cumulative)[_ -])?(?:core|cpu)[_ -]?(?:hours?|hrs?|h)", "core-hours"),
    (r"(?:.+/)?(?:(?:total|train|cum|cumulative)[_ -])?(?:flops?|flos)", "FLOPs"),
    (r"compute", "compute"),
    *((name, "steps") for name in STEPS),
)
UNITS = ("GPU-hours", "core-hours", "FLOPs", "steps")
PER_STEP = (r"timing_s/step", r"perf/time_per_step", r"time/step", r"step_time", r"(?:.+/)?seconds_per_step")
CLOCKS = (  # seconds since the start, or since 1970
    r"_runtime", r"relative time \(process\)", r"elapsed(?:_s|_seconds)?", r"wall_time", r"wall time",
    r"relative time \(wall\)", r"_timestamp", r"timestamp",
)  # fmt: skip
ERROR = ("{}_se", "{}_stderr", "{}_sem", "{}/se", "{}/stderr")
PLAIN_ERROR = ("se", "stderr", "sem", "standard_error")


def reward_columns(columns: Sequence[str], given: str | None) -> list[str]:
    """The given column if it exists; else those with the most specific name for a held-out reward."""
    if given is not None:
        return [c for c in columns if c == given]
    return next((found for pattern in REWARD if (found := matching(pattern, columns))), [])


def reward_column(columns: Sequence[str], given: str | None) -> str:
    """The only one of `reward_columns`."""
    if given is not None:
        return existing(given, columns, "--reward-column")
    found = reward_columns(columns, None)
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(
            f"several columns could be the reward; set --reward-column to one of {listed(found)}"
        )
    if trained := matching(TRAINING, columns):
        raise ConfigError(
            "no column is recognized as a held-out reward; if you mean that of the training batches, "
            f"set --reward-column to one of {listed(trained)}"
        )
    raise ConfigError(f"no column is recognized as a reward; set --reward-column to one of {listed(columns)}")


def compute_column(columns: Sequence[str], given: str | None) -> tuple[str, str]:
    """The given column or the first recognized one, and the unit in its name (else the name itself)."""
    column, unit = _recognized(COMPUTE, columns, given, "--compute-column", "compute")
    return column, unit or column


def step_column(columns: Sequence[str], given: str | None) -> str:
    """The given column, or the one that counts steps."""
    return _recognized([(name, None) for name in STEPS], columns, given, "--compute-column", "steps")[0]


def seconds_column(columns: Sequence[str], given: str | None) -> tuple[str, bool | None]:
    """The column of seconds, and whether they are per step; None: its name does not say."""
    known = [(name, True) for name in PER_STEP] + [(name, False) for name in CLOCKS]
    return _recognized(known, columns, given, "--seconds-column", "seconds")


def _recognized(
    known: Iterable[tuple[str, Any]], columns: Sequence[str], given: str | None, flag: str, meaning: str
) -> tuple[str, Any]:
    """The given column, or the first with a known name; and what is known of it (None: nothing)."""
    names = columns if given is None else [existing(given, columns, flag)]
    for pattern, knowledge in known:
        if found := matching(pattern, names):
            return found[0], knowledge
    if given is None:
        raise ConfigError(f"no column is recognized as {meaning}; set {flag} to one of {listed(columns)}")
    return given, None


def find_step(columns: Sequence[str]) -> str | None:
    """The column that counts steps, if there is one."""
    return next((c for name in STEPS for c in matching(name, columns)), None)


def error_column(columns: Sequence[str], reward: str, given: str | None) -> str | None:
    """The column of the reward's standard error; None: there is none."""
    if given is not None:
        return existing(given, columns, "--se-column")
    known = (*(form.format(reward) for form in ERROR), *PLAIN_ERROR)
    return next((c for name in known for c in columns if c.lower() == name.lower()), None)


def unit_of(text: str) -> str:
    """A known unit in its standard spelling; any other text unchanged."""
    plain = re.sub(r"[ _-]", "", text.lower())
    return next((u for u in UNITS if plain.rstrip("s") == re.sub("-", "", u.lower()).rstrip("s")), text)


def matching(pattern: str, columns: Iterable[str]) -> list[str]:
    """The columns whose whole name matches, in upper or lower case."""
    return [c for c in columns if re.fullmatch(pattern, c, re.IGNORECASE)]


def existing(name: str, columns: Sequence[str], flag: str) -> str:
    """The column, or a ConfigError if there is none of this name."""
    if name not in columns:
        raise ConfigError(f"no column {name!r}; set {flag} to one of {listed(columns)}")
    return name


def listed(columns: Iterable[str]) -> str:
    """Names for an error line; the first 20 of many."""
    names = sorted(columns)
    return ", ".join(names[:20]) + (f" … ({len(names)} in all)" if len(names) > 20 else "")
