"""The pool's workers: processes that judge one item after another; one that overruns or dies is replaced."""

import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, get_args

from trainer.config import ConfigError, VerifierConfig
from trainer.types import Answer, Outcome, Verdict
from trainer.verifiers.channel import DETACHED, ONE_THREAD, ask
from trainer.verifiers.fork_server import READY, SLOT_BYTES
from trainer.verifiers.verifier import Verifier

START_S = 120.0  # limit for the fork server to import a scorer
MAX_REPLY = 4096  # bytes
MAX_ITEMS = 500  # of one worker, since sympy's caches grow; a new one is slow at first
MAX_BUSY_S = 300.0  # of one worker, so that its CPU limit is only reached by an item that overruns
_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "TZ")


class Workers:
    """A kind's workers and their fork server. ConfigError if the user's function cannot be imported."""

    def __init__(self, verifier: Verifier, config: VerifierConfig, note: Callable[[str], None]) -> None:
        self._verifier, self._note = verifier, note
        self._cpu_s = math.ceil(MAX_BUSY_S + 2 * config.timeout_s)
        self.fork_server, self._control = self._start()
        self._idle = list(range(config.workers))  # slots, each with a worker
        self._items, self._busy_s = [0] * config.workers, [0.0] * config.workers  # of each slot's worker
        self._conns = [self._renewed(slot) for slot in self._idle]

    async def judge(self, completion: str, answer: Answer, metadata: dict[str, Any]) -> Verdict:
        """The verdict of an idle worker. OSError if the scorer raises, or the worker dies or lies."""
        slot, answered, start = self._idle.pop(), False, time.monotonic()
        try:
            score, outcome, error = await ask(self._conns[slot], (completion, answer, metadata), MAX_REPLY)
            if not 0.0 <= score <= 1.0 or outcome not in get_args(Outcome):
                raise ValueError("unknown score or outcome")
            answered = True
        except (ValueError, TypeError, RecursionError) as e:
            raise ChildProcessError("the worker's reply is no verdict") from e
        finally:  # also if cancelled: the worker's late reply must not be taken for the next item's
            self._items[slot] += 1
            self._busy_s[slot] += time.monotonic() - start
            worn = self._items[slot] >= MAX_ITEMS or self._busy_s[slot] > MAX_BUSY_S
            if not answered or worn or self._verifier.may_execute(completion):
                self._conns[slot].close()
                self._conns[slot] = self._renewed(slot)
            self._idle.append(slot)
        if outcome == "crash":
            raise ChildProcessError(error)
        return Verdict(score, outcome)

    def close(self) -> None:
        """End the workers and the fork server."""
        for conn in (*self._conns, self._control):
            conn.close()
        _end(self.fork_server)

    def _renewed(self, slot: int) -> socket.socket:
        """The connection of a new worker, not waited for; the fork server kills the slot's old one."""
        ours, worker_end = socket.socketpair()
        ours.setblocking(False)
        self._items[slot], self._busy_s[slot] = 0, 0.0
        with worker_end:
            request = [slot.to_bytes(SLOT_BYTES, "big")], [worker_end.fileno()]
            try:
                socket.send_fds(self._control, *request)
            except OSError:
                self._note("the fork server died and is restarted")
                self.fork_server, self._control = self._start()
                socket.send_fds(self._control, *request)
        return ours

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Start the fork server with a minimal environment and wait until it has imported the scorer."""
        kind, (ours, server_end) = self._verifier.kind, socket.socketpair()
        environment = {k: os.environ[k] for k in _ENVIRONMENT if k in os.environ}
        # Without threads, forking is safe, and the cores are left to the learner and the engine.
        environment |= ONE_THREAD
        paths = [os.path.abspath(path) for path in sys.path if not path or os.path.exists(path)]
        environment |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "0"}
        arguments = [str(server_end.fileno()), kind, str(self._cpu_s)]
        with server_end:
            command = [sys.executable, "-m", "trainer.verifiers.fork_server", *arguments]
            server = subprocess.Popen(command, env=environment, pass_fds=[server_end.fileno()], **DETACHED)
        ours.settimeout(START_S)
        try:
            reply = ours.recv(65536)
        except TimeoutError:
            reply = f"verifier.kind {kind}: no import within {START_S:g} s".encode()
        if reply != READY:
            ours.close()
            _end(server)
            raise ConfigError(reply.decode() or f"verifier.kind {kind}: the fork server died at its start")
        return server, ours


def _end(server: subprocess.Popen[bytes]) -> None:
    """Wait for the fork server, whose connection is closed, or kill it; its workers die with it."""
    try:
        server.wait(5.0)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
