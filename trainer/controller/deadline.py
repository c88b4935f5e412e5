"""The deadlines of all that the controller waits for: no progress for pipeline.deadline_s ends the run, and a
process that is not ready after pipeline.start_deadline_s.

Time during which the controller itself was stopped, as by Ctrl-Z, does not count.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
LOOK_S = 1.0  # how often a wait looks at the clock; time beyond twice that between two looks was stopped


class Deadline:
    """Every completion and every verdict restarts the deadline of all waits, but that of a start."""

    def __init__(self, deadline_s: float, start_deadline_s: float = 0.0) -> None:
        self._deadline_s, self._start_deadline_s = deadline_s, start_deadline_s
        # The names of the engines that owe an answer and have sent nothing for so many seconds.
        self.silent: Callable[[float], list[str]] = lambda seconds: []
        self._looked, self._running = time.monotonic(), 0.0  # seconds in which this process was not stopped
        self._restarted = 0.0
        self._verifying = 0  # completions that wait for a verdict
        self._starting = 0  # processes that start, for which all others may be waiting

    def restart(self) -> None:
        """A completion or a verdict has arrived."""
        self._restarted = self._now()

    @contextmanager
    def verification(self) -> Iterator[None]:
        """While a completion waits for a verdict."""
        self._verifying += 1
        try:
            yield
        finally:
            self._verifying -= 1
            self.restart()

    async def wait_for(self, work: Awaitable[T], name: str, start: bool = False) -> T:
        """The result of `work`, or a TimeoutError that names it. `start`: it is that of a process."""
        task, began = asyncio.ensure_future(work), self._now()
        self._starting += start
        try:
            while not task.done():
                deadline_s = self._start_deadline_s if start else self._deadline_s
                since = began if start else max(began, self._restarted)
                allowed = max(deadline_s, self._start_deadline_s if self._starting else 0.0)
                remaining = since + allowed - self._now()
                if remaining <= 0:
                    stage, key = "verify: " * bool(self._verifying), f"pipeline.{'start_' * start}deadline_s"
                    silent = ", ".join(self.silent(self._deadline_s / 2))
                    raise TimeoutError(
                        f"{stage}{name}: no progress for {key} = {deadline_s:g} s"
                        f"{f' (no answer from {silent})' * bool(silent)}; "
                        "raise it if this machine is only slow"
                    )
                await asyncio.wait({task}, timeout=min(remaining, LOOK_S))
            return task.result()
        finally:
            task.cancel()
            self._starting -= start
            if start:
                self.restart()

    def _now(self) -> float:
        last, self._looked = self._looked, time.monotonic()
        self._running += min(self._looked - last, 2 * LOOK_S)
        return self._running
