"""The progress of a sweep: a line for each run that trains, the number done, the time left."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from rich.console import Console
from rich.live import Live
from rich.table import Table

from trainer.run_folder import complete
from trainer.sweep.spec import Run, Status, Sweep

TAIL_BYTES = 1 << 17  # of metrics.jsonl: many lines
PLAIN_EVERY_S = 60.0  # where the output is no terminal


class Progress(NamedTuple):
    """The progress of a run, by its folder."""

    step: int = 0
    steps: int = 0  # 0: unknown
    reward: float | None = None  # of the last evaluation
    compute: float = 0.0
    wall_s: float = 0.0
    forecast: str = ""  # of the reward at the end

    def share(self, budget: float) -> float:
        """The share of its work that is done."""
        by_step = self.step / self.steps if self.steps else 0.0
        return min(1.0, max(by_step, self.compute / budget if budget else 0.0))


def progress(folder: Path) -> Progress:
    """The progress by the end of metrics.jsonl, which may be half written."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            lines = [line for line in file if line.startswith(b'{"step"') and line.endswith(b"\n")]
        rows = [{"step": 0, "compute/total": 0.0}, *map(json.loads, lines)]
        steps = yaml.safe_load((folder / "config.yaml").read_text())["pipeline"]["steps"]
        wall_s = json.loads((folder / "ledger.json").read_text())["wall_s"]
    except (OSError, ValueError):
        return Progress()  # it starts
    step, compute = (max(row[key] for row in rows) for key in ("step", "compute/total"))
    last: dict[str, Any] = next((row for row in reversed(rows) if "eval/pass_rate" in row), {})
    low, high = (last.get(f"forecast/end_{side}") for side in ("low", "high"))
    forecast = "" if low is None or high is None else f"{low:.3f}–{high:.3f}"
    return Progress(step, steps, last.get("eval/pass_rate"), compute, wall_s, forecast)


def time_left(sweep: Sweep, status: Status, jobs: int) -> float | None:
    """Seconds left, by the pace of the runs so far; None if there is none yet. `jobs` runs train at once."""
    budget, remaining, pace = sweep.budget, 0.0, list[float]()
    for run in sweep.runs:
        if run.recipe in status.stopped:
            continue
        p = progress(run.folder)
        share = 1.0 if complete(run.folder, budget) else p.share(budget)
        remaining += 1 - share
        if p.wall_s and share > 0.02:
            pace.append(p.wall_s / share)
    return remaining * sum(pace) / len(pace) / jobs if pace else None


class View:
    """Print the progress: a table on a terminal; elsewhere a line a minute, and one when a run completes."""

    def __init__(self, sweep: Sweep, jobs: int) -> None:
        self.sweep, self.jobs, self.console = sweep, jobs, Console(file=sys.stdout)
        self.live = Live(console=self.console, auto_refresh=False, transient=True)
        self._last, self._ended = 0.0, -1

    def __enter__(self) -> "View":
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.live.stop()

    def show(self, active: Sequence[Run], status: Status, stopping: bool) -> None:
        """Called twice a second."""
        runs, now = self.sweep.runs, time.monotonic()
        ended = sum(complete(run.folder, self.sweep.budget) for run in runs)
        due = 2.0 if self.console.is_terminal else PLAIN_EVERY_S
        if now - self._last < due and ended == self._ended:
            return
        self._last, self._ended = now, ended
        line = f"{ended} of {len(runs)} runs complete, {len(active)} training"
        line += f", {len(status.errors)} failed" * bool(status.errors)
        line += f", {', '.join(status.stopped)} stopped early" * bool(status.stopped)
        seconds = time_left(self.sweep, status, min(self.jobs, len(runs)))
        line += "" if seconds is None else f", {clock(seconds)} left"
        line += "; stopping after the current steps (Ctrl-C again: at once)" * stopping
        if not self.console.is_terminal:
            self.console.print(line, soft_wrap=True)
            return
        table = Table("run", "step", "reward", "compute", "forecast of the end", box=None, pad_edge=False)
        for run in active:
            p = progress(run.folder)
            reward = "" if p.reward is None else f"{p.reward:.3f}"
            table.add_row(run.name, f"{p.step}/{p.steps or '–'}", reward, f"{p.compute:.4g}", p.forecast)
        table.caption, table.caption_justify = line, "left"
        self.live.update(table, refresh=True)


def clock(seconds: float) -> str:
    """A duration as text, such as 3:05 h or 12 min."""
    minutes = round(seconds / 60)
    return f"{minutes // 60}:{minutes % 60:02d} h" if minutes >= 60 else f"{minutes} min"
