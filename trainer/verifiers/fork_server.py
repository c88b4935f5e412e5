"""The fork server: a bare process that imports a kind's scorer once and forks workers from then on.

    pool --- 4-byte slot + a socket's end ---> fork server    "a fresh worker for this slot, kill the old one"
    pool <-- length + JSON, both ways -------> worker     one item, one judgement; JSON, since a worker
                                                          that ran a model's text must not be unpickled

A fork costs milliseconds, so a killed worker is replaced at once. It is safe here, since the fork server has
no threads; and it knows nothing of the run: not its main script, not its environment, not its files.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import struct
import sys
import tempfile
from typing import Any

from trainer.config import ConfigError
from trainer.verifiers.kinds import BUILT_IN, Scorer, load_scorer
from trainer.verifiers.sandbox import die_with_parent, limit, lock_down

LENGTH = struct.Struct("!I")


def main(fd: int, kind: str, cpu_seconds: int) -> None:
    """Serve the pool on socket `fd` until it closes, then kill every worker."""
    control = socket.socket(fileno=fd)
    try:
        scorer = load_scorer(kind)
    except Exception as e:  # told to the pool, which raises it where the user sees it
        error = str(e) if isinstance(e, ConfigError) else f"verifier.kind {kind}: {type(e).__name__}: {e}"
        control.sendall(json.dumps({"error": error}).encode())
        return
    control.sendall(b"{}")
    workers: dict[int, int] = {}
    with tempfile.TemporaryDirectory(prefix="verifier-") as empty:
        while True:
            message, fds, _, _ = socket.recv_fds(control, LENGTH.size, 1)
            if len(message) < LENGTH.size or not fds:
                break
            (slot,) = LENGTH.unpack(message)
            _kill(workers.pop(slot, None))
            pid = os.fork()
            if pid == 0:
                control.close()
                _work(fds[0], scorer, kind, empty, cpu_seconds)
            os.close(fds[0])
            workers[slot] = pid
        for pid in workers.values():
            _kill(pid)


def _kill(pid: int | None) -> None:
    """End a child and collect it: until then its id cannot belong to anyone else."""
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _work(fd: int, scorer: Scorer, kind: str, empty: str, cpu_seconds: int) -> None:
    """A worker's life; it never returns into the fork server's code."""
    try:
        os.chdir(empty)
        die_with_parent()
        limit(cpu_seconds)
        lock_down()
        while (item := _receive(fd)) is not None:
            payload = json.dumps(_judge(scorer, kind, item)).encode()
            os.write(fd, LENGTH.pack(len(payload)) + payload)
    finally:
        os._exit(0)  # no clean-up of the fork server's: the folder is not this process's to remove


def _receive(fd: int) -> dict[str, Any] | None:
    """The next item, None once the pool has closed the socket."""
    header = _read(fd, LENGTH.size)
    if header is None:
        return None
    body = _read(fd, LENGTH.unpack(header)[0])
    return None if body is None else json.loads(body)


def _read(fd: int, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        part = os.read(fd, size - len(data))
        if not part:
            return None
        data += part
    return data


def _judge(scorer: Scorer, kind: str, item: dict[str, Any]) -> dict[str, Any]:
    """A built-in scorer that raises could not read the text; a user's function that raises is broken."""
    try:
        score, outcome = scorer(item["completion"], item["answer"], item["metadata"])
    except Exception as e:
        detail = f"{type(e).__name__}: {e}"[:300]
        return {"score": 0.0, "outcome": "unparsable" if kind in BUILT_IN else "crash", "detail": detail}
    return {"score": score, "outcome": outcome, "detail": ""}


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
