"""The process around an engine that schedules by itself (vLLM here, or a vLLM server elsewhere).

    Request ──> waiting ──at most `slots` samples at once──> Backend.sample ──> Completion

A sample's cache salt is the version at the moment it is handed over, so what waits here is never served from
a prefix cache of older weights.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any, Protocol

import numpy as np

from trainer.config import ConfigError
from trainer.messages import (
    Abort,
    Event,
    Pause,
    Paused,
    Ready,
    Resume,
    Shutdown,
    Transfer,
    Transferred,
    UpdateWeights,
    WeightsHeld,
)
from trainer.roles import run_role
from trainer.telemetry import Clock, send
from trainer.types import Columns, Completion, Request

TELL_EVERY_S = 1.0
Sample = tuple[str, int]  # a request's id and the index of one of its completions


class Backend(Protocol):
    """What generates. Any call may raise, and then the process ends with that error."""

    limit: int  # tokens of the longest sequence

    async def sample(self, request: Request, index: int, version: int) -> Completion:
        """One completion, its prompt's cache salted by `version`; after `abort`, what there is of it."""
        ...

    async def abort(self, samples: Iterable[Sample]) -> None:
        """End these; their `sample` calls return."""
        ...

    async def pause(self) -> None:
        """Stop between two tokens; sequences and KV stay."""
        ...

    async def resume(self) -> None:
        """Go on."""
        ...

    async def sleep(self) -> None:
        """As `pause`, and leave a GPU that is shared with the learner to it: KV is lost, sequences stay."""
        ...

    async def wake(self) -> None:
        """Go on after `sleep`."""
        ...

    async def transfer(self, call: str, info: dict[str, Any]) -> None:
        """A call of vLLM's weight transfer, by its name there; while paused or asleep."""
        ...

    async def load(self, version: int, path: str) -> None:
        """While paused: take the file's weights (empty path: none) and label every later token `version`."""
        ...

    async def check(self) -> None:
        """Raise if it is no longer there; called every second."""
        ...

    async def close(self) -> None:
        """End it, and every process it has started."""
        ...


def run(
    role: str,
    conn: Connection,
    telemetry: Connection,
    slots: int,
    start: Callable[[], Awaitable[tuple[Backend, dict[str, Any]]]],
) -> None:
    """The whole life of an engine process; `start` gives the backend and what `Ready` tells of it."""
    clock = Clock(role, partial(send, telemetry))
    with suppress(OSError):
        os.setsid()  # Ctrl-C in the terminal is for the launcher, not for vLLM's processes
    try:
        run_role(role, telemetry, lambda: asyncio.run(_run(conn, telemetry, clock, slots, start)))
    finally:
        with suppress(OSError):
            clock.flush()


async def _run(
    conn: Connection,
    telemetry: Connection,
    clock: Clock,
    slots: int,
    start: Callable[[], Awaitable[tuple[Backend, dict[str, Any]]]],
) -> None:
    began = time.monotonic()
    backend, info = await start()
    try:
        conn.send(Ready(info | {"slots": slots, "start_s": round(time.monotonic() - began, 1)}))
        await _Serving(backend, conn, telemetry, clock, slots).serve()
    except BaseExceptionGroup as group:
        raise _first(group) from group
    finally:
        await backend.close()


