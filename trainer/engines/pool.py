"""Several engines as one. Each request goes to the least busy engine, or to the one that holds the keys and
values of the request it continues; if that dies, another one repeats it.

stream ──> least busy live engine ──> completions      if it dies, the missing completions come from another
                                                        engine, at the latest from the one that replaces it
update_weights ──> all live engines in parallel         a replacement loads the newest weights first
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

from trainer.engines.protocol import EngineClient
from trainer.types import Completion, Request

# (work, name, start: of a process) -> the result of the work, or a TimeoutError with that name
WaitFor = Callable[..., Awaitable[Any]]


class EnginePool:
    """The engines, each with a copy of the model, called like one. All hold the same version after a push."""

    def __init__(
        self, engines: Sequence[EngineClient], wait_for: WaitFor, note: Callable[[str], None] = lambda _: None
    ) -> None:
        self._live = {engine: 0 for engine in engines}  # -> completions that it is generating
        self._holders: dict[str, EngineClient] = {}  # of the keys and values of requests to be continued
        self._wait_for, self._note = wait_for, note
        self._changed = asyncio.Condition()
        self._pushing = asyncio.Lock()
        self._version, self._path = 0, ""  # of all engines, and the newest file of weights
        self._failure: Exception | None = None  # why a replacement failed to start: do not wait for it

    async def ready(self) -> list[dict[str, Any]]:
        """Wait until all can take work; returns their descriptions of themselves."""
        return [await self._wait_for(e.ready(), f"{e.name}: start", start=True) for e in self._live]

    async def stream(self, request: Request) -> AsyncIterator[list[Completion]]:
        """Same as EngineClient.stream; each of the n completions comes exactly once, even if engines die."""
        received: set[int] = set()
        while True:
            engine = await self._choose(request)
            self._live[engine] += request.n
            try:
                async with aclosing(engine.stream(request)) as stream:
                    async for ended in stream:
                        new = [c for c in ended if c.index not in received]
                        received |= {c.index for c in new}
                        if new:
                            yield new
                        if len(received) == request.n:
                            if ended[-1].finish_reason in request.keep_kv:
                                self._holders[request.request_id] = engine
                            return
            except ConnectionError:
                self._live.pop(engine, None)
            finally:
                if engine in self._live:
                    self._live[engine] -= request.n

    def release(self, request_id: str) -> None:
        """No request will continue this one: drop the keys and values that are kept for it."""
        engine = self._holders.pop(request_id, None)
        if engine in self._live:
            engine.release(request_id)

    @contextmanager
    def waiting(self, request_id: str, state: str) -> Iterator[None]:
        """While an episode waits for its environment after this request, or a group for its teacher: the
        ledger books that time of an engine without other work as `state`. It counts for each engine where
        none has keys and values of the request."""
        holder = self._holders.get(request_id)
        engines = [holder] if holder in self._live else list(self._live)
        for engine in engines:
            engine.wait(state, 1)
        try:
            yield
        finally:
            for engine in engines:
                engine.wait(state, -1)

    async def update_weights(self, version: int, path: str) -> None:
        """All live engines load at once. The file at `path` must stay until the next update."""
        async with self._pushing:
            await asyncio.gather(*(self._update_or_remove(e, version, path) for e in list(self._live)))
            self._version, self._path = version, path or self._path

    async def transfer(self, call: str, info: dict[str, Any]) -> None:
        """All engines at once, since they form one group. It fails if any of them is dead."""
        name = f"{call} of the weight push (if this way fails here, set engine.weight_push file)"
        await self._call_all(lambda engine: engine.transfer(call, info), name)

    async def pause(self) -> None:
        """Pause all engines."""
        await self._call_all(lambda engine: engine.pause(), "pause")

    def resume(self) -> None:
        """Continue after `pause`."""
        for engine in self._live:
            engine.resume()

    async def replace(self, engine: EngineClient) -> None:
        """Add an engine that replaces a dead one, once it is ready and has the weights of the others."""
        try:
            await self._wait_for(engine.ready(), f"{engine.name}: start after its death", start=True)
            async with self._pushing:
                await self._update(engine, self._version, self._path)
                self._live[engine] = 0
            self._note(f"{engine.name} is back, with the weights of version {self._version}")
        except ConnectionError:
            return  # it died again: the launcher starts another, or ends the run
        except Exception as e:
            self._failure = e
        async with self._changed:
            self._changed.notify_all()

    def silent(self, seconds: float) -> list[str]:
        """The names of the engines that owe an answer and have sent nothing for so long."""
        return [engine.name for engine in self._live if engine.silent_s() >= seconds]

    def close(self) -> None:
        """Ask all engine processes to end."""
        for engine in self._live:
            engine.close()

    async def _call_all(self, call: Callable[[EngineClient], Awaitable[None]], name: str) -> None:
        await asyncio.gather(*(self._wait_for(call(e), f"{e.name}: {name}") for e in self._live))

    async def _update_or_remove(self, engine: EngineClient, version: int, path: str) -> None:
        try:
            await self._update(engine, version, path)
        except ConnectionError:
            self._live.pop(engine, None)

    async def _update(self, engine: EngineClient, version: int, path: str) -> None:
        push = engine.update_weights(version, path)
        await self._wait_for(push, f"{engine.name}: weight push of version {version}")

    async def _choose(self, request: Request) -> EngineClient:
        holder = self._holders.pop(request.continues, None)
        async with self._changed:
            await self._changed.wait_for(lambda: self._live or self._failure)
        if self._failure:
            raise self._failure
        return holder if holder in self._live else min(self._live, key=lambda engine: self._live[engine])
