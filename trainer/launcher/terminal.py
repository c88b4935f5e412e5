"""Shows a run to a person: a live view in a terminal, a plain log elsewhere.

    with make_view(config, unit) as view: view.phase, update, log, sample, finish

Model text is untrusted: it is never parsed as markup, and control characters never reach the terminal.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trainer.config import Config
from trainer.launcher.terminal_plot import clock, curve, number, printable, with_error

REFRESH_PER_S = 2  # the cores belong to the training
PLAIN_EVERY_S = 5.0  # least time between two step lines of the plain log
SAMPLE_S = 4.0  # a sample stays this long, so that it can be read


class RunState:
    """The metrics reported so far, and the time that the rest will take."""

    def __init__(self, steps: int) -> None:
        self.steps, self.step = steps, 0
        self.latest: dict[str, Any] = {}
        self.evaluations: list[dict[str, Any]] = []
        self._step_ends: deque[float] = deque(maxlen=200)

    def update(self, metrics: Mapping[str, Any], now: float | None) -> bool:
        """Take one line of metrics; returns whether it is an evaluation. `now` is None in a resume."""
        if "eval/pass_rate" in metrics:  # a forecast holds until the next evaluation
            self.latest = {k: v for k, v in self.latest.items() if not k.startswith("forecast/")}
        spent = number(self.latest.get("compute/total")) or 0.0
        self.latest |= metrics
        if spent > (number(metrics.get("compute/total")) or 0.0):  # an evaluation's is older: of its weights
            self.latest["compute/total"] = spent
        if "eval/pass_rate" in metrics:
            self.evaluations.append(dict(metrics))
            return True
        self.step = max(self.step, int(metrics.get("step", 0)))
        if now is not None:
            self._step_ends.append(now)
        return False

    def remaining(self, now: float) -> float | None:
        """Seconds to the end: the steps at their mean pace, evaluations included, and the last evaluation."""
        if len(self._step_ends) < 3:
            return None
        pace = (self._step_ends[-1] - self._step_ends[0]) / (len(self._step_ends) - 1)
        evaluated = any(row.get("step") == self.steps for row in self.evaluations)
        final = 0.0 if evaluated else number(self.latest.get("eval/seconds")) or 0.0
        return max(0.0, (self.steps - self.step) * pace + final - (now - self._step_ends[-1]))


class View:
    """The plain log: a line for a step every PLAIN_EVERY_S, and one for each evaluation.

    Missing keys are left out, never an error. As a context manager it restores the terminal.
    """

    def __init__(self, config: Config, unit: str, stream: IO[str]) -> None:
        self.name, self.unit, self.stream = Path(config.run_dir).name, unit, stream
        data = " + ".join(config.mixture) or config.data.source.removeprefix("reasoning_gym:")
        self.subject = f"{Path(config.model.path).name} · {data}"
        self.state = RunState(config.pipeline.steps)
        self.began = time.monotonic()
        self._last_line = float("-inf")

    def __enter__(self) -> View:
        self.log(f"{self.name}: {self.subject}")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def phase(self, name: str) -> None:
        """The run enters a phase of its start-up; the last one is 'training'."""
        self.log(f"{name} ...")

    def update(self, metrics: Mapping[str, Any], *, resumed: bool = False) -> None:
        """One line of metrics, of a step or of an evaluation; `resumed`: it is from before a resume."""
        now, state = time.monotonic(), self.state
        if resumed:
            state.update(metrics, None)
        elif state.update(metrics, now):
            rate = f"held-out pass rate {with_error(metrics, 'eval/pass_rate')}"
            if sets := ", ".join(f"{name} {rate}" for name, rate in set_scores(metrics)):
                rate += f" ({sets})"
            self.log(f"evaluation at step {metrics.get('step', '?')}: {rate}; {describe_forecast(state)}")
        elif now - self._last_line >= PLAIN_EVERY_S or state.step == state.steps:
            self._last_line = now
            rows = [f"{name} {value}" for name, value in facts(state, self.unit)]
            rows = [f"step {state.step}/{state.steps}", *rows, f"left {clock(state.remaining(now))}"]
            self.log(", ".join(rows))

    def log(self, text: str) -> None:
        """A line of text."""
        self._print(f"[{clock(time.monotonic() - self.began)}] {printable(text)}")

    def sample(self, sample: Mapping[str, Any]) -> None:
        """A prompt with its completions (`rollout.sample_record`); the plain log leaves them out."""

    def close(self) -> None:
        """Restore the terminal."""

    def finish(self, summary: str) -> None:
        """Restore the terminal and print the summary at the end of the run."""
        self.close()
        self._print("\n" + summary)

    def _print(self, text: str) -> None:
        with suppress(OSError):  # a terminal that was closed must not end a run
            print(text, file=self.stream, flush=True)


def make_view(config: Config, unit: str, stream: IO[str] | None = None) -> View:
    """The live view if `stream` (stdout) is a terminal, else the plain log. `unit` is that of compute."""
    stream = stream or sys.stdout
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")  # a terminal without UTF-8 must not end a run
    return (LiveView if stream.isatty() else View)(config, unit, stream)


class LiveView(View):
    """One screen, redrawn in place by rich's own thread."""

    def __init__(self, config: Config, unit: str, stream: IO[str], console: Console | None = None) -> None:
        super().__init__(config, unit, stream)
        self.console = console or Console(file=stream, highlight=False)
        self._lock = threading.Lock()
        self._logs: deque[str] = deque(maxlen=20)
        self._sample: Mapping[str, Any] = {}
        self._sampled = float("-inf")
        self._live = Live(get_renderable=self.render, console=self.console, refresh_per_second=REFRESH_PER_S)
        self._live.vertical_overflow = "crop"

    def __enter__(self) -> View:
        self._live.start()
        return self

    def update(self, metrics: Mapping[str, Any], *, resumed: bool = False) -> None:
        with self._lock:
            self.state.update(metrics, None if resumed else time.monotonic())

    def log(self, text: str) -> None:
        with self._lock:
            self._logs.append(f"{clock(time.monotonic() - self.began):>7}  {printable(text)}")

    def sample(self, sample: Mapping[str, Any]) -> None:
        with self._lock:
            if time.monotonic() - self._sampled >= SAMPLE_S:
                self._sample, self._sampled = sample, time.monotonic()

    def close(self) -> None:
        with suppress(OSError):
            self._live.stop()

    def render(self) -> RenderableType:
        """The current frame: progress, the curve with the facts beside it (or below), a sample, the log."""
        (width, height), state, now = self.console.size, self.state, time.monotonic()
        with self._lock:
            facts_, wide = [*facts(state, self.unit), *set_scores(state.latest)], width >= 76
            rest = height - 9 - (0 if wide else min(9, len(facts_)))  # 9: head, bar, title, x axis, gaps
            shown = max(1, min(8, rest // 5))  # lines of sample and of log
            rows = max(3, min(17, rest - 2 * shown))
            odd = rows - 1 + rows % 2  # so that a label is in the middle
            plot = self._plot(width - 38 if wide else width, odd)
            facts_ = facts_[: rows if wide else 9]
            table = _grid(*((Text(name, "dim"), Text(f" {value}")) for name, value in facts_))
            title = Text.assemble((printable(self.name), "bold"), (f"  {printable(self.subject)}", "dim"))
            remaining = f"   {clock(state.remaining(now))} left" if state.step else ""
            times = Text(f"{clock(now - self.began)} elapsed{remaining}")
            bar = ProgressBar(state.steps, min(state.step, state.steps), complete_style="cyan")
            share = Text(f" {state.step / max(1, state.steps):4.0%}")
            return Group(
                _grid((title, times), ratios=(1, None)),
                _grid((Text(f"step {state.step}/{state.steps} "), bar, share), ratios=(None, 1, None)),
                Text(),
                self._title(),
                *([_grid((plot, Text("  "), table))] if wide else [plot, table]),
                Text(),
                *self._sample_lines(width, shown),
                Text(),
                *(Text(line, "dim", no_wrap=True, overflow="crop") for line in list(self._logs)[-shown:]),
            )

    def _title(self) -> Text:
        """The held-out pass rate from start to now, and its forecast."""
        evaluations = self.state.evaluations
        title = Text.assemble(("held-out pass rate  ", "dim"), no_wrap=True, overflow="crop")
        if len(evaluations) > 1:
            title.append(f"{number(evaluations[0]['eval/pass_rate']) or 0:.3f} → ")
        title.append(with_error(self.state.latest, "eval/pass_rate"), "bold")
        return title.append(f"  {describe_forecast(self.state)}", "yellow")

    def _plot(self, width: int, rows: int) -> Group:
        """The held-out pass rate over compute, the ceiling as a dashed line."""
        points = [
            (number(row.get("compute/total")) or 0.0, rate)
            for row in self.state.evaluations
            if (rate := number(row["eval/pass_rate"])) is not None
        ]
        lines = curve(points, number(self.state.latest.get("forecast/ceiling")), max(10, width - 5), rows)
        end = f"{points[-1][0]:.3g} {self.unit}" if points else ""
        return Group(*lines, Text(f"     0{end:>{max(0, width - 6)}}", "dim", no_wrap=True, overflow="crop"))

    def _sample_lines(self, width: int, count: int) -> list[Text]:
        """The tail of a prompt, and one completion coloured by its reward."""
        completion = (self._sample.get("completions") or [{}])[0]
        reward = number(completion.get("reward"))
        lines = [Text("sample", "dim", no_wrap=True, overflow="crop")]
        if reward is not None:
            lines[0].append(f" of step {self._sample.get('step', '?')}, {completion.get('outcome', '')}")
            prompt = printable(str(self._sample.get("prompt", ""))[-width // 2 :].strip())
            lines[0].append(f", reward {reward:+.3g}  {prompt}")
            text, style, room = Text(), "green" if reward > 0 else "red", width * count
            for turn in completion.get("turns", [{"content": completion.get("text", ""), "tokens": 0}]):
                text.append(printable(str(turn["content"])[:room]), style if "tokens" in turn else "dim")
            lines += text.wrap(self.console, width, overflow="fold")[:count]
        return lines + [Text()] * (count + 1 - len(lines))


def _grid(*rows: tuple[RenderableType, ...], ratios: tuple[int | None, ...] = ()) -> Table:
    """Columns whose lines are cut and never wrapped; those with a ratio take the room that is left."""
    grid = Table.grid(expand=any(ratios))
    for ratio in ratios or (None,) * max(map(len, rows), default=0):
        grid.add_column(ratio=ratio, no_wrap=True, overflow="crop")
    for row in rows:
        grid.add_row(*row)
    return grid


def facts(state: RunState, unit: str) -> list[tuple[str, str]]:
    """The numbers of the last step worth watching, by name; those not known yet are left out."""
    values = {key: known for key, value in state.latest.items() if (known := number(value)) is not None}

    def show(key: str, form: str) -> str:
        return form.format(values[key]) if key in values else ""

    rate, idle = "{:,.0f} tok/s", " (idle {:.0%})"
    rows = (
        ("reward", show("train/reward", "{:+.3f}")),
        ("pass rate", show("train/pass_rate", "{:.3f}")),
        ("effective", show("train/effective_prompts", "{:g} prompts")),
        ("turns", show("environment/turns", "{:.1f} an episode")),
        (
            "environment",
            show("environment/seconds", "{:.2g} s" + show("environment/error", ", {:.0%} failed")),
        ),
        ("lag", show("lag/mean", "{:.2f}" + show("lag/max", " (max {:g})"))),
        ("entropy", show("learner/entropy", "{:.3f} nats")),
        ("engine", show("engine/tokens_per_s", rate + show("idle/engine", idle))),
        ("learner", show("learner/tokens_per_s", rate + show("idle/learner", idle))),
        ("compute", show("compute/total", "{:.4g} " + unit)),
    )
    return [(name, text) for name, text in rows if text]


def set_scores(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The pass rate of each task and further held-out set, by name."""
    matches = (re.fullmatch("eval/(.+)/pass_rate", key) for key in metrics)
    return [(match[1], with_error(metrics, match[0])) for match in matches if match]


def describe_forecast(state: RunState) -> str:
    """The forecast of ceiling and end as a sentence, and whether the last evaluation was predicted."""

    def interval(key: str) -> str:
        value, low, high = (number(state.latest.get(f"forecast/{key}{end}")) for end in ("", "_low", "_high"))
        if value is None:
            return ""
        return f"{value:.2f}" + ("" if low is None or high is None else f" [{low:.2f}, {high:.2f}]")

    ceiling, end = interval("ceiling"), interval("end")
    text = f"ceiling {ceiling}" if ceiling else "ceiling not yet identified"
    if end:
        text += f", end {end}"
    if rate := interval("rate"):
        text += f", at {rate} times the mean FLOPs per device-hour"
    if predicted := interval("predicted"):
        text += f", predicted {predicted}"
    if state.latest.get("forecast/alarm"):
        text += ": outside the 90 % interval"
    return text
