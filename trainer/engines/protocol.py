"""The interface of an engine, and the client that implements it over a pipe to the engine's process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from multiprocessing.connection import Connection
from typing import Any, Protocol

from trainer.messages import (
    Abort,
    Ack,
    Pause,
    Ready,
    Resume,
    Shutdown,
    Transfer,
    UpdateWeights,
    WeightsHeld,
)
from trainer.types import Columns, Completion, Request


class Engine(Protocol):
    """Generates completions. Weights change between two tokens, and running sequences keep their KV."""

    def stream(self, request: Request) -> AsyncIterator[list[Completion]]:
        """Yield the request's n completions as they end; those that end with the same token come together."""
        ...

    async def update_weights(self, version: int, path: str) -> None:
        """Load this safetensors file (empty path: keep the weights) and label later tokens with `version`."""
        ...

    async def transfer(self, call: str, info: dict[str, Any]) -> None:
        """Make a call of vLLM's weight transfer. Allowed between `pause` and `resume`."""
        ...

    async def pause(self) -> None:
        """Stop between two tokens; sequences and KV stay. With engine.colocate, free the GPU memory as well:
        `resume` then recomputes the KV with the weights of that moment."""
        ...

    def resume(self) -> None:
        """Continue after `pause`."""
        ...


class EngineClient:
    """An Engine in another process. Once that is dead, every call raises a ConnectionError with its name."""

    def __init__(self, conn: Connection, name: str) -> None:
        self.name, self._conn = name, conn
        self._streams: dict[str, asyncio.Queue[list[Completion] | Exception]] = {}
        self._replies: dict[type[Any], asyncio.Queue[Any]] = {
            kind: asyncio.Queue() for kind in (Ready, WeightsHeld, Ack)
        }
        self._dead: Exception | None = None
        asyncio.get_running_loop().add_reader(conn.fileno(), self._receive)

    async def ready(self) -> dict[str, Any]:
        """Wait until the engine can take work; returns its description of itself."""
        return (await self._reply(Ready)).info

    async def stream(self, request: Request) -> AsyncGenerator[list[Completion]]:
        """See Engine; leaving the loop early aborts the rest."""
        queue: asyncio.Queue[list[Completion] | Exception] = asyncio.Queue()
        self._streams[request.request_id] = queue
        left = request.n
        try:
            self._send(request)
            while left:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                left -= len(item)
                yield item
        finally:
            del self._streams[request.request_id]
            if left and self._dead is None:
                self._send(Abort(frozenset({request.request_id})))

    async def update_weights(self, version: int, path: str) -> None:
        """See Engine."""
        self._send(UpdateWeights(version, path))
        held: WeightsHeld = await self._reply(WeightsHeld)
        if held.version != version:
            raise RuntimeError(f"{self.name} has weights version {held.version}; expected {version}")

    async def transfer(self, call: str, info: dict[str, Any]) -> None:
        """See Engine."""
        self._send(Transfer(call, info))
        await self._reply(Ack)

    async def pause(self) -> None:
        """See Engine."""
        self._send(Pause())
        await self._reply(Ack)

    def resume(self) -> None:
        """See Engine."""
        self._send(Resume())

    def close(self) -> None:
        """Ask the process to end."""
        asyncio.get_running_loop().remove_reader(self._conn.fileno())
        if self._dead is None:
            try:
                self._conn.send(Shutdown())
            except OSError as e:
                self._dead = e

    def _send(self, message: object) -> None:
        if self._dead is None:
            try:
                self._conn.send(message)
                return
            except OSError:
                self._mark_dead()
        raise self._dead or ConnectionError(f"{self.name} has died")

    async def _reply(self, kind: type[Any]) -> Any:
        if self._dead is not None:
            raise self._dead
        reply = await self._replies[kind].get()
        if isinstance(reply, Exception):
            raise reply
        return reply

    def _receive(self) -> None:
        try:
            message = self._conn.recv()
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self._conn.fileno())
            self._mark_dead()
            return
        if isinstance(message, Columns):
            ended: dict[str, list[Completion]] = {}
            for completion in message.to_records():
                ended.setdefault(completion.request_id, []).append(completion)
            for request_id, completions in ended.items():
                if queue := self._streams.get(request_id):  # None: aborted
                    queue.put_nowait(completions)
        else:
            self._replies[type(message)].put_nowait(message)

    def _mark_dead(self) -> None:
        self._dead = ConnectionError(f"{self.name}'s process has died")
        for queue in (*self._streams.values(), *self._replies.values()):
            queue.put_nowait(self._dead)
