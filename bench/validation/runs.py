"""The simulated runs of the validation: their list and order, measured by processes and kept line by line."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.records import ROOT, Record
from bench.validation import fits as validate_fits
from bench.validation import intervals as validate_intervals
from bench.validation.intervals import INTERVAL_SCENARIOS
from bench.validation.scenarios import SCENARIOS, Scenario
from trainer.jsonl import append, open_to_append, read_lines

Key = tuple[str, str, str, int, int]

REFRESH_S = 60.0  # between two lines of progress


@dataclass(frozen=True, slots=True)
class Study:
    """A measurement made on each run of some scenarios."""

    scenarios: tuple[Scenario, ...]
    measure: Callable[[tuple[Scenario, str, int, int]], Record]
    sources: tuple[str, ...]  # the code that a record depends on

    def version(self) -> str:
        """A hash of the code; records kept by other code are not used."""
        return hashlib.sha256(b"".join((ROOT / file).read_bytes() for file in self.sources)).hexdigest()[:10]


CURVE = ROOT / "trainer/scaling/curve"
CORE = tuple(str(path.relative_to(ROOT)) for path in sorted(CURVE.glob("*.py")))
SIMULATION = ("bench/validation/scenarios.py", "bench/validation/fits.py")
INTERVALS = (
    "bench/validation/intervals.py",
    "bench/validation/classical_intervals.py",
    "bench/validation/least_squares.py",
)
STUDIES: Mapping[str, Study] = {
    "runs": Study(SCENARIOS, validate_fits.measure, (*CORE, *SIMULATION)),
    "intervals": Study(INTERVAL_SCENARIOS, validate_intervals.measure, (*CORE, *SIMULATION, *INTERVALS)),
}


@dataclass(frozen=True, slots=True)
class Task:
    """One simulated run of a study."""

    study: str
    scenario: Scenario
    row: str  # of PAPER_RUNS
    i: int
    seed: int
    place: float  # among the runs of its scenario and row: 0 to 1

    @property
    def key(self) -> Key:
        return self.study, self.scenario.name, self.row, self.i, self.seed


def tasks_of(runs: int, seed: int) -> list[Task]:
    """All tasks, in an order in which any first part has the same share of every scenario and row."""
    every = [
        Task(name, scenario, row, i, seed, (i + 0.5) / scenario.count(runs))
        for name, study in STUDIES.items()
        for scenario in study.scenarios
        for row in scenario.rows
        for i in range(scenario.count(runs))
    ]
    return sorted(every, key=lambda task: task.place)


def kept_in(out: Path) -> dict[str, Path]:
    """The file of each study."""
    return {name: out / f"{name}-{study.version()}.jsonl" for name, study in STUDIES.items()}


def read(files: Mapping[str, Path]) -> dict[Key, Record]:
    """The records kept in these files."""
    return {
        (name, record["case"], record["row"], record["i"], record["seed"]): record
        for name, file in files.items()
        if file.is_file()
        for record in read_lines(file)
    }


def work(tasks: Sequence[Task], files: Mapping[str, Path], processes: int) -> Iterator[tuple[Key, Record]]:
    """Measure, keep the records, and print how long it will take."""
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")  # inherited by the processes spawned
    began = printed = time.monotonic()
    with ExitStack() as stack:
        kept = {name: stack.enter_context(open_to_append(file)) for name, file in files.items()}
        pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(processes))
        for n, (task, record) in enumerate(pool.imap_unordered(_measure, tasks), 1):
            append(kept[task.study], record)
            yield task.key, record
            now = time.monotonic()
            if now - printed > REFRESH_S or n == len(tasks):
                printed, left = now, (now - began) / n * (len(tasks) - n)
                print(f"{n} of {len(tasks)} runs, about {left / 60:.0f} min left", flush=True)


def _measure(task: Task) -> tuple[Task, Record]:
    return task, STUDIES[task.study].measure((task.scenario, task.row, task.i, task.seed))
