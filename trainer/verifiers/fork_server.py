"""The fork server: a minimal process that imports a scorer once and then forks workers.

    pool --- 4-byte slot + a socket ------> fork server   "a new worker for this slot; kill the old one"
    pool <-- length + JSON, both ways ----> worker        one item, one verdict; not pickle, since the
                                                          worker may have executed a model's text

A fork takes milliseconds, so a killed worker is replaced at once. It is safe here, since the fork server
has no threads. It has neither the run's main script nor its environment nor its open files.
"""

import json
import os
import resource
import shutil
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any

from trainer import run_folder
from trainer.config import ConfigError
from trainer.types import Outcome
from trainer.verifiers.sandbox import die_with_parent, limit, lock_down
from trainer.verifiers.verifier import Verifier, find

LENGTH = struct.Struct("!I")


def main(fd: int, kind: str, cpu_seconds: int) -> None:
    """Serve the pool on socket `fd` until it closes, then kill every worker."""
    control = socket.socket(fileno=fd)
    try:
        verifier = find(kind)
        verifier.load()
    except Exception as e:  # the pool raises it in the controller
        error = str(e) if isinstance(e, ConfigError) else f"verifier.kind {kind}: {type(e).__name__}: {e}"
        control.sendall(json.dumps({"error": error}).encode())
        return
    control.sendall(b"{}")
    workers: dict[int, int] = {}
    # If this process is killed, the launcher removes the folder.
    folder, lock = run_folder.own_folder(run_folder.shared())
    try:
        (empty := folder / "empty").mkdir()
        while True:
            message, fds, _, _ = socket.recv_fds(control, LENGTH.size, 1)
            if len(message) < LENGTH.size or not fds:
                break
            (slot,) = LENGTH.unpack(message)
            _kill(workers.pop(slot, None))
            pid = os.fork()
            if pid == 0:
                control.close()
                lock.close()
                _work(fds[0], verifier, empty, cpu_seconds)
            os.close(fds[0])
            workers[slot] = pid
        for pid in workers.values():
            _kill(pid)
    finally:
        shutil.rmtree(folder)


def _kill(pid: int | None) -> None:
    """Kill a child and reap it; its id cannot be reused before that."""
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _work(fd: int, verifier: Verifier, empty: Path, cpu_seconds: int) -> None:
    """Run the worker; never returns."""
    try:
        os.chdir(empty)
        die_with_parent()
        limit(cpu_seconds)
        lock_down()
        with open(fd, "rb") as requests:
            while header := requests.read(LENGTH.size):
                item = json.loads(requests.read(*LENGTH.unpack(header)))
                payload = json.dumps(_judge(verifier, *item)).encode()
                os.write(fd, LENGTH.pack(len(payload)) + payload)
    finally:
        os._exit(0)  # skips the fork server's clean-up


def _judge(verifier: Verifier, completion: str, answer: Any, metadata: Any) -> tuple[float, Outcome, str]:
    """Score, outcome and error: a built-in kind raises on text that it cannot parse, an own one on a bug."""
    try:
        return *verifier.slow(completion, answer, metadata), ""
    except Exception as e:
        return 0.0, verifier.error, f"{type(e).__name__}: {e}"[:300]


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
