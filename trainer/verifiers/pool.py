"""The verifier pool: judges completions in worker processes, called from asyncio.

Every item gets a verdict. A worker that exceeds the time limit is killed and replaced (`timeout`), and so is
one that dies (`crash`). A worker has one item at a time, so no other item is lost with it.
"""

import asyncio
import json
import logging
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from trainer.config import ConfigError, VerifierConfig
from trainer.types import Outcome, Prompt, Verdict
from trainer.verifiers.fork_server import LENGTH
from trainer.verifiers.verifier import find

START_S = 120.0  # limit for the fork server to import a scorer
MAX_REPLY = 4096  # bytes
MAX_ITEMS = 500  # of one worker, since sympy's caches grow
MAX_BUSY_S = 300.0  # of one worker, so that its CPU limit is only reached by an item that overruns
MAX_STARTUP_CRASHES = 50  # if the first 50 verdicts are all crashes, the scorer itself is wrong
_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "TZ")
log = logging.getLogger(__name__)


class _Died(Exception):
    """The worker has died, or its reply is invalid."""


@dataclass
class _Slot:
    """A place for one worker."""

    number: int
    conn: socket.socket | None = None
    items: int = 0
    busy_s: float = 0.0


class VerifierPool:
    """To be used from one event loop, and closed. ConfigError if the kind is unknown or the user's function
    cannot be imported."""

    def __init__(self, config: VerifierConfig, warn: Callable[[str], None] = log.warning) -> None:
        self._config = config
        self._fork_server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._idle: asyncio.LifoQueue[_Slot] = asyncio.LifoQueue()
        self._slots = [_Slot(i) for i in range(config.workers)]
        self._report = warn
        self._first_crash = ""  # its reason
        self._crashes = self._other_verdicts = 0
        self._verifier = find(config.kind)
        self._judge_here = self._verifier.start(config)
        if self._verifier.needs_worker:
            self._start()
        for slot in self._slots:
            if self._verifier.needs_worker:
                self._renew(slot)
            self._idle.put_nowait(slot)

    async def score(self, prompt: Prompt, completion: str) -> Verdict:
        """The verdict: at once if comparing text settles it, else at most the time limit after a worker or a
        sandbox is free."""
        item = completion, prompt.answer, prompt.metadata
        if verdict := self._verifier.quick(*item):
            return verdict
        slot = await self._idle.get()
        start, replace = time.monotonic(), self._judge_here is None
        try:
            async with asyncio.timeout(self._config.timeout_s):
                if self._judge_here is not None:
                    return self._counted(await self._judge_here(*item))
                verdict = await self._judge(slot, json.dumps(item).encode())
            slot.items += 1
            slot.busy_s += time.monotonic() - start
            replace = slot.items >= MAX_ITEMS or slot.busy_s > MAX_BUSY_S
            replace = replace or self._verifier.may_execute(completion)
            return self._counted(verdict)
        except TimeoutError:
            return self._counted(Verdict(0.0, "timeout"))
        except (_Died, OSError) as e:
            self._warn(f"the worker died: {e}")
            return self._counted(Verdict(0.0, "crash"))
        finally:  # also if cancelled: the worker's late reply must not be taken for the next item's
            if replace:
                self._renew(slot)
            self._idle.put_nowait(slot)

    def close(self) -> None:
        """End the workers and the fork server."""
        for slot in self._slots:
            if slot.conn is not None:
                slot.conn.close()
        if self._control is not None and self._fork_server is not None:
            self._control.close()
            try:
                self._fork_server.wait(5.0)
            except subprocess.TimeoutExpired:
                self._fork_server.kill()  # its workers die with it
                self._fork_server.wait()

    async def _judge(self, slot: _Slot, message: bytes) -> Verdict:
        if slot.conn is None:
            raise _Died("it could not be started")
        loop, conn = asyncio.get_running_loop(), slot.conn
        await loop.sock_sendall(conn, LENGTH.pack(len(message)) + message)
        (size,) = LENGTH.unpack(await _receive(conn, LENGTH.size))
        if size > MAX_REPLY:
            raise _Died(f"its reply has {size} bytes")
        try:
            score, outcome, error = json.loads(await _receive(conn, size))
            valid = 0.0 <= score <= 1.0 and outcome in get_args(Outcome)
        except (ValueError, TypeError, RecursionError):
            valid = False
        if not valid:
            raise _Died("its reply is no verdict")
        if outcome == "crash":
            self._warn(error)
        return Verdict(score, outcome)

    def _renew(self, slot: _Slot) -> None:
        """Request a new worker for the slot, without waiting; the fork server kills the old one."""
        if slot.conn is not None:
            slot.conn.close()
        ours, worker_end = socket.socketpair()
        ours.setblocking(False)
        slot.conn, slot.items, slot.busy_s = ours, 0, 0.0
        with worker_end:
            for attempt in range(2):
                try:
                    assert self._control is not None
                    socket.send_fds(self._control, [LENGTH.pack(slot.number)], [worker_end.fileno()])
                    return
                except OSError:
                    if attempt:
                        raise
                    self._warn("the fork server died and is restarted")
                    self._start()

    def _start(self) -> None:
        """Start the fork server with a minimal environment and wait until it has imported the scorer."""
        ours, worker_end = socket.socketpair()
        paths = [os.path.abspath(p) for p in sys.path if not p or os.path.exists(p)]
        environment = {k: os.environ[k] for k in _ENVIRONMENT if k in os.environ}
        # Without threads, forking is safe, and the cores are left to the learner and the engine.
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "0"}
        cpu = str(math.ceil(MAX_BUSY_S + 2 * self._config.timeout_s))
        fd = str(worker_end.fileno())
        command = [sys.executable, "-m", "trainer.verifiers.fork_server", fd, self._config.kind, cpu]
        with worker_end:
            quiet: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
            # In a session of its own, since the launcher handles Ctrl-C.
            options: Any = {"env": environment, "pass_fds": [worker_end.fileno()], "start_new_session": True}
            self._fork_server = subprocess.Popen(command, **quiet, **options)
        self._control = ours
        ours.settimeout(START_S)
        try:
            reply = ours.recv(65536)
        except TimeoutError as e:
            self.close()
            raise ConfigError(f"verifier.kind {self._config.kind}: no import within {START_S:g} s") from e
        died = f"verifier.kind {self._config.kind}: the fork server died at its start"
        error = json.loads(reply).get("error") if reply else died
        if error:
            self.close()
            raise ConfigError(error)

    def _warn(self, detail: str) -> None:
        """Report the first crash; the metrics count the others."""
        if not self._first_crash:
            self._report(f"verifier {self._config.kind}: {detail} (further crashes are only counted)")
        self._first_crash = self._first_crash or detail

    def _counted(self, verdict: Verdict) -> Verdict:
        """The verdict; ConfigError if the scorer has only crashed so far."""
        self._crashes += verdict.outcome == "crash"
        self._other_verdicts += verdict.outcome != "crash"
        if self._crashes >= MAX_STARTUP_CRASHES and not self._other_verdicts:
            raise ConfigError(
                f"verifier.kind {self._config.kind}: each of its first {MAX_STARTUP_CRASHES} verdicts was a "
                f"crash, the first by {self._first_crash}; expected a score from 0 to 1: correct the function"
            )
        return verdict


async def _receive(conn: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = await asyncio.get_running_loop().sock_recv(conn, size - len(data))
        if not chunk:
            raise _Died("it closed the connection")
        data += chunk
    return data
