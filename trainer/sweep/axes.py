"""Axes of a sweep: keys of the configuration, and the values that each is to have (`--vary KEY=VALUE,VALUE`).

A value is written as on trainer.main's command line. Commas separate values, but for those within a list in
brackets or a mapping in braces: evaluation.pass_at=[1,4],[1,8] has two.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate, product
from pathlib import Path

from trainer.config import ConfigError
from trainer.config.typed import build, fields, from_text, suggest

Axes = Mapping[str, Sequence[str]]  # values as on the command line, by key
Point = Mapping[str, str]  # one value of each axis, by key


def read_axes(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The axes of `--vary`, with numbers in one notation. ConfigError, one line, if anything is wrong."""
    axes: dict[str, tuple[str, ...]] = {}
    for text in texts:
        key, sign, listed = text.partition("=")
        key = key.replace("-", "_")
        if not sign:
            raise ConfigError(
                f"--vary {text}: expected KEY=VALUE,VALUE, such as learner.lr=1e-4,3e-4; recipes come first"
            )
        if key == "seed":
            raise ConfigError("--vary seed: every recipe is trained with seeds 0 to N - 1; give --seeds N")
        if key not in fields():
            raise ConfigError(
                f"--vary: unknown key {key!r}{suggest(key)}; python -m trainer.main --help lists them all"
            )
        if key in axes:
            raise ConfigError(f"--vary {key} is there twice; expected all its values in one")
        hint, values = fields()[key][0], dict[str, str]()
        for raw in _split(listed):
            value = build(from_text(hint, raw), hint, "--vary", key)
            if repr(value) in values:
                raise ConfigError(f"--vary {key}: {raw} is there twice; expected each value once")
            values[repr(value)] = repr(value) if type(value) in (int, float) else raw
        if len(values) == 1:
            raise ConfigError(
                f"--vary {text}: there is one value; expected two or more (what all runs share follows --)"
            )
        axes[key] = tuple(values.values())
    return axes


def _split(listed: str) -> list[str]:
    """The texts between commas that no bracket or brace encloses."""
    depths = accumulate((character in "[{") - (character in "]}") for character in listed)
    ends = [i for i, depth in enumerate(depths) if listed[i] == "," and depth == 0]
    starts = [0, *(end + 1 for end in ends)]
    return [listed[i:j].strip() for i, j in zip(starts, [*ends, None], strict=True)]


def points(axes: Axes, paired: bool) -> list[Point]:
    """The grid of all values; or `paired`, the first of each axis, the second, and so on."""
    counts = {key: len(values) for key, values in axes.items()}
    if paired and not (len(counts) > 1 and len(set(counts.values())) == 1):
        listed = ", ".join(f"{key} with {n} values" for key, n in counts.items()) or "none"
        raise ConfigError(f"--zip: expected two or more --vary, each with as many values; given {listed}")
    combined = zip(*axes.values(), strict=True) if paired else product(*axes.values())
    return [dict(zip(axes, values, strict=True)) for values in combined]


def suffix(point: Point) -> str:
    """The point as the end of a recipe's name, such as -lr_0.0003-prompts_per_step_64."""
    last, text = [key.rpartition(".")[2] for key in point], ""
    for name, (key, value) in zip(last, point.items(), strict=True):
        readable = re.sub(r"[^\w.-]+", "_", Path(value).name).strip("_")
        text += f"-{key if last.count(name) > 1 else name}_{readable}"
    return text
