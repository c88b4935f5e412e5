"""Processes that tests have started, by their ids: which of them still run."""

import os
import time
from collections.abc import Iterable
from pathlib import Path


def state(pid: int) -> tuple[str, int] | None:
    """The state of a process, such as S or Z, and its parent; None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], int(fields[1])


def alive(pids: Iterable[int]) -> set[int]:
    """Those that are neither gone nor zombies."""
    return {pid for pid in pids if (known := state(pid)) and known[0] != "Z"}


def descendants(pid: int) -> set[int]:
    """The process and all that it has started and that still run."""
    pids = {int(folder.name) for folder in Path("/proc").glob("[0-9]*")}
    parents = {p: known[1] for p in pids if (known := state(p)) and known[0] != "Z"}
    family = {pid}
    while new := {p for p, parent in parents.items() if parent in family} - family:
        family |= new
    return family


def wait_until_gone(pids: Iterable[int], seconds: float = 30.0) -> None:
    """Fail unless all of them end in time; what is left is killed."""
    deadline = time.monotonic() + seconds
    while (running := alive(pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    names = {pid: Path(f"/proc/{pid}/cmdline").read_text()[:80] for pid in running}
    for pid in running:
        os.kill(pid, 9)
    assert not running, f"these processes were left behind: {names}"
