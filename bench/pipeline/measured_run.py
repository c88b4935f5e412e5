"""Rates and results of a real run, read from its folder: to predict it from, and to compare with.

On cores that learner and engine share, a second in which both are busy is less than a second of work of each:
the speed at which virtual_run.py lets them run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from bench.pipeline.schemes import Measured, measure
from bench.pipeline.timed import Rates, Workload
from bench.pipeline.virtual_run import Scheme
from trainer.controller.journal import records
from trainer.jsonl import read_lines
from trainer.launcher.placement import Split

FILES = ("config.yaml", "ledger.json", "metrics.jsonl", "timeline.jsonl", "journal")
Spans = NDArray[np.float64]  # (n, 2): start and end


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run's settings and results, and the rates that follow from its records."""

    name: str
    scheme: Scheme
    split: Split
    work: Workload
    rates: Rates
    steps: int  # that count: not the first `warm`, and not those beside which no groups start
    warm: int
    figures: Measured


def read_run(folder: Path, decode_step_s: float = 0.0) -> MeasuredRun:
    """Read a run folder; SystemExit with one line if it holds no unbroken run.

    `decode_step_s` is the part of a decoding step that does not depend on the number of sequences, which a
    steady run's records do not separate from the rest.
    """
    if missing := [name for name in FILES if not (folder / name).exists()]:
        files = ", ".join(missing)
        raise SystemExit(f"--run {folder}: has no {files}; expected the folder of a training run")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    if config["pipeline"].get("scheme", "pipeline_rl") != "pipeline_rl":
        raise SystemExit(f"--run {folder}: a run of PPO-off-policy; expected one of PipelineRL")
    scheme = Scheme("pipeline", config["pipeline"]["max_lag"])
    warm = scheme.k + 2
    rows = [row for row in read_lines(folder / "metrics.jsonl") if "train/wait_s" in row]
    last, times = len(rows) - scheme.batches_open, [row["time"] for row in rows]
    if last < 2 * warm or [row["step"] for row in rows] != list(range(1, len(rows) + 1)):
        raise SystemExit(
            f"--run {folder}: {len(rows)} steps on record; expected an unbroken run (never resumed) of "
            f"{2 * warm + scheme.batches_open} or more, of which the first {warm} fill the pipeline"
        )
    spans, split = _spans(folder, times[warm - 1], times[last - 1]), _split(folder, config)
    groups = [record["lengths"] for record in records(folder / "journal") if "finished" in record]
    work = Workload(
        prompts=config["pipeline"]["prompts_per_step"], completions=len(groups[0]),
        lengths=np.concatenate([np.asarray(lengths, np.int64) for lengths in groups]),
    )  # fmt: skip
    seconds = times[last - 1] - times[warm - 1]
    rates = _rates(config, rows[warm:last], seconds, spans, split, work, decode_step_s)
    figures = measure(folder, warm, last)
    return MeasuredRun(folder.name, scheme, split, work, rates, last - warm, warm, figures)


def _split(folder: Path, config: dict[str, Any]) -> Split:
    """Learner GPUs and engines; on shared cores the threads of both sides (0: all cores)."""
    ledger = json.loads((folder / "ledger.json").read_text())
    devices = {role: books["devices"] for role, books in ledger["roles"].items() if books["devices"]}
    engines = sum(role.startswith("engine") for role in devices)
    if ledger["unit"] != "core-hours":
        return Split(round(devices["learner"]), engines)
    cores, ranks = round(sum(devices.values())), max(1, config["learner"].get("ranks", 1))
    learner, engine = config["learner"]["threads"] * ranks, config["engine"]["threads"] * engines
    return Split(learner or cores, engine or cores, cores)


def _spans(folder: Path, begin: float, end: float) -> dict[str, dict[str, Spans]]:
    """The spans between these times, by role and state."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for s in read_lines(folder / "timeline.jsonl"):
        if s["end"] > begin and s["start"] < end:
            states = found.setdefault(s["role"], {})
            states.setdefault(s["state"], []).append((max(begin, s["start"]), min(end, s["end"])))
    return {r: {state: np.array(sorted(x)) for state, x in states.items()} for r, states in found.items()}


def _rates(
    config: dict[str, Any], rows: Sequence[dict[str, Any]], seconds: float,
    spans: dict[str, dict[str, Spans]], split: Split, work: Workload, decode_step_s: float,
) -> Rates:  # fmt: skip
    """Seconds of work of every stage. Time in which nobody works is that of a batch's way."""
    learner = _busy(spans["learner"], "idle", "start-up")
    engines = [states for role, states in spans.items() if role.startswith("engine")]
    pushes = np.concatenate([states["weight_update"] for states in engines])
    generate = [_busy(states, "idle", "start-up", "weight_update") for states in engines]
    tokens = len(rows) * work.prompts * work.completions * float(work.lengths.mean())
    slower = 1 - min(1.0, split.cores / (split.learner + split.engine)) if split.cores else 0.0
    overlap = sum(_overlap(learner, spans_) for spans_ in generate) * slower / len(generate)
    decoding = sum(float(np.diff(x).sum()) - overlap for x in generate) / (len(engines) if split.cores else 1)
    decoding -= decode_step_s * len(rows) * float(work.lengths.max()) * (1 if split.cores else len(engines))
    if decoding <= 0:
        option = f"--decode-step-s {decode_step_s:g}"
        raise SystemExit(f"{option}: more than all the time this run's engine took; expected less")
    working = _busy(engines[0], "idle", "start-up")
    either = float(np.diff(learner).sum() + np.diff(working).sum()) - _overlap(learner, working)
    training = float(np.diff(learner).sum()) - overlap
    return Rates(
        decode_step_s=decode_step_s, decode_token_s=decoding / tokens, slots=config["engine"]["slots"],
        train_token_s=training * (1 if split.cores else split.learner) / tokens,
        push_s=float(np.diff(pushes).mean()), build_s=max(0.0, seconds - either) / len(rows),
    )  # fmt: skip


def _busy(states: dict[str, Spans], *without: str) -> Spans:
    return np.concatenate([spans for state, spans in states.items() if state not in without])


def _overlap(a: Spans, b: Spans) -> float:
    """Seconds in which spans of both are under way; the spans of each do not overlap."""
    return float(sum(np.clip(np.minimum(e, b[:, 1]) - np.maximum(s, b[:, 0]), 0, None).sum() for s, e in a))
