"""One cell of the matrix: a run that meets its fault, is resumed, and is audited."""

import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from bench.faults import ledger_check, machine
from bench.faults.cells import CLOCK, FROZEN, FULL, INF, KILLED, NAN, PHASES, READ_ONLY, VLLM, Cell
from bench.faults.run import DEADLINE_S, LAG, PROMPTS, PROMPTS_PER_STEP, START_DEADLINE_S, STARTED_S, Run
from bench.harness import Row

GRACE_S = 25.0  # beyond the deadline, for the launcher to end what is left
FROZEN_LAUNCHER_S = 5.0  # it is stopped and continued, as by Ctrl-Z and fg
ORPHANS_S = DEADLINE_S + GRACE_S  # for the roles to end after their launcher was killed
ROUNDS = 4  # optimizer steps after which a run is at work again: more than can have been under way
MORE_STEPS = 4
DISK_BYTES = 100_000_000


def try_cell(cell: Cell, seed: str) -> Row:
    """The run's outcome, the processes and files that it left, and the errors in its books."""
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with _disk(folder, cell.fault):
            row = asdict(cell) | _meet(cell, folder, random.Random(seed))
            end = audit(folder, cell.flags)
            row["orphans"] = row.get("orphans", []) + end["orphans"]
        return row | {"problems": end["problems"], "leaked": sorted(machine.shared_files(folder))}


def _meet(cell: Cell, folder: Path, rng: random.Random) -> Row:
    """Start the run, let the fault happen at a random instant of the phase, and watch."""
    jump = {"FAULTS_CLOCK_JUMP": "86400"} if cell.fault == CLOCK else {}
    steps = MORE_STEPS if cell.phase == "ending" or cell.fault == CLOCK else 100_000
    run = Run(folder, (*cell.flags, "--pipeline.steps", str(steps)), jump)
    try:
        if cell.fault == CLOCK:
            run.until(lambda: False, 120)
            return _outcome(cell, run, run.began)
        if not _reach(cell, run, rng, steps):
            return {"ended": "missed", "line": run.error or "the phase did not begin", "seconds": 0.0}
        began, step = time.monotonic(), run.last_step()
        undo = _cause(cell, run)
        try:
            at_work = _at_work(cell, run, began, step)
            starts = cell.phase == "start-up" or VLLM in cell.role
            run.until(at_work, DEADLINE_S + (START_DEADLINE_S if starts else 0) + GRACE_S, every_s=0.05)
            if run.process.poll() is not None or not at_work():
                return _outcome(cell, run, began)
            row = {"ended": "recovered", "seconds": time.monotonic() - began, "line": ""}
            run.process.send_signal(signal.SIGINT)
            run.until(lambda: False, DEADLINE_S + GRACE_S)
            if run.process.poll() is None:
                row |= {"ended": "hang", "line": "it did not end after Ctrl-C"}
            return row | _orphans(run)
        finally:
            undo()
    finally:
        run.close()


def _reach(cell: Cell, run: Run, rng: random.Random, steps: int) -> bool:
    """Wait for the phase, and then for a random part of its longest delay."""
    role, state, delay = PHASES[cell.phase]
    if cell.phase == "start-up":
        reached = run.until(lambda: run.pid("controller"), 60)
    elif cell.phase == "ending":
        reached = run.until(lambda: run.printed(rf"\] evaluation at step {steps}:"), STARTED_S)
    else:
        if not run.until(lambda: run.printed(r"\] training \.\.\."), STARTED_S):
            return False
        if not run.until(lambda: run.entered["learner", "optimizer"] >= rng.randint(1, 3), 60):
            return False
        entered = run.entered[role, state]
        reached = run.until(lambda: run.entered[role, state] > entered, 60)
    if not reached:
        return False
    time.sleep(rng.uniform(0, delay))
    if cell.role == "run folder" or cell.phase == "ending":  # then some processes have ended already
        return True
    patience = START_DEADLINE_S if cell.phase == "start-up" else 10  # some start when all else has
    return run.until(lambda: run.pid(cell.process), patience)


