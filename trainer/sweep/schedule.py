"""Trains the runs of a sweep, as many at a time as there is room for, and stops them in order."""

import time
from collections.abc import Sequence

from trainer.run_folder import complete
from trainer.sweep.executors import Cluster, Handle, LocalExecutor
from trainer.sweep.progress import View
from trainer.sweep.spec import Run, Status

TICK_S = 0.5
LINE = 200  # characters of an error that are kept


def train(
    runs: Sequence[Run],
    compute: float,
    executor: LocalExecutor | Cluster,
    status: Status,
    view: View,
    came: Sequence[int],
) -> None:
    """Bring each run to this compute (0: to its last step). A run that fails is recorded; the others go on.

    `came`: signals. At the first, nothing is started any more, and runs end after their step, with a
    checkpoint; at the second, at once.
    """
    waiting = [run for run in runs if not complete(run.folder, compute)]
    taken_over = {run: handle for run in waiting if (handle := executor.find(run))}
    waiting = [run for run in waiting if run not in taken_over]
    active: dict[Run, Handle] = dict(taken_over)
    asked, began = 0, time.monotonic() - status.wall_s
    while active or (waiting and not came):
        for run in [run for run, handle in active.items() if handle.done()]:
            del active[run]
            if complete(run.folder, compute):
                status.errors.pop(run.name, None)
            elif run in taken_over and not came:
                waiting.append(run)  # as it may have been to end at an earlier rung
            elif not came:
                status.errors[run.name] = last_error(run)
            taken_over.pop(run, None)
        while asked < len(came):
            asked += 1
            for handle in active.values():
                handle.stop()
        free = [i for i in range(executor.jobs) if i not in {h.slot for h in active.values()}]
        for slot in free[: max(0, executor.jobs - len(active))]:
            if waiting and not came:
                run = waiting.pop(0)
                active[run] = executor.start(run, compute, slot)
        status.wall_s = time.monotonic() - began
        view.show(list(active), status, stopping=bool(came))
        status.write()
        time.sleep(TICK_S)


def last_error(run: Run) -> str:
    """The line in which the run's last attempt says why it ended."""
    text = run.log.read_text(errors="replace") if run.log.is_file() else ""
    lines = [line.strip() for line in text.rpartition("\n$ ")[2].splitlines()[1:] if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    line = (errors or lines or ["it ended without a message"])[-1]
    return f"{line.removeprefix('error: ')[:LINE]} (log: {run.log})"
