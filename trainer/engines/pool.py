"""Several engines as one: requests go where least is under way; a dead engine's are made again by others.

stream ──> least busy live engine ──> completions      a death: what is missing goes to another engine,
                                                        or waits until the launcher has started a new one
update_weights ──> every live engine at once            a new one first gets the newest weights whole
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

from trainer.engines.protocol import EngineClient
from trainer.types import Completion, Request

# (work, name) -> the result of the work, or a TimeoutError with that name
WaitFor = Callable[[Awaitable[Any], str], Awaitable[Any]]


class EnginePool:
    """An Engine made of engines, each with a copy of the model. All hold the same version after a push."""

    def __init__(
        self,
        engines: Sequence[EngineClient],
        wait_for: WaitFor,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._live = {engine: 0 for engine in engines}  # -> completions under way
        self._wait_for, self._note = wait_for, note
        self._changed = asyncio.Condition()
        self._pushing = asyncio.Lock()
        self._version, self._path = 0, ""  # held by all, and the newest file of weights
        self._failure: Exception | None = None  # of a new engine: no use waiting for it

    async def stream(self, request: Request) -> AsyncIterator[list[Completion]]:
        """See Engine; each of the n completions comes once, whatever dies meanwhile."""
        got: set[int] = set()
        while True:
            engine = await self._least_busy()
            self._live[engine] += request.n
            try:
                async with aclosing(engine.stream(request)) as stream:
                    async for ended in stream:
                        new = [c for c in ended if c.index not in got]
                        got |= {c.index for c in new}
                        if new:
                            yield new
                        if len(got) == request.n:
                            return
            except ConnectionError:
                self._lost(engine)
            finally:
                if engine in self._live:
                    self._live[engine] -= request.n

    async def update_weights(self, version: int, path: str) -> None:
        """Return once every live engine holds `version`. The file at `path` must stay until the next one."""
        async with self._pushing:
            await asyncio.gather(*(self._push(engine, version, path) for engine in list(self._live)))
            self._version, self._path = version, path or self._path

    async def transfer(self, call: str, info: dict[str, Any]) -> None:
        """See Engine; all at once, since they meet in it. None may be missing: the call fails with it."""
        what = f"{call} of the weight push (engine.weight_push file does it another way)"
        await asyncio.gather(
            *(self._wait_for(e.transfer(call, info), f"{e.name}: {what}") for e in self._live)
        )

    async def pause(self) -> None:
        """See Engine."""
        await asyncio.gather(*(self._wait_for(e.pause(), f"{e.name}: pause") for e in self._live))

    def resume(self) -> None:
        """See Engine."""
        for engine in self._live:
            engine.resume()

    async def replace(self, engine: EngineClient) -> None:
        """Take a new engine in once it is ready and holds what the others hold."""
        try:
            await self._wait_for(engine.ready(), f"{engine.name}: start after its death")
            async with self._pushing:
                await self._send(engine, self._version, self._path)
                self._live[engine] = 0
            self._note(f"{engine.name} is back, with the weights of version {self._version}")
        except ConnectionError:
            return  # it died again: the launcher starts another, or ends the run
        except Exception as e:
            self._failure = e
        async with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Ask all processes to end."""
        for engine in self._live:
            engine.close()

    async def _push(self, engine: EngineClient, version: int, path: str) -> None:
        try:
            await self._send(engine, version, path)
        except ConnectionError:
            self._lost(engine)

    async def _send(self, engine: EngineClient, version: int, path: str) -> None:
        push = engine.update_weights(version, path)
        await self._wait_for(push, f"{engine.name}: weight push of version {version}")

    async def _least_busy(self) -> EngineClient:
        async with self._changed:
            await self._changed.wait_for(lambda: self._live or self._failure)
        if self._failure:
            raise self._failure
        return min(self._live, key=lambda engine: self._live[engine])

    def _lost(self, engine: EngineClient) -> None:
        self._live.pop(engine, None)
