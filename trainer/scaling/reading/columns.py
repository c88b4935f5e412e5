"""Finds the columns of compute, reward, standard error and time by the names that trainers use."""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from trainer.config import ConfigError

HELD_OUT = r"(?:eval|evaluation|val|valid|validation|test|held_?out)"
TRAINED = r"(?:train|training|rollouts?)"
SCORE = r"(?:pass_rate|reward|accuracy|acc|score|solve_rate|success_rate|pass@1|pass_at_1|pass1)"
AT = r"(?:@|_at_)"  # verl replaces @ for MLflow
HELD_OUT_REWARD = (  # from the most to the least specific name; lower case
    # ours; TRL's eval/reward, val_accuracy; verl's, prime-rl's, tinker-cookbook's; OpenRLHF's, TRL's
    r"eval/pass_rate",
    rf"{HELD_OUT}[/_. -](?:mean_|avg_)?{SCORE}(?:[/_]mean)?",
    rf"(?:.+/)?val-core/.+/mean{AT}\d+|{HELD_OUT}/.+/(?:avg|mean){AT}\d+|{HELD_OUT}/env/all/reward/total",
    rf"(?:eval/)?eval_.+_pass1|val/test_score/.+|{HELD_OUT}[/_](?!.*token_).*{SCORE}s?(?:[/_]mean)?",
)
# The second is a part of an answer's score, if there is no plain one; value: TensorBoard's CSV.
PLAIN_REWARD = (
    rf"(?:mean_|avg_)?{SCORE}(?:[/_]mean)?|mean@\d+|value", rf"(?!{TRAINED}[/_]|.*token_)\w+_accuracy",
)  # fmt: skip
TRAINING = rf"(?:{TRAINED}|critic|rewards?)[/_].*{SCORE}s?(?:[/_]mean)?|rewards?/.+/mean|env/.+/total"
PLAIN_OR_TRAINING = "|".join((*PLAIN_REWARD, TRAINING))
REWARD = "|".join((*HELD_OUT_REWARD, PLAIN_OR_TRAINING))
TRAINED_BESIDE = (
    r"(?:.+/)?(?:(?:policy_|pg_|training )?loss|(?:approx_)?kl|grad_norm|lr|learning_rate|entropy)"
)
STEPS = (
    r"steps?(?: \(counted\))?", r"global_step", r"(?:train|training|trainer|eval)/global_step", r"_step",
    r"train(?:ing)?_step", r"iteration", r"(?:grpo|ppo|rl|sft|policy|optim(?:izer)?|update|gradient)_steps?",
)  # fmt: skip
LEDGER, FLOPS = "compute/total", "compute/flops"  # of our runs: device-hours and what was done in them
COMPUTE = (  # with the unit
    (LEDGER, "device-hours"),  # the ledger says of which devices; W&B and Trackio have none
    (FLOPS, "FLOPs"),
    (r"(?:.+/)?(?:(?:total|train|cum|cumulative)[_ -])?gpu[_ -]?(?:hours?|hrs?|h)", "GPU-hours"),
    (r"(?:.+/)?(?:(?:total|train|cum|cumulative)[_ -])?(?:core|cpu)[_ -]?(?:hours?|hrs?|h)", "core-hours"),
    (r"(?:.+/)?(?:(?:total|train|cum|cumulative)[_ -])?(?:flops?|flos)", "FLOPs"),
    (r"compute", "compute"),
    *((name, "steps") for name in STEPS),
)
UNITS = ("GPU-hours", "core-hours", "FLOPs", "steps")
TIME_UNITS = {  # seconds, and the names of the unit
    "ms": (1e-3, r"ms|msecs?|milliseconds?"),
    "s": (1.0, r"s|secs?|seconds?"),
    "min": (60.0, r"m|mins?|minutes?"),
    "h": (3600.0, r"h|hrs?|hours?"),
    "d": (86400.0, r"d|days?"),
}
TIME_WORD = (
    r"(?:wall|clock|wall_?clock|elapsed|train(?:ing)?|run|total|cumulative|relative|real|time|runtime)"
)
PER_STEP = (
    r"timing_s/step", r"perf/time_per_step", r"timing/train/total_step_time", r"time/step",
    r"(?:(?:train|training|time|timing|perf)/|total )?step[_ ]time",
    *(rf"(?:.+/)?(?:{unit})_per_step|step_time[_ ]\(?(?:{unit})\)?" for _, unit in TIME_UNITS.values()),
)  # fmt: skip
CLOCKS = (  # time since the start, or a date
    r"_runtime", r"relative time \(process\)", r"(?:time[_/ ]?)*elapsed",
    r"(?:elapsed|wall|total|cumulative)[_ ]?time", r"relative time \(wall\)", r"_timestamp", r"timestamp",
    r"date(?:time)?",
)  # fmt: skip
TIMES = (  # of a step, or a clock
    *(rf"(?:{TIME_WORD}[_ /-]+)+\(?(?:{unit})\)?" for _, unit in TIME_UNITS.values()),
    *(unit.partition("|")[2] for _, unit in TIME_UNITS.values()),  # hours, but not h
    r"time",
)
LABELS = "|".join((*(name for name, _ in COMPUTE), *CLOCKS, *TIMES, r"(?:.+/)?epoch", r"_.*"))  # of rows
ERROR = ("{}_se", "{}_stderr", "{}_sem", "{}/se", "{}/stderr")
LIKELY = {  # words in the names that a message lists first
    "--reward-column": r"reward|score|acc|pass|solve|success|correct",
    "--compute-column": r"compute|[gc]pu|core[_ -]?h|flop|flos|hour|step(?!.*per_sec)|epoch|iter",
    "--time-column": r"time|timing|(?<!per_)sec|hour|min(?:ute)?s?$|(?<![a-z])date|elapsed|clock",
    "--se-column": r"(?:^|[_/])(?:se|sem|std)|err",
}
PLAIN_ERROR = ("se", "stderr", "sem", "standard_error")


