"""The traces of a run on the machine: its processes, and files in shared memory.

Every process of a run inherits a PATH that begins with a mark of this trial, also the verifiers' fork server,
which gets hardly anything else of the environment.
"""

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

SHARED = Path("/dev/shm")


def processes(mark: str) -> dict[int, str]:
    """Living processes with this mark: their command lines by id. Zombies hold nothing and are left out."""
    lines = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ProcessLookupError):  # it has just ended
            marked = mark.encode() in (folder / "environ").read_bytes()
            if marked and (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                lines[int(folder.name)] = line
    return lines


def parent(pid: int) -> int:
    """The parent's id; 0 if the process has ended."""
    with suppress(OSError, ProcessLookupError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def verifiers(mark: str) -> tuple[int, list[int]]:
    """The verifiers' fork server (0 without one) and its workers."""
    pids = [pid for pid, line in processes(mark).items() if "trainer.verifiers.fork_server" in line]
    servers = [pid for pid in pids if parent(pid) not in pids]
    return (servers[0] if servers else 0), [pid for pid in pids if pid not in servers]


def with_shared_memory(folder: Path) -> list[str]:
    """The beginning of a command that gives it a shared memory of its own, in `folder`/shm.

    Empty where this user or this container may not mount."""
    if os.geteuid() or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        return []
    (folder / "shm").mkdir(exist_ok=True)
    script = f'mount --bind "{folder / "shm"}" {SHARED} && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", script, "sh"]


def shared_files(folder: Path) -> set[str]:
    """Names of the files in shared memory: weight folders, semaphores, blocks."""
    shared = folder / "shm"  # without one, other programs' files would count
    return {path.name for path in shared.iterdir()} if shared.exists() else set()


def kill_all(mark: str) -> None:
    """End whatever a trial has left."""
    for pid in processes(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
