"""Rates and results of a real run, read from its folder, to predict from and to compare with.

Spans of timeline.jsonl are wall time. On cores that learner and engine share, a span's *work* is what it
would have taken alone: the integral, over the span, of the speed that simulate.py gives to whoever is
busy then. What no clock books is read off between the spans:

    learner   publish ─┬ report ┬──── wait ────┬─ build ─┬ pack ┬ forward_backward ┬ optimizer ┬ publish
                       │        │ train/wait_s │         │ learner/seconds                    │
    engine    ── idle ─┼─ push ─┼ issue ┬ generate ┬ verify
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from bench.pipeline.simulate import Outcome, Rates, Scheme, Workload
from trainer.controller.journal import unpack
from trainer.launcher.placement import Split

MOMENT = 2e-3  # seconds: what is shorter is no wait
FILES = ("config.yaml", "ledger.json", "metrics.jsonl", "timeline.jsonl", "journal.jsonl")


class Interval(NamedTuple):
    """Wall seconds since the run began."""

    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Trace:
    """Who was busy when, from the end of the first `warm` steps, which fill pipeline and caches, on."""

    warm: int
    began: float
    ended: float
    steps: tuple[Interval, ...]  # learner: packing to publishing
    saves: tuple[Interval, ...]  # learner: checkpoints
    engines: tuple[Mapping[str, tuple[Interval, ...]], ...]  # by state, without idle
    rows: tuple[Mapping[str, Any], ...]  # of metrics.jsonl, one a step

    @property
    def generating(self) -> list[Interval]:
        """All engines, all states."""
        return sorted(i for engine in self.engines for own in engine.values() for i in own)

    def of_engines(self, *states: str) -> list[Interval]:
        """The engines' intervals in these states."""
        return sorted(i for engine in self.engines for state in states for i in engine.get(state, ()))


@dataclass(frozen=True, slots=True)
class Run:
    """A run's settings and results, and the rates that its own books give."""

    name: str
    scheme: Scheme
    split: Split
    work: Workload
    rates: Rates
    steps: int
    warm: int  # of these steps, not counted in what follows
    steps_per_hour: float  # evaluations between steps included
    learner_idle: float
    engine_idle: float
    lag_mean: float  # by trained token
    notes: tuple[str, ...]

    def compare(self, predicted: Outcome) -> dict[str, tuple[float, float]]:
        """Predicted and measured, by name."""
        return {
            "steps per hour": (predicted.steps_per_hour, self.steps_per_hour),
            "learner idle": (predicted.learner_idle, self.learner_idle),
            "engine idle": (predicted.engine_idle, self.engine_idle),
            "mean lag": (predicted.lag_mean, self.lag_mean),
        }


class Speed:
    """How fast whoever is busy runs: cores over threads asked for, by bench.pipeline.simulate's rule."""

    def __init__(
        self, busy: Mapping[str, Sequence[Interval]], threads: Mapping[str, int], cores: int
    ) -> None:
        self._cuts = np.unique([t for intervals in busy.values() for i in intervals for t in i])
        middle = (self._cuts[1:] + self._cuts[:-1]) / 2
        asked = np.zeros(len(middle))
        for role, intervals in busy.items():
            begun, ended = (np.sort([i[edge] for i in intervals]) for edge in (0, 1))
            depth = np.searchsorted(begun, middle, "right") - np.searchsorted(ended, middle, "right")
            asked += threads[role] * (depth > 0)
        speed = np.minimum(1.0, cores / np.maximum(asked, 1)) if cores else np.ones(len(middle))
        self._done = np.concatenate([[0.0], np.cumsum(speed * np.diff(self._cuts))])

    def work(self, intervals: Iterable[Interval]) -> float:
        """Seconds of work in these intervals, in all."""
        return float(sum(np.diff(np.interp(i, self._cuts, self._done))[0] for i in intervals))

    def mean(self, intervals: Sequence[Interval]) -> float:
        """Seconds of work in one of them; 0 where there are none."""
        return self.work(intervals) / len(intervals) if intervals else 0.0


