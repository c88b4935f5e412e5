"""What the controller asks of an engine, and the client that asks it over a pipe."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from multiprocessing.connection import Connection
from typing import Any, Protocol

from trainer.messages import (
    Abort,
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
from trainer.types import Columns, Completion, Request


class Engine(Protocol):
    """A generator of completions. Weights change between two tokens; running sequences keep their KV."""

    def stream(self, request: Request) -> AsyncIterator[list[Completion]]:
        """The request's n completions as they end, those together that end with one token."""
        ...

    async def update_weights(self, version: int, path: str) -> None:
        """Return once the engine holds `version`, from this safetensors file (empty: unchanged)."""
        ...

    async def transfer(self, call: str, info: dict[str, Any]) -> None:
        """Make a call of vLLM's weight transfer; between `pause` and `resume`."""
        ...

    async def pause(self) -> None:
        """Return once the engine stands still, mid-sequence; sequences and KV stay. With engine.colocate its
        GPU memory is free then, and the KV made again by the weights it wakes with."""
        ...

    def resume(self) -> None:
        """Go on where `pause` stopped."""
        ...


class EngineClient:
    """An Engine in another process. Once that is dead, every call raises ConnectionError with its name."""

    def __init__(self, conn: Connection, name: str) -> None:
        self.name, self._conn = name, conn
        self._streams: dict[str, asyncio.Queue[list[Completion] | Exception]] = {}
        self._answers: dict[type[Any], asyncio.Queue[Any]] = {
            kind: asyncio.Queue() for kind in (Ready, WeightsHeld, Transferred, Paused)
        }
        self._dead: Exception | None = None
        asyncio.get_running_loop().add_reader(conn.fileno(), self._receive)

    async def ready(self) -> dict[str, Any]:
        """What the engine says of itself once it can take work."""
        return (await self._answer(Ready)).info

    async def stream(self, request: Request) -> AsyncGenerator[list[Completion]]:
        """See Engine; leaving the loop early aborts what is left."""
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
        held: WeightsHeld = await self._answer(WeightsHeld)
        if held.version != version:
            raise RuntimeError(f"{self.name} holds version {held.version} where {version} was pushed")

    async def transfer(self, call: str, info: dict[str, Any]) -> None:
        """See Engine."""
        self._send(Transfer(call, info))
        await self._answer(Transferred)

    async def pause(self) -> None:
        """See Engine."""
        self._send(Pause())
        await self._answer(Paused)

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
                self._die()
        raise self._dead or ConnectionError(f"{self.name} has died")

    async def _answer(self, kind: type[Any]) -> Any:
        if self._dead is not None:
            raise self._dead
        answer = await self._answers[kind].get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _receive(self) -> None:
        try:
            message = self._conn.recv()
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self._conn.fileno())
            self._die()
            return
        if isinstance(message, Columns):
            ended: dict[str, list[Completion]] = {}
            for completion in message.to_records():
                ended.setdefault(completion.request_id, []).append(completion)
            for request_id, completions in ended.items():
                if queue := self._streams.get(request_id):  # None: aborted meanwhile
                    queue.put_nowait(completions)
        else:
            self._answers[type(message)].put_nowait(message)

    def _die(self) -> None:
        self._dead = ConnectionError(f"{self.name}'s process has died")
        for queue in (*self._streams.values(), *self._answers.values()):
            queue.put_nowait(self._dead)