def reward_columns(columns: Sequence[str], choice: str | None) -> list[str]:
    """The chosen columns if they exist; else those with the most specific name for a held-out reward.

    `reward` beside `loss` or the like is that of the training batches.
    """
    if choice is not None:
        return _named(choice, columns)
    beside = any(matching(TRAINED_BESIDE, columns))
    names = HELD_OUT_REWARD if beside else (*HELD_OUT_REWARD, *PLAIN_REWARD)
    return next((held_out for pattern in names if (held_out := matching(pattern, columns))), [])


def part_columns(columns: Sequence[str], choice: str | None) -> list[str]:
    """The rewards of a run's tasks and further held-out sets; those with the chosen text in their names."""
    ours = matching(r"eval/.+/pass_rate", columns) if choice is None else []
    return ours or reward_columns(columns, choice)


def reward_column(columns: Sequence[str], choice: str | None) -> str:
    """The only one of `reward_columns`."""
    if choice is not None:
        return existing(choice, columns, "--reward-column")
    rewards, candidates = reward_columns(columns, None), reward_candidates(columns)
    if len(rewards) == 1:
        return rewards[0]
    why, input_alone = "several columns could be the reward;", " (for one input alone: RUN@reward=NAME)"
    if not rewards:
        why, input_alone = "no column is recognized as a reward;", ""
        if matching(PLAIN_OR_TRAINING, columns):
            why = "no column is recognized as a held-out reward; if you mean that of the training batches,"
    raise ConfigError(f"{why} set --reward-column to one of {listed(candidates)}{input_alone}")


def reward_candidates(columns: Sequence[str]) -> list[str]:
    """The columns that may be the reward: held-out ones, else those of the training batches, else all."""
    return reward_columns(columns, None) or matching(PLAIN_OR_TRAINING, columns) or list(columns)


def training_reward(columns: Sequence[str], reward: str) -> str:
    """A note if a reward is that of the training batches, or may be: its name is not that of a held-out one.
    Empty for a column pass_rate without loss or the like beside it, as of one's own table."""
    if _is_held_out(reward) or re.match(rf"{HELD_OUT}[/_. -]", reward, re.IGNORECASE):  # eval/reward/judge
        return ""
    if matching(TRAINING, [reward]) or any(matching(TRAINED_BESIDE, columns)):
        return f"R is {reward!r}, by its name the reward of the training batches, not of held-out prompts."
    if re.search("reward|score", reward, re.IGNORECASE):
        return f"R is {reward!r}, whose name does not say that the prompts are held out."
    if not matching(r"(?:mean_|avg_)?pass_rate(?:[/_]mean)?", [reward]):
        return f"R is {reward!r}, taken for the reward of held-out prompts: the name does not say."
    return ""


