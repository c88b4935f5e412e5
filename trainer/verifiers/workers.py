"""The pool's workers: processes that judge one item after another; one that overruns or dies is replaced."""

import math
import socket
import time
from collections.abc import Callable
from typing import Any, get_args

from trainer.config import VerifierConfig
from trainer.types import Answer, Outcome, Verdict
from trainer.verifiers.channel import ask
from trainer.verifiers.fork_server import ForkServer
from trainer.verifiers.verifier import Verifier

MAX_REPLY = 4096  # bytes
MAX_ITEMS = 500  # of one worker, since sympy's caches grow; a new one is slow at first
MAX_BUSY_S = 300.0  # of one worker, so that its CPU limit is only reached by an item that overruns


class Workers:
    """A kind's workers and their fork server. ConfigError if the user's function cannot be imported."""

    def __init__(self, verifier: Verifier, config: VerifierConfig, note: Callable[[str], None]) -> None:
        self._verifier = verifier
        arguments = verifier.kind, math.ceil(MAX_BUSY_S + 2 * config.timeout_s)  # CPU seconds
        label = f"verifier.kind {verifier.kind}"
        self.fork_server = ForkServer("trainer.verifiers.judging:judging", arguments, label, note)
        self._closed = False
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
            # One that is cancelled later than `close` must not start a process.
            if not self._closed and (not answered or worn or self._verifier.may_execute(completion)):
                self._conns[slot].close()
                self._conns[slot] = self._renewed(slot)
            self._idle.append(slot)
        if outcome == "crash":
            raise ChildProcessError(error)
        return Verdict(score, outcome)

    def close(self) -> None:
        """End the workers and the fork server."""
        self._closed = True
        for conn in self._conns:
            conn.close()
        self.fork_server.close()

    def _renewed(self, slot: int) -> socket.socket:
        """The connection of a new worker, not waited for."""
        self._items[slot], self._busy_s[slot] = 0, 0.0
        return self.fork_server.worker(slot)
