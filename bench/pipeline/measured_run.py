"""Rates and results of a real run, read from its folder: to predict from, and to compare with.

Spans of timeline.jsonl are wall time. On cores that learner and engine share, a span's *work* is the time it
would have taken alone: the integral, over the span, of the speed at which simulate.py lets busy servers run.
Stages that no clock records follow from the times between the spans:

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
from trainer.controller.journal import records, unpack
from trainer.jsonl import read_lines
from trainer.launcher.placement import Split

MIN_WAIT_S = 2e-3  # anything shorter does not count as waiting
FILES = ("config.yaml", "ledger.json", "metrics.jsonl", "timeline.jsonl", "journal")


class Interval(NamedTuple):
    """Wall seconds since the run began."""

    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Trace:
    """When each server was busy, after the first `warm` steps, which fill pipeline and caches."""

    warm: int
    began: float
    ended: float
    steps: tuple[Interval, ...]  # learner: packing to publishing
    saves: tuple[Interval, ...]  # learner: checkpoints
    engines: tuple[Mapping[str, tuple[Interval, ...]], ...]  # by state, without idle
    rows: tuple[Mapping[str, Any], ...]  # of metrics.jsonl, one a step

    @property
    def generating(self) -> list[Interval]:
        """Of all engines, in all states."""
        return sorted(i for engine in self.engines for busy in engine.values() for i in busy)

    def of_engines(self, *states: str) -> list[Interval]:
        """The engines' intervals in these states."""
        return sorted(i for engine in self.engines for state in states for i in engine.get(state, ()))


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run's settings and results, and the rates that follow from its records."""

    name: str
    scheme: Scheme
    split: Split
    work: Workload
    rates: Rates
    steps: int
    warm: int  # the first of these steps; the figures below leave them out
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
    """The speed of busy servers over time: cores over threads asked for, as in bench.pipeline.simulate."""

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
        self._work = np.concatenate([[0.0], np.cumsum(speed * np.diff(self._cuts))])

    def work(self, intervals: Iterable[Interval]) -> float:
        """Seconds of work in these intervals, in all."""
        return float(sum(np.diff(np.interp(i, self._cuts, self._work))[0] for i in intervals))

    def mean(self, intervals: Sequence[Interval]) -> float:
        """Seconds of work in one of them; 0 where there are none."""
        return self.work(intervals) / len(intervals) if intervals else 0.0


