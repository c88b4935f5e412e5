"""The progress of an evaluation and its results, on a terminal or in a plain log."""

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from trainer.launcher.terminal_plot import clock, printable
from trainer.scaling.layout import amount

NUMBER = r"^(?:(.+?)/)??((?:reward/)?[^/]+)$"  # the set, if it is a further one, and what was measured
PLAIN_EVERY_S = 10.0  # least time between two lines of progress where the output is no terminal
FIRST = {"pass_rate": ("pass rate", ".3f"), "mean_reward": ("reward", "+.3f")}  # title, form by number
LAST = {  # after the reward's parts, pass@k, maj@k and best@k
    "mean_tokens": ("tokens", ".1f"),
    "truncated": ("truncated", ".1%"),
    "prompts": ("prompts", ".0f"),
    "samples": ("k", ".0f"),
    "seconds": ("seconds", ".1f"),
}


class View:
    """A bar over all prompts of all checkpoints; as a context manager it restores the terminal."""

    def __init__(self, checkpoints: int) -> None:
        self._checkpoints, self._began, self._last = checkpoints, time.monotonic(), 0.0
        console = Console(stderr=True, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("prompts", total=None)

    def __enter__(self) -> "View":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, prompts: int) -> None:
        """The number of prompts that each checkpoint is asked is known."""
        self._bar.reset(self._task, total=prompts * self._checkpoints)

    def advance(self, step: int) -> None:
        """A prompt of this step is done."""
        self._bar.update(self._task, advance=1, description=f"step {step}: prompts")
        task, now = self._bar.tasks[self._task], time.monotonic()
        if self._bar.disable and now - self._last > PLAIN_EVERY_S:
            self._last = now
            share = f"{task.completed:g} of {task.total:g} prompts"
            self.log(f"step {step}: {share}, {clock(task.time_remaining)} left")

    def log(self, text: str) -> None:
        """A line of text."""
        line = f"[{clock(time.monotonic() - self._began)}] {printable(text)}"
        self._bar.console.print(line, markup=False, soft_wrap=True)


def table(rows: Sequence[Mapping[str, Any]], name: str, unit: str) -> list[list[str]]:
    """The results as cells, the head first: a row for each checkpoint and set."""
    cells = []
    for row in rows:
        sets: dict[str, dict[str, Any]] = {}
        for key in row.keys() - {"step", "compute/total"}:
            for part, number in re.findall(NUMBER, key.removeprefix(f"eval/{name}/")):
                sets.setdefault(part, {})[number] = row[key]
        place = {"step": str(row["step"])}
        if "compute/total" in row:
            place[unit] = amount(row["compute/total"])
        for part in sorted(sets):
            of_set = {"set": part or "all"} if len(sets) > 1 else {}
            cells.append(place | of_set | _texts(sets[part]))
    head = list(dict.fromkeys(column for one in cells for column in one))
    return [head, *([one.get(column, "–") for column in head] for one in cells)]


def _texts(scores: Mapping[str, Any]) -> dict[str, str]:
    middle = [key for key in scores if re.fullmatch(r"reward/.+(?<!_se)|(?:pass|maj|best)@\d+", key)]
    texts = {}
    for key, (title, form) in (FIRST | {key: (key, ".3f") for key in middle} | LAST).items():
        if key in scores:
            error = scores.get(f"{key}_se") if key != "prompts" else None
            value = "–" if scores[key] is None else f"{scores[key]:{form}}"
            texts[title] = value if error is None else f"{value} ± {error:.3f}"
    return texts


def show(rows: Sequence[Sequence[str]]) -> None:
    """Print a table, its head first."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(map(str.rjust, row, widths)))
