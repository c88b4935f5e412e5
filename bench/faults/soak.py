"""A long run under random faults: is anything lost, or growing? [an hour]

  python -m bench faults.soak --minutes 60      `make soak`

Every 20 to 60 seconds a process is killed: mostly an engine, the verifiers' fork server or a worker, which
the run must survive; one time in six the launcher, the controller or the learner, after which it is resumed.
In between the resources of every process are sampled. Growth is that of the median of the last quarter of a
process's life over that of its second quarter, for the longest life of each role.
"""

import random
import signal
import statistics
import tempfile
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.faults import machine
from bench.faults.run import START_DEADLINE_S, Run
from bench.faults.trial import audit
from bench.harness import Case, Row
from bench.table import table

OPTIONS: dict[str, Any] = {"minutes": (60.0, "length")}
SURVIVED = ("engine", "engine-1", "fork server", "verifier worker")
FATAL = ("launcher", "controller", "learner")  # whose growth counts
SAMPLE_S = 2.0
FLAGS = ("--engine.count", "2", "--pipeline.steps", "1000000")


Sample = dict[str, float]  # resources that a process holds at one moment


def sample(pid: int, folder: Path) -> Sample | None:
    """None if the process has ended, or files went while they were counted."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        files = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
        shared = sum(path.stat().st_size for path in (folder / "shm").rglob("*") if path.is_file())
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if "RssAnon" not in fields:  # a zombie has no memory
        return None
    memory, threads = int(fields["RssAnon"].split()[0]) / 1e3, int(fields["Threads"])
    return {"memory MB": memory, "files": files, "threads": threads, "shared MB": shared / 1e6}


def measure(minutes: float, seed: int) -> Row:
    """The samples of the longest life of each role in FATAL, the faults, and what was wrong."""
    lives: defaultdict[tuple[str, int], list[Sample]] = defaultdict(list)
    faults, wrong, rng = list[str](), list[str](), random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as name:
        folder, end = Path(name), time.monotonic() + 60 * minutes
        while time.monotonic() < end and not wrong:
            run = Run(folder, FLAGS, {})
            try:
                wrong += _live(run, rng, end, lives, faults)
            finally:
                run.close()
        final = audit(folder, FLAGS[:2])
        wrong += final["problems"] + final["orphans"]
        wrong += [f"left in shared memory: {name}" for name in machine.shared_files(folder)]
    longest = {
        role: max((samples for (r, _), samples in lives.items() if r == role), key=len, default=[])
        for role in FATAL
    }
    return {"lives": longest, "faults": faults, "wrong": wrong, "failed": bool(wrong)}


def _live(
    run: Run, rng: random.Random, end: float, lives: dict[tuple[str, int], list[Sample]], faults: list[str]
) -> Iterator[str]:
    """One process of the launcher, until a fault ends it or the time is up; yields what is wrong."""
    if not run.until(lambda: run.printed(r"\] training \.\.\."), START_DEADLINE_S):
        yield f"it did not start: {run.error}"
        return
    step, fault_at = 0, time.monotonic() + rng.uniform(20, 60)
    while time.monotonic() < end:
        run.until(lambda: False, SAMPLE_S)
        if run.process.poll() is not None:
            yield f"it ended: {run.error}"
            return
        for role in FATAL:
            if (pid := run.pid(role)) and (resources := sample(pid, run.folder)):
                lives[role, pid].append(resources)
        if time.monotonic() < fault_at:
            continue
        last, step = step, run.last_step()
        if step == last:
            yield f"no step since step {step}, after the fault {faults[-1:]}"
            return
        role = rng.choice(SURVIVED if rng.random() < 5 / 6 else FATAL)
        fault_at = time.monotonic() + rng.uniform(20, 60)
        if run.signal(role, signal.SIGKILL):
            faults.append(role)
            if role in FATAL:
                run.until(lambda: False, 60)
                if processes := run.survivors(60):
                    yield f"left after {role}: {processes}"
                return
    run.process.send_signal(signal.SIGINT)
    if not run.until(lambda: run.process.poll() is not None, 60) or run.process.returncode:
        yield f"it did not end in order: {run.error}"


def growth(samples: Sequence[float]) -> float:
    """Growth of the last quarter's median over the second quarter's, as a share."""
    quarter = len(samples) // 4
    if not quarter or not (before := statistics.median(samples[quarter : 2 * quarter])):
        return 0.0
    return statistics.median(samples[-quarter:]) / before - 1


def cases(options: Namespace) -> Iterator[Case]:
    """The run is one case."""
    yield "soak", partial(measure, options.minutes, 0)


def describe(head: Row, rows: Sequence[Row]) -> str:
    """Table of the resources in the longest life of each role, and their growth."""
    (row,), lines = rows, []
    for role, samples in row["lives"].items():
        columns = list(zip(*(s.values() for s in samples), strict=True))
        cells = [f"{statistics.median(c):.4g} ({growth(c):+.1%})" for c in columns]
        lines.append([role, f"{len(samples) * SAMPLE_S / 60:.1f}", *(cells or ["-"] * 4)])
    names = ("process", "longest life, minutes", "memory MB (growth)", "files", "threads", "shared MB")
    faults, wrong = row["faults"], row["wrong"]
    counts = ", ".join(f"{role} {faults.count(role)}" for role in (*SURVIVED, *FATAL))
    return f"{table(names, lines)}\n\n{len(faults)} killed: {counts}. Wrong: {'; '.join(wrong) or 'nothing'}."