def read_run(folder: Path, decode_step_s: float = 0.0) -> MeasuredRun:
    """Read a run folder; SystemExit with one line if it holds no unbroken run.

    `decode_step_s` is the part of a decoding step that does not depend on the number of sequences, which a
    steady run's records do not separate from the rest.
    """
    if missing := [name for name in FILES if not (folder / name).exists()]:
        raise SystemExit(
            f"--run {folder}: has no {', '.join(missing)}; expected the folder of a training run"
        )
    config = yaml.safe_load((folder / "config.yaml").read_text())
    if config["pipeline"].get("scheme", "pipeline_rl") != "pipeline_rl":
        raise SystemExit(f"--run {folder}: a run of PPO-off-policy; expected one of PipelineRL")
    ledger = json.loads((folder / "ledger.json").read_text())
    rows, spans = (list(read_lines(folder / name)) for name in FILES[2:4])
    groups = [r for r in records(folder / "journal") if "finished" in r]
    trace = _trace(folder, rows, spans, config["pipeline"]["max_lag"] + 2)
    held = {role: books["devices"] for role, books in ledger["roles"].items() if books["devices"]}
    split = Split(round(held["learner"]), len(trace.engines))  # rates are of an engine, whatever its width
    if ledger["unit"] == "core-hours":
        cores = round(sum(held.values()))
        ranks, engines = max(1, config["learner"].get("ranks", 1)), len(trace.engines)
        learner, engine = config["learner"]["threads"] * ranks, config["engine"]["threads"] * engines
        split = Split(learner or cores, engine or cores, cores)  # threads; 0: all cores
    work = _workload(config, trace, rows, groups)
    rates, notes = _rates(config, trace, split, work, groups, decode_step_s)
    wall = trace.ended - trace.began
    return MeasuredRun(
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


def _trace(
    folder: Path, rows: Sequence[Mapping[str, Any]], spans: Sequence[Mapping[str, Any]], warm: int
) -> Trace:
    """The steps of a run and the spans of its servers. Steps without a gradient have no spans."""
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

    def cut(intervals: Sequence[Interval]) -> tuple[Interval, ...]:
        inside = [Interval(max(began, i.start), min(ended, i.end)) for i in intervals]
        return tuple(i for i in inside if i.end > i.start)

    engines = tuple(
        {state: cut(busy) for state, busy in states.items() if state not in ("idle", "start-up")}
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
    """What was generated and trained on. No file has the prompts' lengths: the rates include them."""
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
    """Seconds of work of every stage, and notes on what the records do not contain."""
    reports, builds, verifies = _controller(trace)
    issues = _issues(trace, config["pipeline"]["max_lag"] + 1)
    note = "the learner never waited for an idle engine, so the time to verify is unknown: taken as 0"
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
    generated = {v: made for v, made in _made(groups).items() if v >= trace.rows[0]["step"] - 1}
    rates = Rates(
        decode_step_s=decode_step_s,
        decode_token_s=_decode_token_s(trace, speed, work, generated, decode_step_s)
        / (len(trace.engines) if split.cores else 1),  # on shared cores the rates are of all engines
        slots=config["engine"]["slots"],
        train_token_s=speed.work(feeding) * devices / fed,
        push_s=speed.mean(trace.of_engines("weight_update")),
        step_s=(speed.work(after) + speed.work(trace.saves)) / count,
        verify_s=speed.mean(verifies),
        build_s=speed.mean(builds),
        report_s=speed.mean(reports),
        issue_s=speed.mean(issues),
        train_scatter=_scatter([speed.work([i]) for i in feeding]),
        decode_scatter=_scatter(_per_token(trace, speed, generated)),
    )
    return rates, () if verifies else (note,)


def _decode_token_s(
    trace: Trace, speed: Speed, work: Workload, made: Mapping[int, tuple[int, int]], decode_step_s: float
) -> float:
    """Seconds of engine work per token, less those of the fixed part of the decoding steps."""
    first, last = trace.rows[0]["step"] - 1, trace.rows[-1]["step"]  # versions
    tokens = float(sum(tokens for tokens, _ in made.values()))
    if every := work.evaluation_every:
        tokens += ((last - 1) // every - (first - 1) // every) * sum(work.evaluation_lengths)
    held = trace.of_engines("weight_update")[0].end  # from when the first version counted is held
    generating = [i for i in trace.of_engines("generate", "evaluate") if i.start >= held - MIN_WAIT_S]
    steps = sum(longest for _, longest in made.values()) * len(trace.engines)
    left = speed.work(generating) - decode_step_s * steps
    if left <= 0:
        raise SystemExit(
            f"--decode-step-s {decode_step_s:g}: more than all the time this run's engine took; expected less"
        )
    return left / tokens


def _controller(trace: Trace) -> tuple[list[Interval], list[Interval], list[Interval]]:
    """When a step was reported, when the next batch was built and sent, and when the last completions that it
    waited for were verified (which the records show only while the engine is idle)."""
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
        if ready - asks > MIN_WAIT_S and idle and last >= asks:
            verifies.append(Interval(last, ready))
    return reports, builds, verifies


def _issues(trace: Trace, batches: int) -> list[Interval]:
    """From new weights to the first prompt, where the engine had nothing else to do; the last `batches`
    versions of a run issue no prompts."""
    issues = []
    for engine in trace.engines:
        starts = sorted(i.start for state in ("generate", "evaluate") for i in engine.get(state, ()))
        for push in engine.get("weight_update", ())[: len(trace.steps) - batches]:
            after = next((start for start in starts if start >= push.end - MIN_WAIT_S), None)
            if after is not None:
                issues.append(Interval(push.end, max(after, push.end)))
    return issues


def _made(groups: Sequence[Mapping[str, Any]]) -> dict[int, tuple[int, int]]:
    """By version: tokens generated, and the most in one sequence (about the engine's decoding steps)."""
    made: dict[int, tuple[int, int]] = {}
    for group in groups:
        lengths, versions = unpack(group)["versions"]
        owner = np.repeat(np.arange(len(lengths)), lengths)
        for version in np.unique(versions).tolist():
            by_sequence = np.bincount(owner[versions == version])
            tokens, longest = made.get(version, (0, 0))
            made[version] = tokens + int(by_sequence.sum()), max(longest, int(by_sequence.max()))
    return made


def _per_token(trace: Trace, speed: Speed, made: Mapping[int, tuple[int, int]]) -> list[float]:
    """The engines' work per token of each version that made at least half the usual number of tokens."""
    pushes = sorted(trace.engines[0].get("weight_update", ()))
    generating = trace.of_engines("generate")
    per_token, usual = [], float(np.mean([tokens for tokens, _ in made.values()]))
    for row, step in zip(trace.rows, trace.steps, strict=True):
        at = next((n for n, push in enumerate(pushes) if push.start >= step.end - MIN_WAIT_S), len(pushes))
        tokens, _ = made.get(row["step"], (0, 0))
        if at + 1 < len(pushes) and tokens > usual / 2:
            start, end = pushes[at].end - MIN_WAIT_S, pushes[at + 1].start
            per_token.append(speed.work([i for i in generating if start <= i.start < end]) / tokens)
    return per_token


def _scatter(values: Sequence[float]) -> tuple[float, ...]:
    """The values as factors with mean 1."""
    return tuple((np.array(values) / np.mean(values)).tolist()) if values and min(values) > 0 else (1.0,)


def _lag_mean(rows: Sequence[Mapping[str, Any]]) -> float:
    tokens = [(int(lag), n) for r in rows for lag, n in r["lag/histogram"].items()]
    return sum(lag * n for lag, n in tokens) / sum(n for _, n in tokens)


def _seconds(intervals: Iterable[Interval]) -> float:
    return sum(i.end - i.start for i in intervals)