def read_run(folder: Path, decode_step_s: float = 0.0) -> Run:
    """Read a run folder; SystemExit with one line if it holds no unbroken run. `decode_step_s` is what one
    token of every sequence takes whatever their number: a steady run does not tell it from the rest."""
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        raise SystemExit(
            f"--run {folder}: has no {', '.join(missing)}; expected the folder of a training run"
        )
    config = yaml.safe_load((folder / "config.yaml").read_text())
    ledger = json.loads((folder / "ledger.json").read_text())
    rows, spans, journal = (_lines(folder / name) for name in FILES[2:])
    groups = [r for r in journal if "finished" in r]
    trace = _trace(folder, rows, spans, config["pipeline"]["max_lag"] + 2)
    held = {role: books["devices"] for role, books in ledger["roles"].items() if books["devices"]}
    split = Split(round(held["learner"]), len(trace.engines))  # rates are of an engine, whatever its width
    if ledger["unit"] == "core-hours":
        cores = round(sum(held.values()))
        ranks, engines = max(1, config["learner"].get("ranks", 1)), len(trace.engines)
        learner, engine = config["learner"]["threads"] * ranks, config["engine"]["threads"] * engines
        split = Split(learner or cores, engine or cores, cores)  # threads; 0: all cores, dealt out
    work = _workload(config, trace, rows, groups)
    rates, notes = _rates(config, trace, split, work, groups, decode_step_s)
    wall = trace.ended - trace.began
    return Run(
        name=folder.name,
        scheme=Scheme("pipeline", config["pipeline"]["max_lag"]),
        split=split,
        work=work,
        rates=rates,
        steps=trace.warm + len(trace.steps),
        warm=trace.warm,
        steps_per_hour=3600 * len(trace.steps) / wall,
        learner_idle=1 - _seconds([*trace.steps, *trace.saves]) / wall,
        engine_idle=1 - _seconds(trace.generating) / wall / len(trace.engines),
        lag_mean=_lag_mean(trace.rows),
        notes=notes,
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    with path.open() as file:
        return [json.loads(line) for line in file if line.endswith("\n")]  # a crash may leave half a line


def _trace(
    folder: Path, rows: Sequence[Mapping[str, Any]], spans: Sequence[Mapping[str, Any]], warm: int
) -> Trace:
    """The steps of a run and the spans beside them. Steps without a gradient leave none."""
    stepped = [r for r in rows if "train/wait_s" in r]
    times = [r["time"] for r in stepped]
    if len(stepped) < 2 * warm + 1 or stepped[0]["step"] != 1 or times != sorted(times):
        raise SystemExit(
            f"--run {folder}: {len(stepped)} steps on record; expected an unbroken run (never resumed) of "
            f"{2 * warm + 1} or more, of which the first {warm} fill the pipeline"
        )
    roles: dict[str, dict[str, list[Interval]]] = {}
    for s in spans:
        roles.setdefault(s["role"], {}).setdefault(s["state"], []).append(Interval(s["start"], s["end"]))
    learner = roles.pop("learner")
    stepped = [r for r in stepped if r["learner/tokens"]]
    steps = tuple(
        Interval(optimizer.end - row["learner/seconds"], published.end)
        for row, optimizer, published in zip(stepped, learner["optimizer"], learner["publish"], strict=False)
    )
    began, ended = steps[warm - 1].end, steps[-1].end

    def cut(own: Sequence[Interval]) -> tuple[Interval, ...]:
        own = [Interval(max(began, i.start), min(ended, i.end)) for i in own]
        return tuple(i for i in own if i.end > i.start)

    engines = tuple(
        {state: cut(own) for state, own in states.items() if state not in ("idle", "start-up")}
        for role, states in roles.items()
        if role.startswith("engine")
    )
    saves = cut(learner.get("checkpoint", ()))
    return Trace(warm, began, ended, steps[warm:], saves, engines, tuple(stepped[warm : len(steps)]))


def _workload(
    config: Mapping[str, Any],
    trace: Trace,
    rows: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
) -> Workload:
    """What was generated and trained on; prompts are in the rates, since no file tells their lengths."""
    count, evaluation = len(trace.steps), config["evaluation"]
    scores = [r for r in rows if 0 < r["step"] < trace.rows[-1]["step"] and "eval/pass_rate" in r]
    evaluated: list[float] = []
    if scores:
        completions = round(scores[0]["eval/prompts"] * scores[0]["eval/samples"])
        evaluated = [float(np.mean([r["eval/mean_tokens"] for r in scores]))] * completions
    prompts = config["pipeline"]["prompts_per_step"]
    generated = sum(sum(g["lengths"]) for g in groups) / len(groups)  # a group
    fed = sum(r["learner/input_tokens"] for r in trace.rows) / count
    return Workload(
        prompts=prompts,
        prompt_tokens=0.0,
        lengths=np.array([g["lengths"] for g in groups], np.int64),
        trained_share=fed / (prompts * generated),
        evaluation_every=evaluation["every"] if scores else 0,
        evaluation_lengths=tuple(evaluated),
    )


def _rates(
    config: Mapping[str, Any],
    trace: Trace,
    split: Split,
    work: Workload,
    groups: Sequence[Mapping[str, Any]],
    decode_step_s: float,
) -> tuple[Rates, tuple[str, ...]]:
    """Seconds of work of every stage, and what could not be read off."""
    reports, builds, verifies = _controller(trace)
    issues = _issues(trace, config["pipeline"]["max_lag"] + 1)
    notes = []
    if not verifies:
        notes.append(
            "the learner never waited for an idle engine, so the time to verify is not seen: taken as 0"
        )
    busy = {
        "learner": [*trace.steps, *trace.saves],
        "engine": trace.generating,
        "controller": [*reports, *verifies, *issues],
        "hand-over": builds,
    }
    threads = {"learner": split.learner, "engine": split.engine, "controller": 1, "hand-over": 1}
    speed = Speed(busy, threads, split.cores)
    count, devices = len(trace.steps), 1 if split.cores else split.learner
    fed = sum(r["learner/input_tokens"] for r in trace.rows)
    feeding = [
        Interval(step.start, step.start + r["learner/seconds"])
        for step, r in zip(trace.steps, trace.rows, strict=True)
    ]
    after = [Interval(a.end, b.end) for a, b in zip(feeding, trace.steps, strict=True)]
    pushes = trace.of_engines("weight_update")
    first, last = trace.rows[0]["step"] - 1, trace.rows[-1]["step"]  # versions
    swapped = pushes[0].end  # the first version counted is held
    made = {version: own for version, own in _made(groups).items() if version >= first}
    tokens = float(sum(tokens for tokens, _ in made.values()))
    if every := work.evaluation_every:
        tokens += ((last - 1) // every - (first - 1) // every) * sum(work.evaluation_lengths)
    generating = [i for i in trace.of_engines("generate", "evaluate") if i.start >= swapped - MOMENT]
    left = speed.work(generating) - decode_step_s * sum(most for _, most in made.values()) * len(
        trace.engines
    )
    if left <= 0:
        raise SystemExit(
            f"--decode-step-s {decode_step_s:g}: more than all the time this run's engine took; expected less"
        )
    rates = Rates(
        decode_step_s=decode_step_s,
        decode_token_s=left / tokens / (len(trace.engines) if split.cores else 1),  # of all engines there
        slots=config["engine"]["slots"],
        train_token_s=speed.work(feeding) * devices / fed,
        push_s=speed.mean(pushes),
        step_s=(speed.work(after) + speed.work(trace.saves)) / count,
        verify_s=speed.mean(verifies),
        build_s=speed.mean(builds),
        report_s=speed.mean(reports),
        issue_s=speed.mean(issues),
        train_scatter=_scatter([speed.work([i]) for i in feeding]),
        decode_scatter=_scatter(_per_token(trace, speed, made)),
    )
    return rates, tuple(notes)


def _controller(trace: Trace) -> tuple[list[Interval], list[Interval], list[Interval]]:
    """When a step was reported, when the next batch was built and on its way, and (seen only beside an idle
    engine) when the last completions that it waited for were being judged."""
    reports, builds, verifies, generating = [], [], [], trace.generating
    for row, step, next_row, next_step in zip(
        trace.rows, trace.steps, trace.rows[1:], trace.steps[1:], strict=False
    ):
        saving = _seconds(s for s in trace.saves if step.end <= s.start < next_step.start)
        asks = max(row["time"], step.end) + saving
        ready = min(asks + next_row["train/wait_s"], next_step.start)
        reports.append(Interval(step.end, max(row["time"], step.end)))
        builds.append(Interval(ready, next_step.start))
        last = max((i.end for i in generating if i.end < ready), default=0.0)
        idle = not any(i.start < ready <= i.end for i in generating)
        if ready - asks > MOMENT and idle and last >= asks:
            verifies.append(Interval(last, ready))
    return reports, builds, verifies


def _issues(trace: Trace, batches: int) -> list[Interval]:
    """From weights held to the first prompt, where the engine had nothing else to do; the last `batches`
    versions of a run issue no prompts."""
    found = []
    for engine in trace.engines:
        starts = sorted(i.start for state in ("generate", "evaluate") for i in engine.get(state, ()))
        for push in engine.get("weight_update", ())[: len(trace.steps) - batches]:
            after = next((start for start in starts if start >= push.end - MOMENT), None)
            if after is not None:
                found.append(Interval(push.end, max(after, push.end)))
    return found


def _made(groups: Sequence[Mapping[str, Any]]) -> dict[int, tuple[int, int]]:
    """Of each version: tokens made with it, and the most in one sequence (the engine's steps, or nearly)."""
    made: dict[int, tuple[int, int]] = {}
    for group in groups:
        lengths, versions = unpack(group)["versions"]
        owner = np.repeat(np.arange(len(lengths)), lengths)
        for version in np.unique(versions).tolist():
            own = np.bincount(owner[versions == version])
            tokens, most = made.get(version, (0, 0))
            made[version] = tokens + int(own.sum()), max(most, int(own.max()))
    return made


def _per_token(trace: Trace, speed: Speed, made: Mapping[int, tuple[int, int]]) -> list[float]:
    """The engines' work per token under each version held, where it was held for long."""
    pushes = sorted(trace.engines[0].get("weight_update", ()))
    generating = trace.of_engines("generate")
    found, usual = [], float(np.mean([tokens for tokens, _ in made.values()]))
    for row, step in zip(trace.rows, trace.steps, strict=True):
        at = next((n for n, push in enumerate(pushes) if push.start >= step.end - MOMENT), len(pushes))
        tokens, _ = made.get(row["step"], (0, 0))
        if at + 1 < len(pushes) and tokens > usual / 2:
            own = [i for i in generating if pushes[at].end - MOMENT <= i.start < pushes[at + 1].start]
            found.append(speed.work(own) / tokens)
    return found


def _scatter(values: Sequence[float]) -> tuple[float, ...]:
    """As factors of mean 1."""
    return tuple((np.array(values) / np.mean(values)).tolist()) if values and min(values) > 0 else (1.0,)


def _lag_mean(rows: Sequence[Mapping[str, Any]]) -> float:
    tokens = [(int(lag), n) for r in rows for lag, n in r["lag/histogram"].items()]
    return sum(lag * n for lag, n in tokens) / sum(n for _, n in tokens)


def _seconds(intervals: Iterable[Interval]) -> float:
    return sum(i.end - i.start for i in intervals)
