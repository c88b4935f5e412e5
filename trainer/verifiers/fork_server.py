"""The fork server: a minimal process that imports a scorer once and then forks workers.

    pool --- 4-byte slot + a socket ---> fork server   "a new worker for this slot; kill the old one"
    pool <-- JSON lines, both ways ----> worker        one item, one verdict

A fork takes milliseconds, so a killed worker is replaced at once. It is safe here, since the fork server
has no threads. It has neither the run's main script nor its environment nor its open files.
"""

import os
import resource
import signal
import socket
import sys
from typing import Any

from trainer.config import ConfigError
from trainer.roles import signal_at_death_of_parent
from trainer.types import Outcome
from trainer.verifiers.code_runner import Channel
from trainer.verifiers.sandbox import limit, lock_down
from trainer.verifiers.verifier import Verifier, find

READY = b"ready"
SLOT_BYTES = 4


def main(fd: int, kind: str, cpu_seconds: int) -> None:
    """Serve the pool on socket `fd` until it closes, then kill every worker."""
    control = socket.socket(fileno=fd)
    try:
        verifier = find(kind)
        verifier.load()
    except Exception as e:  # the pool raises it in the controller
        error = str(e) if isinstance(e, ConfigError) else f"verifier.kind {kind}: {type(e).__name__}: {e}"
        control.sendall(error.encode())
        return
    control.sendall(READY)
    workers: dict[bytes, int] = {}
    while True:
        slot, fds, _, _ = socket.recv_fds(control, SLOT_BYTES, 1)
        if not fds:
            break
        _kill(workers.pop(slot, None))
        if not (pid := os.fork()):
            control.close()
            _work(fds[0], verifier, cpu_seconds)
        os.close(fds[0])
        workers[slot] = pid
    for pid in workers.values():
        _kill(pid)


def _kill(pid: int | None) -> None:
    """Kill a child and reap it; its id cannot be reused before that."""
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _work(fd: int, verifier: Verifier, cpu_seconds: int) -> None:
    """Run the worker until the pool closes its connection; never returns."""
    try:
        os.chdir("/")
        signal_at_death_of_parent(signal.SIGKILL)  # so that a looping worker does not outlive the run
        limit(cpu_seconds)
        pool = Channel(fd, fd)
        lock_down()
        while True:
            pool.send(_judge(verifier, *pool.receive()))
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