class _Serving:
    """Requests waiting and running, and the books of what the engine does."""

    def __init__(
        self, backend: Backend, conn: Connection, telemetry: Connection, clock: Clock, slots: int
    ) -> None:
        self.backend, self.conn, self.telemetry, self.clock, self.slots = (
            backend, conn, telemetry, clock, slots,
        )  # fmt: skip
        self.version = self.tokens = 0
        self.busy_s = 0.0
        self._evaluations: deque[tuple[Request, int]] = deque()  # request and its first sample not yet begun
        self._waiting: deque[tuple[Request, int]] = deque()
        self._running: dict[Sample, tuple[Request, asyncio.Task[None]]] = {}
        self._aborted: set[Sample] = set()  # that have not ended yet
        self._paused = self._updating = False
        self._booked = time.monotonic()
        self._ended: list[Completion] = []
        self._group = asyncio.TaskGroup()

    async def serve(self) -> None:
        """Until Shutdown, or the controller's death."""
        async with self._group:
            watch = self._group.create_task(self._watch())
            inbox = _inbox(self.conn)
            while not isinstance(message := await inbox.get(), Shutdown):
                await self._take(message)
            for task in (watch, *(task for _, task in self._running.values())):
                task.cancel()

    async def _take(self, message: object) -> None:
        match message:
            case Request() as request:
                check_request(request, self.backend.limit)
                (self._evaluations if request.evaluation else self._waiting).append((request, 0))
            case UpdateWeights(version, path):
                await self._update(version, path)
            case Abort(request_ids):
                await self._abort(request_ids)
            case Pause():
                self._book()
                self._paused = True
                await self.backend.sleep()
                self._send()  # what ended before the pause
                self.conn.send(Paused())
            case Resume():
                self._book()
                await self.backend.wake()
                self._paused = False
            case Transfer(call, info):
                with self.clock.state("weight_update"):
                    await self.backend.transfer(call, info)
                self.conn.send(Transferred())
        self._fill()

    async def _update(self, version: int, path: str) -> None:
        began = time.monotonic()
        self._book()
        self._updating = True
        self.clock.enter(self._state)
        if not self._paused:
            await self.backend.pause()
        await self.backend.load(version, path)
        self.version = version
        if not self._paused:
            await self.backend.resume()
        self._send()
        self._book()
        self._updating = False
        self.conn.send(WeightsHeld(version, time.monotonic() - began))

    async def _abort(self, request_ids: frozenset[str]) -> None:
        for queue in (self._evaluations, self._waiting):
            for request, first in [queue.popleft() for _ in range(len(queue))]:
                if request.request_id in request_ids:
                    self._ended += [_nothing_yet(request, i) for i in range(first, request.n)]
                else:
                    queue.append((request, first))
        self._send()
        self._aborted |= {s for s in self._running if s[0] in request_ids}
        await self.backend.abort(frozenset(self._aborted))

    def _fill(self) -> None:
        """Hand over what may run; evaluations first."""
        self._book()
        while not (self._paused or self._updating) and len(self._running) < self.slots:
            queue = self._evaluations or self._waiting
            if not queue:
                break
            request, index = queue.popleft()
            if index + 1 < request.n:
                queue.appendleft((request, index + 1))
            task = self._group.create_task(self._sample(request, index))
            self._running[request.request_id, index] = request, task
        self.clock.enter(self._state)

    async def _sample(self, request: Request, index: int) -> None:
        completion = await self.backend.sample(request, index, self.version)
        if not np.isfinite(completion.logprobs_gen).all():
            raise ConfigError(
                f"the logits of weights version {self.version} are not finite: training has diverged. "
                "Lower learner.lr, then --resume from an earlier checkpoint"
            )
        self._book()
        del self._running[request.request_id, index]
        self._aborted.discard((request.request_id, index))
        self.tokens += len(completion.token_ids)
        if not self._ended:  # those that end with one token travel together
            asyncio.get_running_loop().call_soon(self._send)
        self._ended.append(completion)
        self._fill()

    def _send(self) -> None:
        if self._ended:
            with suppress(OSError):  # a controller that is gone reads as Shutdown
                self.conn.send(Columns.from_records(self._ended))
            self._ended.clear()

    @property
    def _state(self) -> str:
        if self._updating:
            return "weight_update"
        return "generate" if self._running and not self._paused else "idle"

    def _book(self) -> None:
        """Book the time since the last change; call it before the next one."""
        now = time.monotonic()
        if self._state == "generate":
            self.busy_s += now - self._booked
            evaluations = sum(request.evaluation for request, _ in self._running.values())
            if share := evaluations / len(self._running):
                self.clock.split({"generate": 1 - share, "evaluate": share})
        self._booked = now

    async def _watch(self) -> None:
        """Every second: see that the backend lives, tell how much it has made once that is more.

        And abort again what still runs: vLLM ignores the abort of a sample that it is just being given.
        """
        told = 0
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            await self.backend.check()
            if self._aborted:
                await self.backend.abort(frozenset(self._aborted))
            self._book()
            self.clock.enter(self._state)
            if self.tokens > told:  # tokens count when their completion ends
                data = {"tokens": self.tokens, "busy_s": self.busy_s}
                send(self.telemetry, Event("engine", time.monotonic(), data))
                told = self.tokens


def check_request(request: Request, limit: int) -> None:
    """ConfigError for a request that no engine can serve."""
    prompt, new = len(request.prompt_ids), request.max_tokens
    if not prompt or new < 1:
        raise ConfigError(
            f"request {request.request_id}: a prompt of {prompt} tokens and max_tokens {new}; "
            "neither may be empty"
        )
    if prompt + new > limit:
        raise ConfigError(
            f"request {request.request_id}: {prompt} prompt tokens and {new} new ones; the engine holds "
            f"{limit} positions. Lower engine.max_new_tokens or data.max_prompt_tokens"
        )


def _nothing_yet(request: Request, index: int) -> Completion:
    """Of a sample that never began."""
    none = np.zeros(0, np.int32)
    return Completion(request.request_id, index, none, none.astype(np.float32), none, "abort")


def _inbox(conn: Connection) -> asyncio.Queue[Any]:
    """The controller's messages as they come, whatever the loop is at; a controller that is gone reads as
    Shutdown."""
    inbox: asyncio.Queue[Any] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def read() -> None:
        with suppress(RuntimeError):  # the loop has ended
            with suppress(EOFError, OSError):
                while True:
                    loop.call_soon_threadsafe(inbox.put_nowait, conn.recv())
            loop.call_soon_threadsafe(inbox.put_nowait, Shutdown())

    Thread(target=read, daemon=True).start()
    return inbox


def _first(error: BaseException) -> BaseException:
    """The error that a group of tasks ended with."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
