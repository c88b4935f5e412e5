"""The controller's end of the pipe to an engine's process."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from trainer import messages
from trainer.pipes import RoleClient, has_room
from trainer.types import Columns, Completion, Request


class EngineClient(RoleClient):
    """An engine, which generates completions in another process. Weights change between two tokens, and
    running sequences keep their KV."""

    def __init__(self, conn: Connection, name: str) -> None:
        super().__init__(conn, name)
        self._streams: dict[str, asyncio.Queue[list[Completion] | Exception]] = {}
        self._ended: dict[str, list[Completion]] = {}  # arrived, by request, and not yet delivered
        self._paused = False
        # Completions that wait for their environments or a teacher, by the state of an engine without work.
        self._waiting = {"tools": 0, "teacher": 0, "evaluate": 0}
        self._said = "idle"  # the last `Waits` that was sent
        self._awaited = 0  # answers that calls wait for, besides those of streams
        self._silent_since = time.monotonic()  # the latest message, or the request after which it owes one

    async def ready(self) -> dict[str, Any]:
        """Wait until the engine can take work; returns its description of itself."""
        return (await self._answer()).info

    async def stream(self, request: Request) -> AsyncGenerator[list[Completion]]:
        """Yield the request's n completions as they end; those that have arrived together come together.
        Leaving the loop early aborts the rest."""
        queue: asyncio.Queue[list[Completion] | Exception] = asyncio.Queue()
        if not self._owes:
            self._silent_since = time.monotonic()
        self._streams[request.request_id] = queue
        remaining = request.n
        try:
            self._send(request)
            while remaining:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                remaining -= len(item)
                yield item
        finally:
            del self._streams[request.request_id]
            if remaining and self._dead is None and has_room(self._conn):  # else it reads nothing
                self._send(messages.Abort(frozenset({request.request_id})))

    def release(self, request_id: str) -> None:
        """Drop the keys and values that are kept for a request that continues this one."""
        if self._dead is None and has_room(self._conn):  # else it has none, or reads nothing
            with suppress(OSError):
                self._send(messages.Abort(frozenset({request_id})))

    def wait(self, state: str, more: int) -> None:
        """So many more completions wait for what this state names, or fewer."""
        self._waiting[state] += more
        if self._waits != self._said and self._dead is None and has_room(self._conn):
            with suppress(OSError):
                self._send(messages.Waits(self._waits))
                self._said = self._waits

    @property
    def _waits(self) -> str:
        return next((state for state, count in self._waiting.items() if count), "idle")

    async def update_weights(self, version: int, path: str) -> None:
        """Load this safetensors file (empty path: keep the weights) and label later tokens with `version`."""
        await self._ask(messages.UpdateWeights(version, path))

    async def transfer(self, call: str, info: dict[str, Any]) -> None:
        """Make a call of vLLM's weight transfer. Allowed between `pause` and `resume`."""
        await self._ask(messages.Transfer(call, info))

    async def pause(self) -> None:
        """Stop between two tokens; sequences and KV stay. With engine.colocate, free the GPU memory as well:
        `resume` then recomputes the KV with the weights of that moment."""
        await self._ask(messages.Pause())
        self._paused = True

    def resume(self) -> None:
        """Continue after `pause`."""
        self._send(messages.Resume())
        self._paused, self._silent_since = False, time.monotonic()

    def silent_s(self) -> float:
        """Seconds for which it has owed an answer and sent nothing."""
        return time.monotonic() - self._silent_since if self._owes else 0.0

    @property
    def _owes(self) -> bool:
        return bool(self._awaited or (self._streams and not self._paused))

    async def _ask(self, message: object) -> None:
        self._send(message)
        await self._answer()

    async def _answer(self) -> Any:
        if not self._owes:
            self._silent_since = time.monotonic()
        self._awaited += 1
        try:
            return await self._reply()
        finally:
            self._awaited -= 1

    def _receive(self, message: Any) -> None:
        self._silent_since = time.monotonic()
        if isinstance(message, Columns):
            for completion in message.to_records():
                self._ended.setdefault(completion.request_id, []).append(completion)
        else:
            super()._receive(message)

    def _received(self) -> None:
        """Deliver the completions of one request together, to wake its rollout up once."""
        for request_id, completions in self._ended.items():
            if queue := self._streams.get(request_id):  # None: aborted
                queue.put_nowait(completions)
        self._ended = {}

    def _fail(self, error: OSError) -> None:
        for queue in self._streams.values():
            queue.put_nowait(error)
