"""What a person sees of a run: a live terminal view, or a plain log where there is no terminal.

    make_view(config) -> View      phase, update, log, sample, finish; leave it as a context manager
    summary_text(...) -> str       what is printed at the end

Model text is untrusted: it is never parsed as markup, and control characters never reach the terminal.
"""

from __future__ import annotations

import statistics
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.cells import chop_cells
from rich.console import Console
from rich.live import Live
from rich.text import Text

from trainer.config import Config
from trainer.launcher.ledger import Ledger
from trainer.launcher.terminal_plot import clock, curve, number, printable, sparkline, with_error

if TYPE_CHECKING:
    from trainer.scaling import EvalPoint

REFRESH_PER_S = 2  # a frame costs about 2 ms, and the cores belong to the training
PLAIN_EVERY_S = 5.0  # least time between two step lines of the plain log
SAMPLE_S = 4.0  # a sample stays this long, so that it can be read
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class Progress:
    """What the metrics have told so far, and how long the rest will take."""

    def __init__(self, steps: int, every: int) -> None:
        self.steps, self.every = steps, every
        self.step = 0
        self.latest: dict[str, Any] = {}
        self.rewards: deque[float] = deque(maxlen=200)
        self.evaluations: list[dict[str, Any]] = []
        self._step_ends: deque[float] = deque(maxlen=200)
        self._evaluated: deque[float] = deque(maxlen=200)

    def update(self, metrics: Mapping[str, Any], now: float | None) -> bool:
        """Take one line of metrics; whether it is an evaluation. `now` is None for an earlier process's."""
        if "eval/pass_rate" in metrics:  # a forecast holds until the next evaluation
            self.latest = {k: v for k, v in self.latest.items() if not k.startswith("forecast/")}
        spent = (
            number(self.latest.get("compute/total")) or 0.0
        )  # an evaluation's is that of its weights: older
        self.latest |= metrics
        if spent > (number(metrics.get("compute/total")) or 0.0):
            self.latest["compute/total"] = spent
        if "eval/pass_rate" in metrics:
            self.evaluations.append(dict(metrics))
            if now is not None:
                self._evaluated.append(now)
            return True
        self.step = max(self.step, int(metrics.get("step", 0)))
        if now is not None:
            self._step_ends.append(now)
        if (reward := number(metrics.get("train/reward"))) is not None:
            self.rewards.append(reward)
        return False

    def left(self, now: float) -> float | None:
        """Seconds to the end: steps at their median pace, and what each evaluation still to come adds."""
        if len(self._step_ends) < 3:
            return None
        gaps = [b - a for a, b in pairwise(self._step_ends)]
        pace = float(statistics.median(gaps))
        alone = number(self.latest.get("eval/seconds")) or 0.0  # an evaluation with nothing beside it
        seen = sum(t > self._step_ends[0] for t in self._evaluated)
        added = max(0.0, sum(gaps) - pace * len(gaps)) / seen if seen else alone
        between = (self.steps - 1) // self.every - self.step // self.every if self.every > 0 else 0
        rest = (self.steps - self.step) * pace + max(0, between) * added
        final = 0.0 if any(e.get("step") == self.steps for e in self.evaluations) else alone
        return max(0.0, rest + final - (now - self._step_ends[-1]))


class View:
    """What a person sees; here a plain log: a line per step at a sensible pace, one per evaluation.

    Missing keys are left out, never an error. Use it as a context manager: it gives the terminal back.
    """

    def __init__(self, config: Config, unit: str, stream: IO[str]) -> None:
        self.name, self.unit, self.stream = Path(config.run_dir).name, unit, stream
        self.subject = f"{Path(config.model.path).name} · {config.data.source.removeprefix('reasoning_gym:')}"
        self.progress = Progress(config.pipeline.steps, config.evaluation.every)
        self.began = time.monotonic()
        self._last_line = float("-inf")

    def __enter__(self) -> View:
        self.log(f"{self.name}: {self.subject}")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def phase(self, name: str) -> None:
        """The run enters a phase of its start-up; the last is 'training'."""
        self.log(f"{name} ...")

    def update(self, metrics: Mapping[str, Any]) -> None:
        """One line of metrics: of a step, or of an evaluation."""
        now, progress = time.monotonic(), self.progress
        if progress.update(metrics, now):
            rate = f"held-out pass rate {with_error(metrics, 'eval/pass_rate')}"
            self.log(f"evaluation at step {metrics.get('step', '?')}: {rate}; {forecast(progress)}")
        elif now - self._last_line >= PLAIN_EVERY_S or progress.step == progress.steps:
            self._last_line = now
            rows = [f"{name} {value}" for name, value in facts(progress, self.unit)]
            rows = [f"step {progress.step}/{progress.steps}", *rows, f"left {clock(progress.left(now))}"]
            self.log(", ".join(rows))

    def recall(self, metrics: Mapping[str, Any]) -> None:
        """A line of metrics that an earlier process of this run has told already."""
        self.progress.update(metrics, None)

    def log(self, text: str) -> None:
        """Something worth a line."""
        self._print(f"[{clock(time.monotonic() - self.began)}] {printable(text)}")

    def sample(self, sample: Mapping[str, Any]) -> None:
        """A prompt with its completions (`rollout.sample_record`); a log would drown in them."""

    def close(self) -> None:
        """Give the terminal back."""

    def finish(self, summary: str) -> None:
        """The end of the run: give the terminal back and print the summary."""
        self.close()
        self._print("\n" + summary)

    def _print(self, text: str) -> None:
        with suppress(OSError):  # a terminal that was closed must not end a run
            print(text, file=self.stream, flush=True)


