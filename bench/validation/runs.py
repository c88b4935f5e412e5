"""The simulated runs of the validation: fitted by our procedure and the paper's."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.records import Record, say
from bench.validation.scenarios import PAPER_RUNS, SCENARIOS, PaperRun, Points, Scenario, simulate
from trainer.scaling import Fit, Sigmoid, fit
from trainer.scaling.curve.paper import PaperGrid, paper_fit

PROCEDURES = ("ours", "paper", "paper, finer")
FINER = PaperGrid(C_mid=(300.0, 30_000.0, 200), spacing="log")  # with more values of C_mid than the paper's
REFRESH_S = 60.0  # between two lines of progress


@dataclass(frozen=True, slots=True)
class Task:
    """One simulated run."""

    scenario: Scenario
    row: str  # of PAPER_RUNS
    i: int
    seed: int


def tasks_of(runs: int, seed: int) -> list[Task]:
    """All tasks."""
    return [
        Task(scenario, row, i, seed)
        for scenario in SCENARIOS
        for row in scenario.rows
        for i in range(scenario.count(runs))
    ]


def measure(task: Task) -> Record:
    """One run's record: each procedure's estimates, ours as [truth, value, low, high] by quantity."""
    scenario, run = task.scenario, PAPER_RUNS[task.row]
    points = simulate(scenario, run, task.i, task.seed)
    start = time.perf_counter()
    fitted = ours(points)
    record: Record = {
        "case": scenario.name, "row": task.row, "i": task.i, "seed": task.seed,
        "fit_ms": 1e3 * (time.perf_counter() - start),
        "identified": fitted.identified, "flags": list(fitted.flags),
        "autocorrelated_prob": fitted.autocorrelated_prob,
        "ours": {**_estimates(points, fitted), "far": _far(points, run, fitted.sigmoid)},
    }  # fmt: skip
    if scenario.paper:
        for key in PROCEDURES[1:]:
            curve = paper(points, key)
            record[key] = {"A": curve.A, "B": curve.B, "C_mid": curve.C_mid, "far": _far(points, run, curve)}
    if scenario.noise == "outliers":
        clean = simulate(scenario, run, task.i, task.seed, "normal")
        record["A_moved"] = fitted.A.value - ours(clean).A.value
        record["A_moved_paper"] = record["paper"]["A"] - paper(clean, "paper").A
    return record


def ours(points: Points) -> Fit:
    """The project's fit."""
    return fit(points.compute, points.reward, points.se, R0=points.R0, R0_se=points.R0_se)


def paper(points: Points, procedure: str) -> Sigmoid:
    """The curve fitted by the paper's procedure, with the grid it prints or a finer one."""
    assert points.R0 is not None, "the paper's procedure needs R0"
    grid = FINER if procedure == "paper, finer" else None
    return paper_fit(points.compute, points.reward, points.R0, grid).sigmoid


def truths(points: Points) -> dict[str, float]:
    """The true values of the estimated quantities; `2x` is the reward at twice the last compute."""
    curve = points.curve
    at_2x = float(curve.reward(2 * points.compute[-1]))
    return {"A": curve.A, "B": curve.B, "C_mid": curve.C_mid, "2x": at_2x}


def _estimates(points: Points, fitted: Fit) -> dict[str, list[float]]:
    estimates: dict[str, Any] = {"A": fitted.A, "B": fitted.B, "C_mid": fitted.C_mid, "2x": fitted.at_2x}
    return {k: [truth, (e := estimates[k]).value, e.low, e.high] for k, truth in truths(points).items()}


def _far(points: Points, run: PaperRun, curve: Sigmoid) -> float:
    """Error of the reward predicted where the paper predicts it, against the curve without noise."""
    return float(curve.reward(run.far) - points.curve.reward(run.far))


def work(tasks: Sequence[Task], processes: int) -> Iterator[Record]:
    """The records of the tasks, in their order; progress is printed."""
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")  # inherited by the processes spawned
    start = printed = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for n, record in enumerate(pool.imap(measure, tasks, chunksize=4), 1):
            yield record
            now = time.monotonic()
            if now - printed > REFRESH_S or n == len(tasks):
                printed, remaining = now, (now - start) / n * (len(tasks) - n)
                say(f"{n} of {len(tasks)} runs, about {remaining / 60:.0f} min left")
