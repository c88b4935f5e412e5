"""One run of a report: its curve and fit, and for our own runs the files of the run folder."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config import ConfigError
from trainer.jsonl import read_lines
from trainer.run_folder import EVALUATIONS, RESULTS, origin
from trainer.scaling.curve.fit import Fit, fit_curve
from trainer.scaling.curve.sigmoid import Curve
from trainer.scaling.forecast import backtest, error_at_2x
from trainer.scaling.layout import grouped, short_names
from trainer.scaling.reading.read import Reading, read_inputs

SAMPLES = 12
BINS = 120  # of the timeline
MAX_STEPS = 300  # longer series are averaged over neighbours
STEPS = {"learner/loss", "train/pass_rate"}  # keys of which a step has at least one


Evaluations = dict[str, list[tuple[float, float, float, int]]]  # by NAME or NAME/SET: C, R, error, step
Lanes = dict[str, dict[str, list[float]]]  # [role][state][i]: the state's share of the i-th bin of the run


@dataclass(frozen=True, slots=True)
class Record:
    """The data that only our own runs have, from the files of the run folder."""

    steps: tuple[Mapping[str, Any], ...]  # metrics of the training steps, at most MAX_STEPS
    forecasts: tuple[tuple[float, float, float, float], ...]  # (compute, reward at the end, low, high)
    ledger: Mapping[str, Any] | None  # ledger.json
    lanes: Lanes
    wall_s: float  # the end of the lanes
    samples: tuple[Mapping[str, Any], ...]
    config: str  # YAML
    warnings: tuple[tuple[int, str], ...]  # (step, what was wrong, or from which run this one began)
    evaluations: Evaluations


@dataclass(frozen=True, slots=True)
class Run:
    """One curve of a report."""

    name: str
    recipe: str  # the runs of one recipe differ by their seed
    reading: Reading
    fit: Fit
    error_at_2x: float | None  # of a fit of its first half; None: there is no forecast
    record: Record | None  # None: a table, not a run folder

    @property
    def curve(self) -> Curve:
        """The curve that was read."""
        return self.reading.curve


def runs_of(
    groups: Mapping[str, Sequence[Reading]], confidence: float = 0.9, within: float | None = None
) -> list[Run]:
    """The runs of a report, by recipe, fitted; a run folder with the record in it."""
    runs = []
    for recipe, readings in groups.items():
        seeds = short_names([reading.curve.name for reading in readings])
        for seed, reading in zip(seeds, readings, strict=True):
            curve = reading.curve
            if not curve.evaluations:
                raise ConfigError(f"{curve.name}: there is no evaluation to report, only the given R0")
            folder = Path(curve.name)
            ours = all((folder / n).is_file() for n in ("config.yaml", "metrics.jsonl"))
            record = read_record(folder) if ours else None
            name = recipe if len(readings) == 1 else f"{recipe}: {seed}"
            error = error_at_2x(backtest(curve))
            runs.append(Run(name, recipe, reading, fit_curve(curve, confidence, within), error, record))
    return runs


def by_recipe(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each recipe, in the order of the first ones."""
    return grouped((run.recipe, run) for run in runs)


def fits_of(runs: Sequence[Run]) -> dict[str, list[tuple[Curve, Fit]]]:
    """Their curves and fits by recipe, as `compare_fits` takes them."""
    return grouped((run.recipe, (run.curve, run.fit)) for run in runs)


def run_of_folder(folder: Path) -> Run:
    """One run, by its run folder."""
    (reading,) = read_inputs([str(folder)])
    (run,) = runs_of({short_names([str(folder)])[0]: [reading]})
    return run


def read_record(folder: Path) -> Record:
    """The files of a run folder; while the run trains, some may be missing."""
    ledger, timeline, samples = (folder / n for n in ("ledger.json", "timeline.jsonl", "samples.jsonl"))
    spans = list(read_lines(timeline)) if timeline.is_file() else []
    rows = list(read_lines(folder / "metrics.jsonl"))
    by_step = {r["step"]: r for r in rows if r.keys() & STEPS}  # a resumed run repeats steps
    forecasts = [r for r in rows if "forecast/end" in r]
    return Record(
        steps=averaged([by_step[k] for k in sorted(by_step)]),
        forecasts=tuple(
            (r["compute/total"], *(r[f"forecast/end{k}"] for k in ("", "_low", "_high"))) for r in forecasts
        ),
        ledger=json.loads(ledger.read_text()) if ledger.is_file() else None,
        lanes=lanes_of(spans),
        wall_s=max((s["end"] for s in spans), default=0.0),
        samples=evenly_chosen(list(read_lines(samples)) if samples.is_file() else [], SAMPLES),
        config=(folder / "config.yaml").read_text(encoding="utf-8"),
        warnings=(
            *((parent["step"], parent["text"]) for parent in [origin(folder)] if parent),
            *((r["step"], r[k]) for r in rows for k in r if k.startswith("warning/")),
        ),
        evaluations=evaluations_of(folder),
    )


def evaluations_of(folder: Path) -> Evaluations:
    """The pass rates that `python -m trainer.evaluate` has measured of the run's checkpoints."""
    rows = [row for path in sorted(folder.glob(f"{EVALUATIONS}/*/{RESULTS}")) for row in read_lines(path)]
    rows.sort(key=lambda row: row["step"])
    return grouped(
        (match[1], (row["compute/total"], row[key], row[f"{key}_se"], row["step"]))
        for row in rows
        for key in row
        if (match := re.fullmatch("eval/(.+)/pass_rate", key))
    )


def averaged(steps: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Reduce to MAX_STEPS rows at most: means of neighbours, but maxima of keys that end in /max."""
    if len(steps) <= MAX_STEPS:
        return tuple(steps)
    rows = []
    for part in np.array_split(np.arange(len(steps)), MAX_STEPS):
        row = {}
        for key in dict.fromkeys(k for i in part for k in steps[i]):
            values = [v for i in part if isinstance(v := steps[i].get(key), int | float)]
            if values:
                row[key] = max(values) if key.endswith("/max") else float(np.mean(values))
        rows.append(row)
    return tuple(rows)


def lanes_of(spans: Sequence[Mapping[str, Any]]) -> Lanes:
    """The spans of the timeline as shares of BINS equal parts of the run, one lane for each role."""
    edges = np.linspace(0, max((s["end"] for s in spans), default=0.0), BINS + 1)
    by_state = grouped(((s["role"], s["state"]), (s["start"], s["end"])) for s in spans)
    lanes: Lanes = {}
    for (role, state), times in by_state.items():
        knots = np.sort(np.array(times), axis=0).ravel()  # a role is in one state at a time
        spent = np.concatenate([[0.0], np.cumsum(np.diff(knots) * (np.arange(len(knots) - 1) % 2 == 0))])
        part = np.diff(np.interp(edges, knots, spent)) / (edges[1] - edges[0])
        lanes.setdefault(role, {})[state] = np.clip(part, 0, 1).tolist()
    return lanes


def evenly_chosen(samples: Sequence[Mapping[str, Any]], count: int) -> tuple[Mapping[str, Any], ...]:
    """Samples at even distances over the run, with the first and the last."""
    if len(samples) <= count:
        return tuple(samples)
    return tuple(samples[round(i * (len(samples) - 1) / (count - 1))] for i in range(count))