def make_view(config: Config, unit: str = "core-hours", stream: IO[str] | None = None) -> View:
    """The live view where `stream` (stdout) is a terminal, else the plain log. `unit` is that of compute."""
    stream = stream or sys.stdout
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")  # a terminal without UTF-8 must not end a run
    return (LiveView if stream.isatty() else View)(config, unit, stream)


class LiveView(View):
    """A calm screenful, redrawn in place by rich's own thread."""

    def __init__(self, config: Config, unit: str, stream: IO[str], console: Console | None = None) -> None:
        super().__init__(config, unit, stream)
        self.console = console or Console(file=stream, highlight=False)
        self._lock = threading.Lock()
        self._phases: list[tuple[str, float]] = []
        self._logs: deque[str] = deque(maxlen=20)
        self._sample: Mapping[str, Any] = {}
        self._sampled = float("-inf")
        self._live = Live(get_renderable=self.render, console=self.console, refresh_per_second=REFRESH_PER_S)
        self._live.vertical_overflow = "crop"

    def __enter__(self) -> View:
        self._live.start()
        return self

    def phase(self, name: str) -> None:
        with self._lock:
            self._phases.append((name, time.monotonic()))

    def update(self, metrics: Mapping[str, Any]) -> None:
        with self._lock:
            self.progress.update(metrics, time.monotonic())

    def recall(self, metrics: Mapping[str, Any]) -> None:
        with self._lock:
            super().recall(metrics)

    def log(self, text: str) -> None:
        with self._lock:
            self._logs.append(f"{clock(time.monotonic() - self.began):>7}  {text}")

    def sample(self, sample: Mapping[str, Any]) -> None:
        with self._lock:
            if time.monotonic() - self._sampled >= SAMPLE_S:
                self._sample, self._sampled = sample, time.monotonic()

    def close(self) -> None:
        with suppress(OSError):
            self._live.stop()

    def render(self) -> Text:
        """The present frame, of the terminal's size."""
        with self._lock:
            width, height = self.console.size
            frame = self._training if self.progress.step else self._starting
            lines = frame(width, height - 1)
        for line in lines:
            line.truncate(width)
        return Text("\n", no_wrap=True, overflow="crop").join(lines)

    def _starting(self, width: int, height: int) -> list[Text]:
        """The phases of the start-up, the present one with a spinner."""
        now = time.monotonic()
        lines = [self._head(width, now), Text()]
        ends = [at for _, at in self._phases[1:]] + [now]
        for (name, at), end in zip(self._phases, ends, strict=False):
            spinner = SPINNER[int(now * REFRESH_PER_S) % len(SPINNER)]
            mark = ("✓ ", "green") if end is not now else (f"{spinner} ", "cyan")
            lines.append(Text.assemble("  ", mark, f"{printable(name)}  ", (clock(end - at), "dim")))
        if self.progress.evaluations:
            rate = with_error(self.progress.latest, "eval/pass_rate")
            lines += [Text(), Text(f"  held-out pass rate before training  {rate}")]
        return [*lines, Text(), *self._log_lines(height - len(lines) - 1)][-height:]

    def _training(self, width: int, height: int) -> list[Text]:
        """Head and bar; the curve with the facts beside it (or below, if narrow); a sample; the log."""
        now, beside = time.monotonic(), width >= 76
        facts_ = self._facts(34 if beside else width)
        rest = height - 8 - (0 if beside else len(facts_))  # 8: head, bar, gaps, titles, x axis
        shown = max(1, min(8, rest // 5))  # lines of sample and of log
        rows = max(3, min(17, rest - 2 * shown))
        plot = self._plot(width - 38 if beside else width, rows - 1 + rows % 2)  # odd: a label in the middle
        if beside:
            facts_ += [Text()] * (len(plot) - len(facts_))
            for left, right in zip(plot, facts_, strict=False):
                left.align("left", width - 36)
                left.append_text(right)
        else:
            plot += facts_
        lines = [self._head(width, now), self._bar(width), Text(), *plot, Text()]
        return [*lines, *self._sample_lines(width, shown + 1), Text(), *self._log_lines(shown)]

    def _head(self, width: int, now: float) -> Text:
        left = ("   ", (clock(self.progress.left(now)), "bold"), (" left", "dim"))
        times = Text.assemble(
            clock(now - self.began), (" elapsed", "dim"), *(left if self.progress.step else ())
        )
        head = Text.assemble((printable(self.name), "bold"), ("  " + printable(self.subject), "dim"))
        head.align("left", max(0, width - times.cell_len - 1))
        return Text.assemble(head, " ", times)

    def _bar(self, width: int) -> Text:
        progress = self.progress
        share = min(1.0, progress.step / max(1, progress.steps))
        label, percent = f"step {progress.step}/{progress.steps} ", f" {share:4.0%}"
        room = max(1, width - len(label) - len(percent))
        done = round(share * room)
        return Text.assemble(label, ("━" * done, "cyan"), ("─" * (room - done), "bright_black"), percent)

    def _facts(self, width: int) -> list[Text]:
        lines = []
        for name, value in facts(self.progress, self.unit):
            line = Text.assemble((f"{name:<12}", "dim"), value)
            if name == "reward" and width > line.cell_len + 4:
                line.append("  " + sparkline(self.progress.rewards, width - line.cell_len - 2), "cyan")
            lines.append(line)
        return [*lines, Text(forecast(self.progress), "yellow")]

    def _plot(self, width: int, rows: int) -> list[Text]:
        """The held-out scores over compute, the ceiling as a dashed line."""
        latest, evaluations = self.progress.latest, self.progress.evaluations
        title = Text.assemble(("held-out pass rate  ", "dim"))  # only these words dim
        if len(evaluations) > 1:
            title.append(f"{number(evaluations[0]['eval/pass_rate']) or 0:.3f} → ")
        title.append(with_error(latest, "eval/pass_rate"), "bold")
        points = [(number(e.get("compute/total")) or 0.0, number(e["eval/pass_rate"])) for e in evaluations]
        known = [(x, y) for x, y in points if y is not None]
        lines = curve(known, number(latest.get("forecast/ceiling")), max(10, width - 5), rows)
        end = f"{known[-1][0]:.3g} {self.unit}" if known else ""
        return [title, *lines, Text(f"     0{end:>{max(0, width - 6)}}", "dim")]

    def _sample_lines(self, width: int, count: int) -> list[Text]:
        """The tail of a prompt, and one completion coloured by its reward."""
        completions = self._sample.get("completions") or [{}]
        text, reward = str(completions[0].get("text", "")), number(completions[0].get("reward"))
        if reward is None:
            return [Text("sample", "dim")] + [Text()] * (count - 1)
        outcome = f"{completions[0].get('outcome', '')}, reward {reward:+.3g}"
        prompt = printable(str(self._sample.get("prompt", ""))[-width:].strip())
        title = Text.assemble((f"sample of step {self._sample.get('step', '?')}  ", "dim"), (outcome, "dim"))
        room = max(1, width - title.cell_len - 2)
        title.append("  " + chop_cells(prompt[::-1], room)[0][::-1] if prompt else "")
        lines = chop_cells(printable(text[: width * count]), max(1, width - 2))[: count - 1]
        lines += [""] * (count - 1 - len(lines))
        return [title, *(Text("  " + line, "green" if reward > 0 else "red") for line in lines)]

    def _log_lines(self, count: int) -> list[Text]:
        lines = list(self._logs)[-count:] if count > 0 else []
        return [Text(printable(line), "dim") for line in lines]


def facts(progress: Progress, unit: str) -> list[tuple[str, str]]:
    """The numbers of the last step worth watching, by name; those not known yet are left out."""
    m = progress.latest
    rows: list[tuple[str, str]] = []

    def add(name: str, key: str, text: Callable[[float], str]) -> None:
        if (value := number(m.get(key))) is not None:
            rows.append((name, text(value)))

    def idle(role: str) -> str:
        share = number(m.get(f"idle/{role}"))
        return "" if share is None else f" (idle {share:.0%})"

    add("reward", "train/reward", lambda v: f"{v:+.3f}")
    add("pass rate", "train/pass_rate", lambda v: f"{v:.3f}")
    add("effective", "train/effective_prompts", lambda v: f"{v:g} prompts")
    most = number(m.get("lag/max"))
    add("lag", "lag/mean", lambda v: f"{v:.2f}" + ("" if most is None else f" (max {most:g})"))
    add("entropy", "learner/entropy", lambda v: f"{v:.3f} nats")
    add("engine", "engine/tokens_per_s", lambda v: f"{v:,.0f} tok/s{idle('engine')}")
    add("learner", "learner/tokens_per_s", lambda v: f"{v:,.0f} tok/s{idle('learner')}")
    add("compute", "compute/total", lambda v: f"{v:.4g} {unit}")
    return rows


def forecast(progress: Progress) -> str:
    """The forecast of ceiling and end in words, and whether the last evaluation was foreseen."""

    def told(key: str) -> str:
        value, low, high = (
            number(progress.latest.get(f"forecast/{key}{which}")) for which in ("", "_low", "_high")
        )
        if value is None:
            return ""
        return f"{value:.2f}" + ("" if low is None or high is None else f" [{low:.2f}, {high:.2f}]")

    ceiling, end = told("ceiling"), told("end")
    words = f"ceiling {ceiling}" if ceiling else "ceiling not yet identified"
    if end:
        words += f", end {end}"
    if predicted := told("predicted") or told("foreseen"):  # its name before part 5
        words += f", predicted {predicted}"
    if progress.latest.get("forecast/alarm"):
        words += ": outside the 90 % interval"
    return words


FILES = {
    "curve.png": "the fitted curve",
    "report.html": "the same with all numbers, self-contained",
    "metrics.jsonl": "one object a line: every step, every evaluation",
    "samples.jsonl": "prompts and completions with their rewards",
    "ledger.json": "device-seconds by role and state",
    "tensorboard": "events for TensorBoard",
    "checkpoints": "for --resume, and for AutoModelForCausalLM.from_pretrained",
}


def summary_text(run_dir: Path, points: Sequence[EvalPoint], ledger: Ledger, fit: str, advice: str) -> str:
    """What is printed at the end: the score from start to end, where the compute went, the fit, the files."""
    books, compute = ledger.to_json(), ledger.compute()
    lines = [f"{run_dir.name}: {clock(books['wall_s'])} of wall time", ""]
    if points:
        score = [f"{p.pass_rate:.3f} ± {p.pass_rate_se:.3f} (step {p.step})" for p in (points[0], points[-1])]
        lines.append("held-out pass rate  " + " → ".join(score[: len(points)]))
    lines.append(f"compute             {compute.total:.4g} {ledger.unit}")
    lines[-1] += f", and {compute.evaluation:.4g} for evaluation, {compute.startup:.4g} for start-up"
    lines += ["", *_usage(books), "", *textwrap.wrap(advice, 100), "", fit.strip(), "", f"files in {run_dir}"]
    lines += [f"  {name:<14} {what}" for name, what in FILES.items() if (run_dir / name).exists()]
    return "\n".join(lines)


def _usage(books: Mapping[str, Any]) -> list[str]:
    """Device-hours by state, a column for each role that holds devices; idle and the sum come last."""
    roles = {name: r["states"] for name, r in books["roles"].items() if r["devices"]}
    sums = {name: sum(states.values()) for name, states in roles.items()}
    order = {state: -s for states in roles.values() for state, s in states.items()}
    states = sorted(order, key=lambda state: (state == "idle", order[state]))
    rows = [f"{books['unit']:<18}" + "".join(f"{name:>18}" for name in roles)]
    for state in states:
        cells = [(r.get(state, 0.0), sums[name]) for name, r in roles.items()]
        shares = (f"{s / 3600:>11.4f} {s / total:>6.1%}" if s else f"{'–':>11}{'':7}" for s, total in cells)
        rows.append(f"  {state:<16}" + "".join(shares))
    rows.append(f"  {'all':<16}" + "".join(f"{s / 3600:>11.4f}{'':7}" for s in sums.values()))
    return [row.rstrip() for row in rows]
