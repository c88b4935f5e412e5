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
    """Every completion and every verdict restarts the deadline of all waits."""

    def __init__(self, deadline_s: float, key: str = "pipeline.deadline_s") -> None:
        self._deadline_s, self._key = deadline_s, key
        # The names of the engines that owe an answer and have sent nothing for so many seconds.
        self.silent: Callable[[float], list[str]] = lambda seconds: []
        self._looked, self._running = time.monotonic(), 0.0  # seconds in which this process was not stopped
        self._restarted = 0.0
        self.verifying = 0  # completions that wait for a verdict
        self._starting: list[float] = []  # deadlines of engines that start again

    @contextmanager
    def starting(self, start_deadline_s: float) -> Iterator[None]:
        """While an engine starts again, of which all else may be waiting."""
        self._starting.append(start_deadline_s)
        try:
            yield
        finally:
            self._starting.remove(start_deadline_s)
            self.restart()

    def restart(self) -> None:
        """A completion or a verdict has arrived."""
        self._restarted = self._now()

    @contextmanager
    def verification(self) -> Iterator[None]:
        """While a completion waits for a verdict."""
        self.verifying += 1
        try:
            yield
        finally:
            self.verifying -= 1
            self.restart()

    async def wait_for(self, work: Awaitable[T], name: str) -> T:
        """The result of `work`, or a TimeoutError that names it."""
        task, began = asyncio.ensure_future(work), self._now()
        try:
            while not task.done():
                deadline_s = max(self._deadline_s, *self._starting, 0)
                left = max(began, self._restarted) + deadline_s - self._now()
                if left <= 0:
                    stage = "verify: " if self.verifying else ""
                    silent = ", ".join(self.silent(self._deadline_s / 2))
                    raise TimeoutError(
                        f"{stage}{name}: no progress for {self._key} = {self._deadline_s:g} s"
                        f"{f' (no answer from {silent})' * bool(silent)}; "
                        "raise it if this machine is only slow"
                    )
                await asyncio.wait({task}, timeout=min(left, LOOK_S))
            return task.result()
        finally:
            task.cancel()

    def _now(self) -> float:
        last, self._looked = self._looked, time.monotonic()
        self._running += min(self._looked - last, 2 * LOOK_S)
        return self._running
