"""The simulated runs of the validation: which, in what order, worked off by processes, kept line by line."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.validation import fits as validate_fits
from bench.validation import intervals as validate_intervals
from bench.validation.cases import CASES, Case
from bench.validation.intervals import INTERVAL_CASES

Record = dict[str, Any]
Key = tuple[str, str, str, int, int]

ROOT = Path(__file__).resolve().parents[2]  # not bench.measure's, which takes seconds to import torch
REFRESH = 60.0  # seconds between two lines of progress


@dataclass(frozen=True, slots=True)
class Part:
    """What is measured of each run of some cases."""

    cases: tuple[Case, ...]
    measure: Callable[[tuple[Case, str, int, int]], Record]
    sources: tuple[str, ...]  # files that a record depends on

    def version(self) -> str:
        """Of the code; what was kept of another is measured again."""
        return hashlib.sha256(b"".join((ROOT / file).read_bytes() for file in self.sources)).hexdigest()[:10]


SCALING, ALTERNATIVES = "trainer/scaling", "trainer/scaling/alternatives"
CORE = tuple(f"{SCALING}/{name}.py" for name in ("posterior", "fit", "sigmoid"))
SIMULATION = ("bench/validation/cases.py", "bench/validation/fits.py", f"{ALTERNATIVES}/paper.py")
INTERVALS = (
    "bench/validation/intervals.py",
    "bench/validation/classical_intervals.py",
    f"{ALTERNATIVES}/least_squares.py",
)
PARTS: Mapping[str, Part] = {
    "runs": Part(CASES, validate_fits.measure, (*CORE, *SIMULATION)),
    "intervals": Part(INTERVAL_CASES, validate_intervals.measure, (*CORE, *SIMULATION, *INTERVALS)),
}


@dataclass(frozen=True, slots=True)
class Task:
    """One simulated run of a part."""

    part: str
    case: Case
    row: str
    i: int
    seed: int
    place: float  # among the runs of its case and row: 0 to 1

    @property
    def key(self) -> Key:
        return self.part, self.case.name, self.row, self.i, self.seed


def tasks_of(runs: int, seed: int) -> list[Task]:
    """In such an order that what is cut short has done the same share of every case and row."""
    every = [
        Task(name, case, row, i, seed, (i + 0.5) / case.runs(runs))
        for name, part in PARTS.items()
        for case in part.cases
        for row in case.rows
        for i in range(case.runs(runs))
    ]
    return sorted(every, key=lambda task: task.place)


def kept_in(out: Path) -> dict[str, Path]:
    """The file of each part."""
    return {name: out / f"{name}-{part.version()}.jsonl" for name, part in PARTS.items()}


def read(files: Mapping[str, Path]) -> dict[Key, Record]:
    """Whole lines; the last one of a run that was killed may be half."""
    found = {}
    for name, file in files.items():
        lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
        for record in (json.loads(line) for line in lines if line.endswith("\n")):
            found[name, record["case"], record["row"], record["i"], record["seed"]] = record
    return found


def work(tasks: Sequence[Task], files: Mapping[str, Path], processes: int) -> Iterator[tuple[Key, Record]]:
    """Measure, keep, and say how long it will take."""
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")  # inherited by the processes spawned
    began = said = time.monotonic()
    for file in files.values():
        _cut_half_a_line(file)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for n, (task, record) in enumerate(pool.imap_unordered(_measure, tasks), 1):
            with files[task.part].open("a") as kept:
                kept.write(json.dumps(record) + "\n")
            yield task.key, record
            now = time.monotonic()
            if now - said > REFRESH or n == len(tasks):
                said, left = now, (now - began) / n * (len(tasks) - n)
                print(f"{n} of {len(tasks)} runs, about {left / 60:.0f} min left", flush=True)


def _measure(task: Task) -> tuple[Task, Record]:
    return task, PARTS[task.part].measure((task.case, task.row, task.i, task.seed))


def _cut_half_a_line(file: Path) -> None:
    if file.is_file():
        whole, newline, _ = file.read_bytes().rpartition(b"\n")
        file.write_bytes(whole + newline)
