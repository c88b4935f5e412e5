"""Reports of a role to the launcher: a clock that books its states, and `send` for every message.

At every moment a role is in exactly one state, so its states add up to wall time.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

from trainer.messages import Spans

FLUSH_S = 0.5  # how often spans travel to the launcher


def send(telemetry: Connection, message: object) -> None:
    """Send a message to the launcher; no effect if it is dead, since the run then ends after this step."""
    with suppress(OSError):
        telemetry.send(message)


class Clock:
    """Books wall time under states. Between `state` blocks the role is `idle`.

    Example: `with clock.state("optimizer"): optimizer.step()`.
    """

    def __init__(self, role: str, send: Callable[[Spans], object], start: float | None = None) -> None:
        self.role, self._send = role, send
        self._state, self._since = "start-up", time.monotonic() if start is None else start
        self._spans: list[tuple[str, float, float]] = []
        self._flushed = self._since

    def enter(self, state: str) -> str:
        """Switch to `state`; returns the previous one."""
        previous, now = self._state, time.monotonic()
        if state != previous:
            self._spans.append((previous, self._since, now))
            self._state, self._since = state, now
        if now - self._flushed > FLUSH_S:
            self.flush()
        return previous

    @contextmanager
    def state(self, state: str) -> Iterator[None]:
        """Be in `state` for the block, then back in the state before."""
        previous = self.enter(state)
        try:
            yield
        finally:
            self.enter(previous)

    def split(self, shares: Mapping[str, float]) -> None:
        """Book the time since the last switch under several states, by share (shares sum to 1)."""
        now, begin = time.monotonic(), self._since
        for state, share in shares.items():
            end = begin + share * (now - self._since)
            self._spans.append((state, begin, end))
            begin = end
        self._since = now

    def flush(self) -> None:
        """Send the spans booked so far, with the current state up to now."""
        now = time.monotonic()
        self._spans.append((self._state, self._since, now))
        self._since = self._flushed = now
        spans = tuple(s for s in self._spans if s[2] > s[1])
        self._spans.clear()
        if spans:
            self._send(Spans(self.role, spans))
