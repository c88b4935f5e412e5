"""The verifier pool: judges completions from asyncio, in workers that are killed when they overrun.

Every item gets a verdict: at its deadline the worker is killed and replaced ('timeout'), and a worker that
dies is replaced too ('crash'). One item is with one worker at a time, so no other item is ever lost.
"""

from __future__ import annotations

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
from trainer.types import Outcome
from trainer.verifiers.fork_server import LENGTH
from trainer.verifiers.kinds import check_kind, judge_quick, may_execute, needs_workers

START_S = 120.0  # seconds the fork server may take to import a scorer
MAX_REPLY = 4096  # bytes; a judgement is shorter
MAX_ITEMS = 500  # a worker is replaced after so many, since sympy's caches grow,
LIFE_S = 300.0  # and after so many seconds of work, so that its CPU limit never hits the innocent
_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "TZ")
MAX_STARTUP_CRASHES = 50  # verdicts from the start on, all crashes: the scorer itself must be wrong
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one completion."""

    score: float  # 0 to 1
    outcome: Outcome


class _Died(Exception):
    """The worker is gone, or answers nonsense."""


@dataclass
class _Slot:
    """A place for one worker at a time."""

    number: int
    conn: socket.socket | None = None
    items: int = 0
    busy_s: float = 0.0


class VerifierPool:
    """`await pool.verify(...)` from one event loop; `close()` when done. Raises ConfigError at once where
    the kind is unknown or the user's function cannot be imported."""

    def __init__(self, config: VerifierConfig, tell: Callable[[str], None] = log.warning) -> None:
        check_kind(config.kind)
        self._config = config
        self._fork_server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._idle: asyncio.LifoQueue[_Slot] = asyncio.LifoQueue()
        self._slots = [_Slot(i) for i in range(config.workers)]
        self._tell = tell  # of the first crash
        self._crash = ""  # the first one's reason
        self._sound = self._crashes = 0  # worker verdicts so far
        if needs_workers(config.kind):
            self._start()
            for slot in self._slots:
                self._renew(slot)
                self._idle.put_nowait(slot)

    def quick(self, completion: str, answer: str) -> Verdict | None:
        """The verdict where comparing text settles it, None where a worker must decide."""
        judgement = judge_quick(self._config.kind, completion, answer)
        return None if judgement is None else Verdict(*judgement)

    async def verify(self, completion: str, answer: str, metadata: dict[str, Any]) -> Verdict:
        """A worker's verdict; never later than the time limit after one is free."""
        item = {"completion": completion, "answer": answer, "metadata": metadata}
        message = json.dumps(item).encode()
        slot = await self._idle.get()
        start = time.monotonic()
        spent = True
        try:
            async with asyncio.timeout(self._config.timeout_s):
                score, outcome = await self._ask(slot, message)
            slot.items += 1
            slot.busy_s += time.monotonic() - start
            spent = slot.items >= MAX_ITEMS or slot.busy_s > LIFE_S
            spent = spent or may_execute(self._config.kind, completion)
            return self._counted(Verdict(score, outcome))
        except TimeoutError:
            return self._counted(Verdict(0.0, "timeout"))
        except (_Died, OSError) as e:
            self._warn(f"worker died: {e}")
            return self._counted(Verdict(0.0, "crash"))
        finally:  # a cancelled item too: its worker's late answer must not meet the next one
            if spent:
                self._renew(slot)
            self._idle.put_nowait(slot)

    def close(self) -> None:
        """Kill the workers and the fork server."""
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

    async def _ask(self, slot: _Slot, message: bytes) -> tuple[float, Outcome]:
        if slot.conn is None:
            raise _Died("it could not be started")
        loop, conn = asyncio.get_running_loop(), slot.conn
        await loop.sock_sendall(conn, LENGTH.pack(len(message)) + message)
        (size,) = LENGTH.unpack(await _receive(conn, LENGTH.size))
        if size > MAX_REPLY:
            raise _Died(f"a reply of {size} bytes")
        try:
            reply = json.loads(await _receive(conn, size))
            score, outcome, detail = float(reply["score"]), reply["outcome"], str(reply["detail"])
        except (ValueError, KeyError, TypeError) as e:
            raise _Died("a reply that is no judgement") from e
        if not (math.isfinite(score) and 0.0 <= score <= 1.0 and outcome in get_args(Outcome)):
            raise _Died("a reply that is no judgement")
        if outcome == "crash":
            self._warn(detail)
        return score, outcome

    def _renew(self, slot: _Slot) -> None:
        """A fresh worker for the slot; the fork server kills the old one. Does not wait for either."""
        if slot.conn is not None:
            slot.conn.close()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        slot.conn, slot.items, slot.busy_s = ours, 0, 0.0
        with theirs:
            for attempt in range(2):
                try:
                    assert self._control is not None
                    socket.send_fds(self._control, [LENGTH.pack(slot.number)], [theirs.fileno()])
                    return
                except OSError:
                    if attempt:
                        raise
                    self._warn("the fork server died; it is started again")
                    self._start()

    def _start(self) -> None:
        """Start the fork server with a bare environment and wait until its scorer is imported."""
        ours, theirs = socket.socketpair()
        paths = [os.path.abspath(p) for p in sys.path if not p or os.path.exists(p)]
        environment = {k: os.environ[k] for k in _ENVIRONMENT if k in os.environ}
        # One thread each: forking is safe then, and the cores belong to the learner and the engine.
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "0"}
        cpu = str(math.ceil(LIFE_S + 2 * self._config.timeout_s))
        fd = str(theirs.fileno())
        command = [sys.executable, "-m", "trainer.verifiers.fork_server", fd, self._config.kind, cpu]
        with theirs:
            self._fork_server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the launcher to answer
            )
        self._control = ours
        ours.settimeout(START_S)
        try:
            reply = ours.recv(65536)
        except TimeoutError as e:
            self.close()
            raise ConfigError(
                f"verifier.kind {self._config.kind} was not imported within {START_S:g} s"
            ) from e
        error = json.loads(reply).get("error") if reply else "its process died while starting"
        if error:
            self.close()
            raise ConfigError(error)

    def _warn(self, detail: str) -> None:
        """Tell of the first crash; the outcomes count the others."""
        if not self._crash:
            self._tell(f"verifier {self._config.kind}: {detail} (further crashes are only counted)")
        self._crash = self._crash or detail

    def _counted(self, verdict: Verdict) -> Verdict:
        """The verdict, or ConfigError where the scorer has done nothing but crash."""
        self._crashes += verdict.outcome == "crash"
        self._sound += verdict.outcome != "crash"
        if self._crashes >= MAX_STARTUP_CRASHES and not self._sound:
            raise ConfigError(
                f"verifier.kind {self._config.kind}: each of its first {MAX_STARTUP_CRASHES} verdicts was a "
                f"crash, the first by {self._crash}; expected a score from 0 to 1: correct the function"
            )
        return verdict


async def _receive(conn: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = await asyncio.get_running_loop().sock_recv(conn, size - len(data))
        if not part:
            raise _Died("it closed its end")
        data += part
    return data