@contextmanager
def _disk(folder: Path, fault: str) -> Iterator[None]:
    """A small disk of its own for a run whose disk is to be full. Only root can mount it."""
    if fault != FULL:
        yield
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def _fill(folder: Path) -> Callable[[], object]:
    """Leave no byte free; returns what frees them."""
    ballast = folder / "ballast"
    with ballast.open("wb") as file, suppress(OSError):  # the run may take a block meanwhile
        while free := shutil.disk_usage(folder).free:
            os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, free)
    return ballast.unlink


def _cause(cell: Cell, run: Run) -> Callable[[], object]:
    """Let the fault happen; returns what ends it."""
    if cell.fault == KILLED:
        run.signal(cell.process, signal.SIGKILL)
    elif cell.fault == FROZEN:
        run.signal(cell.process, signal.SIGSTOP)
        if cell.role == "launcher":
            time.sleep(FROZEN_LAUNCHER_S)
            run.signal(cell.process, signal.SIGCONT)
    elif cell.fault == FULL:
        return _fill(run.folder)
    elif cell.fault in (NAN, INF):
        (run.folder / "states.poison").write_text(cell.process)
    elif cell.fault == READ_ONLY:
        folder = run.dir / "checkpoints"
        folder.mkdir(exist_ok=True)
        path, pid = str(folder), str(run.process.pid)
        for mount in (["--bind", path, path], ["-o", "remount,ro,bind", path]):
            # Among the mounts that the run sees: machine.with_shared_memory gives it its own.
            subprocess.run(["nsenter", "--mount", "--target", pid, "mount", *mount], check=True)
    return lambda: None


def _at_work(cell: Cell, run: Run, began: float, step: int) -> Callable[[], bool]:
    """A check that the run has recovered: optimizer steps follow, and an engine that was killed is back."""

    def check() -> bool:
        if run.last_step() < step + ROUNDS:
            return False
        if cell.fault == NAN and not run.printed("the step was skipped", began):
            return False
        killed_engine = cell.fault == KILLED and cell.process.startswith("engine")
        return not killed_engine or run.printed(rf"{cell.process} is back", began) is not None

    return check


def _outcome(cell: Cell, run: Run, began: float) -> Row:
    """The outcome of a run that has not recovered."""
    code, seconds = run.process.poll(), time.monotonic() - began
    killed = cell.role == "launcher" and code == -signal.SIGKILL
    ended = "killed" if killed else {None: "hang", 0: "complete"}.get(code, "error")
    line = run.error.replace(f"{run.folder}/", "")  # rows of all machines are alike
    return {"ended": ended, "code": code, "line": line, "seconds": seconds} | _orphans(run)


def _orphans(run: Run) -> Row:
    """The processes that outlive the launcher."""
    return {"orphans": sorted(run.survivors(ORPHANS_S).values())}


def audit(folder: Path, flags: tuple[str, ...]) -> Row:
    """Let the run end in order, a few steps later, and read its books."""
    steps = _steps(folder) + MORE_STEPS
    run = Run(folder, (*flags, "--pipeline.steps", str(steps)), {})
    try:
        run.until(lambda: False, STARTED_S + 60)
        code, line, orphans = run.process.poll(), run.error, sorted(run.survivors(5).values())
    finally:
        run.close()
    problems = [f"the last resume ended with {code}: {line}"]
    if code == 0:
        problems = ledger_check.problems(run.dir, PROMPTS, PROMPTS_PER_STEP, LAG)
    return {"problems": problems, "orphans": orphans}


def _steps(folder: Path) -> int:
    saved = (folder / "run" / "checkpoints").glob("step-*/controller.json")
    return max((int(path.parent.name.removeprefix("step-")) for path in saved), default=0)