def alike(reward: str) -> str:
    """The same name for what trainers log as `eval/x`, `eval_x` and `eval/eval_x`."""
    return re.sub(r"^(?:eval[/_])+", "eval/", reward)


def summed(columns: Iterable[str], reward: str) -> list[str]:
    """The rewards of TRL of which `reward` is the weighted sum; none if there are fewer than two."""
    pattern = re.escape(alike(reward)) + r"s/.+/mean"
    parts = [c for c in columns if re.fullmatch(pattern, alike(c))]
    return parts if len(parts) > 1 else []


def other_rewards(columns: Sequence[str], chosen: str) -> list[str]:
    """Further held-out rewards, unless the chosen one is ours, whose name leaves no doubt."""
    others = [c for c in columns if c != chosen and _is_held_out(c)]
    return [] if matching(HELD_OUT_REWARD[0], [chosen]) else others


def compute_columns(columns: Sequence[str], choice: str | None) -> list[tuple[str, str]]:
    """The recognized columns, the best first, or the chosen one; with the unit (else the name itself)."""
    names = columns if choice is None else [existing(choice, columns, "--compute-column")]
    recognized = [(c, unit) for pattern, unit in COMPUTE for c in matching(pattern, names)]
    return recognized or [(c, c) for c in names if choice is not None]


def time_columns(columns: Sequence[str], choice: str | None) -> list[tuple[str, bool | None]]:
    """The columns of time, the best first, or the chosen one; and whether they are per step (None: ?)."""
    names = columns if choice is None else [existing(choice, columns, "--time-column")]
    kinds: dict[tuple[str, ...], bool | None] = {PER_STEP: True, CLOCKS: False, TIMES: None}
    recognized = [(c, kind) for group, kind in kinds.items() for name in group for c in matching(name, names)]
    return recognized or [(c, None) for c in names if choice is not None]


def time_unit(column: str) -> str | None:
    """The unit that a column's name ends or begins with; None: none."""
    for unit, (_, names) in TIME_UNITS.items():
        if re.fullmatch(rf"(?:.*[ _/(-])?(?:{names})\)?(?:_per_step)?", column, re.IGNORECASE):
            return unit
    return None


def error_column(columns: Sequence[str], reward: str, choice: str | None) -> str | None:
    """The column of the reward's standard error; None: there is none."""
    if choice is not None:
        return existing(choice, columns, "--se-column")
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
    """The column with this name, or with this text in its name. ConfigError: there is none, or several."""
    candidates = _named(name, columns)
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise ConfigError(f"several columns contain {name!r}; set {flag} to one of {listed(candidates)}")
    parts = {p.lower(): c for c in columns[::-1] for p in (*re.split(r"[/_@ ]", c), *c.split("/"), c)}
    close = dict.fromkeys(parts[p] for p in get_close_matches(name.lower(), parts, cutoff=0.7))
    meant = f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""
    raise ConfigError(f"no column {name!r}{meant}; set {flag} to one of {listed(columns, flag)}")


def likely(column: str, flag: str) -> bool:
    """True if a column is likely to be the one that an option names."""
    return bool(re.search(LIKELY[flag], column, re.IGNORECASE))


def _named(name: str, columns: Sequence[str]) -> list[str]:
    """The column of this name; else those that contain it, only held-out rewards if there are any."""
    if name in columns:
        return [name]
    known = [c for c in columns if len(name) > 2 and name.lower() in c.lower()]
    return [c for c in known if _is_held_out(c)] or known


def _is_held_out(column: str) -> bool:
    return bool(matching("|".join(HELD_OUT_REWARD), [column]))


def likeliest(columns: Iterable[str], flag: str = "--reward-column") -> list[str]:
    """The columns, those that are likely for the option first."""
    first = HELD_OUT + ".*" if flag == "--reward-column" else LIKELY[flag]
    return sorted(columns, key=lambda c: (not likely(c, flag), not matching(first, [c]), c))


def listed(columns: Iterable[str], flag: str = "--reward-column") -> str:
    """Names for an error line, those that are likely for the option first; 20 of many."""
    names = likeliest(columns, flag)
    return ", ".join(names[:20]) + (f" … ({len(names)} in all)" if len(names) > 20 else "")
