"""The controller's end of the pipe to an engine's process."""

import asyncio
import select
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from trainer import messages
from trainer.messages import Ack, Ready, WeightsHeld
from trainer.pipes import half_sent, has_room, not_reading
from trainer.types import Columns, Completion, Request

MESSAGES_AT_ONCE = 64  # read before other work gets its turn


class EngineClient:
    """An engine, which generates completions in another process. Once that is dead, every call raises a
    ConnectionError with its name. Weights change between two tokens, and running sequences keep their KV."""

    def __init__(self, conn: Connection, name: str) -> None:
        self.name, self._conn = name, conn
        self._streams: dict[str, asyncio.Queue[list[Completion] | Exception]] = {}
        kinds = (Ready, WeightsHeld, Ack)
        self._replies: dict[type[Any], asyncio.Queue[Any]] = {kind: asyncio.Queue() for kind in kinds}
        self._dead: Exception | None = None
        self._paused = False
        self._awaited = 0  # answers that calls wait for, besides those of streams
        self._silent_since = time.monotonic()  # the latest message, or the request after which it owes one
        self._arrived = select.poll()  # whether a message waits to be read
        self._arrived.register(conn, select.POLLIN)
        asyncio.get_running_loop().add_reader(conn.fileno(), self._receive)

    async def ready(self) -> dict[str, Any]:
        """Wait until the engine can take work; returns its description of itself."""
        return (await self._reply(Ready)).info

    async def stream(self, request: Request) -> AsyncGenerator[list[Completion]]:
        """Yield the request's n completions as they end; those that have arrived together come together.
        Leaving the loop early aborts the rest."""
        queue: asyncio.Queue[list[Completion] | Exception] = asyncio.Queue()
        if not self._owes:
            self._silent_since = time.monotonic()
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
            if left and self._dead is None and has_room(self._conn):  # else it reads nothing
                self._send(messages.Abort(frozenset({request.request_id})))

    async def update_weights(self, version: int, path: str) -> None:
        """Load this safetensors file (empty path: keep the weights) and label later tokens with `version`."""
        self._send(messages.UpdateWeights(version, path))
        held: WeightsHeld = await self._reply(WeightsHeld)
        if held.version != version:
            raise RuntimeError(f"{self.name} has weights version {held.version}; expected {version}")

    async def transfer(self, call: str, info: dict[str, Any]) -> None:
        """Make a call of vLLM's weight transfer. Allowed between `pause` and `resume`."""
        self._send(messages.Transfer(call, info))
        await self._reply(Ack)

    async def pause(self) -> None:
        """Stop between two tokens; sequences and KV stay. With engine.colocate, free the GPU memory as well:
        `resume` then recomputes the KV with the weights of that moment."""
        self._send(messages.Pause())
        await self._reply(Ack)
        self._paused = True

    def resume(self) -> None:
        """Continue after `pause`."""
        self._send(messages.Resume())
        self._paused, self._silent_since = False, time.monotonic()

    def silent_s(self) -> float:
        """For how many seconds it has owed an answer and sent nothing."""
        return time.monotonic() - self._silent_since if self._owes else 0.0

    def close(self) -> None:
        """Ask the process to end."""
        asyncio.get_running_loop().remove_reader(self._conn.fileno())
        if self._dead is None and has_room(self._conn):  # the end of the pipe says the same
            with suppress(OSError):
                self._send(messages.Shutdown())

    @property
    def _owes(self) -> bool:
        return bool(self._awaited or (self._streams and not self._paused))

    def _send(self, message: object) -> None:
        if self._dead is not None:
            raise self._dead
        try:
            self._conn.send(message)
        except BlockingIOError as e:
            raise self._end(not_reading(self.name)) from e
        except OSError as e:
            raise self._end(self._died()) from e

    async def _reply(self, kind: type[Any]) -> Any:
        if self._dead is not None:
            raise self._dead
        if not self._owes:
            self._silent_since = time.monotonic()
        self._awaited += 1
        try:
            reply = await self._replies[kind].get()
        finally:
            self._awaited -= 1
        if isinstance(reply, Exception):
            raise reply
        return reply

    def _receive(self) -> None:
        """Deliver what has arrived; completions of one request together, to wake its rollout up once."""
        ended: dict[str, list[Completion]] = {}
        dead: OSError | None = None
        try:
            for _ in range(MESSAGES_AT_ONCE):
                message = self._conn.recv()
                self._silent_since = time.monotonic()
                if isinstance(message, Columns):
                    for completion in message.to_records():
                        ended.setdefault(completion.request_id, []).append(completion)
                else:
                    self._replies[type(message)].put_nowait(message)
                if not self._arrived.poll(0):
                    break
        except BlockingIOError:
            dead = half_sent(self.name)
        except (EOFError, OSError):
            dead = self._died()
        finally:
            for request_id, completions in ended.items():
                if queue := self._streams.get(request_id):  # None: aborted
                    queue.put_nowait(completions)
        if dead:  # after what it sent before its death
            asyncio.get_running_loop().remove_reader(self._conn.fileno())
            self._end(dead)

    def _died(self) -> ConnectionError:
        return ConnectionError(f"{self.name}'s process has died")

    def _end(self, error: Exception) -> Exception:
        self._dead = error
        for queue in (*self._streams.values(), *self._replies.values()):
            queue.put_nowait(error)
        return error
