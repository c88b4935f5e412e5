"""Promises of the pool: each completion comes once, load is balanced, dead engines are replaced."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from trainer.engines.pool import EnginePool
from trainer.types import Completion, Request


class Engine:
    """Generates one completion at a time; dies when its arguments say so."""

    def __init__(
        self, name: str, dies_after: int | None = None, dies_on_push: bool = False, reason: Any = "stop"
    ) -> None:
        self.reason = reason
        self.name, self.dies_after, self.dies_on_push = name, dies_after, dies_on_push
        self.version, self.path = 0, ""
        self.made: list[str] = []
        self.running = self.most = 0
        self.paused = False
        self.waiting = {"tools": 0, "evaluate": 0}

    def wait(self, state: str, more: int) -> None:
        self.waiting[state] += more

    async def ready(self) -> dict[str, Any]:
        return {}

    async def stream(self, request: Request) -> AsyncGenerator[list[Completion]]:
        self.running += request.n
        self.most = max(self.most, self.running)
        try:
            for i in range(request.n):
                await asyncio.sleep(0.002)
                if self.dies_after is not None and len(self.made) >= self.dies_after:
                    raise ConnectionError(f"{self.name}'s process has died")
                self.made.append(f"{request.request_id}.{i}")
                one, logprobs = np.zeros(1, np.int32), np.zeros(1, np.float32)
                yield [Completion(request.request_id, i, one, logprobs, one + self.version, self.reason)]
        finally:
            self.running -= request.n

    async def update_weights(self, version: int, path: str) -> None:
        await asyncio.sleep(0.005)
        if self.dies_on_push:
            raise ConnectionError(f"{self.name}'s process has died")
        self.version, self.path = version, path

    async def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False


async def within(work: Awaitable[Any], what: str, start: bool = False) -> Any:
    try:
        return await asyncio.wait_for(work, 1)
    except TimeoutError:
        raise TimeoutError(what) from None


def pool(*engines: Engine) -> EnginePool:
    return EnginePool(engines, within)  # type: ignore[arg-type]  # as much of a client as it needs


def request(name: str, n: int = 4) -> Request:
    return Request(name, (1, 2), n, 4, 1.0, frozenset(), 0)


async def indices(engines: EnginePool, r: Request) -> list[int]:
    return [c.index async for ended in engines.stream(r) for c in ended]


def test_a_request_goes_where_the_one_that_it_continues_was() -> None:
    engines = [Engine("a", reason="length"), Engine("b", reason="length"), Engine("c", reason="length")]

    async def work() -> None:
        engine = pool(*engines)
        for name in ("x", "y"):
            thinking = replace(request(name, 1), keep_kv=("length",))
            busy = asyncio.create_task(indices(engine, request("busy", 8)))
            await asyncio.sleep(0)
            await indices(engine, thinking)
            (holder,) = (e for e in engines if f"{name}.0" in e.made)
            busy.cancel()
            if name == "y":
                holder.dies_after = 0
            await indices(engine, replace(request(f"{name}.answer", 1), continues=name))
            (used,) = (e for e in engines if f"{name}.answer.0" in e.made)
            assert (used is holder) == (name == "x"), name

    asyncio.run(work())


def test_an_episode_waits_at_the_engine_that_has_its_keys_and_without_one_at_each() -> None:
    engines = [Engine("a", reason="length"), Engine("b", reason="length")]

    async def work() -> None:
        engine = pool(*engines)
        await indices(engine, replace(request("x", 1), keep_kv=("length",)))
        (holder,) = (e for e in engines if e.made)
        (other,) = (e for e in engines if not e.made)
        with engine.waiting("x", "tools"), engine.waiting("", "evaluate"):
            assert [list(e.waiting.values()) for e in (holder, other)] == [[1, 1], [0, 1]]
        with pytest.raises(ValueError), engine.waiting("x", "tools"):
            raise ValueError("its environment failed")
        assert not any((*holder.waiting.values(), *other.waiting.values()))

    asyncio.run(work())


def test_engines_that_have_been_silent_for_longer_are_named() -> None:
    engines = [Engine("a"), Engine("b"), Engine("c")]
    for engine, seconds in zip(engines, (0.0, 5.0, 20.0), strict=True):
        engine.silent_s = lambda seconds=seconds: seconds  # type: ignore[attr-defined]  # as an EngineClient has it
    assert pool(*engines).silent(10) == ["c"] and pool(*engines).silent(5) == ["b", "c"]


def test_requests_go_where_least_is_under_way() -> None:
    engines = [Engine("a"), Engine("b"), Engine("c")]

    async def work() -> None:
        both = pool(*engines)
        await asyncio.gather(*(indices(both, request(f"r{i}")) for i in range(12)))

    asyncio.run(work())
    assert [e.most for e in engines] == [16, 16, 16] and [len(e.made) for e in engines] == [16, 16, 16]


def test_what_a_dying_engine_has_not_finished_is_made_by_the_others_and_nothing_comes_twice() -> None:
    dying, other = Engine("a", dies_after=6), Engine("b")

    async def work() -> list[list[int]]:
        both = pool(dying, other)
        return await asyncio.gather(*(indices(both, request(f"r{i}")) for i in range(6)))

    assert all(sorted(got) == [0, 1, 2, 3] for got in asyncio.run(work()))
    assert len(dying.made) == 6


def test_with_every_engine_dead_requests_wait_for_a_new_one_which_first_gets_the_newest_weights() -> None:
    dying, new = Engine("a", dies_after=1), Engine("a")
    notes: list[str] = []

    async def work() -> tuple[list[int], int]:
        one = EnginePool([dying], within, notes.append)  # type: ignore[list-item]
        await one.update_weights(3, "file-3")
        await one.update_weights(4, "")  # a step without gradient: version 4 are the weights of file-3
        task = asyncio.create_task(indices(one, request("r")))
        await asyncio.sleep(0.05)
        assert not task.done()
        await one.replace(new)  # type: ignore[arg-type]  # as much of a client as it needs
        return await asyncio.wait_for(task, 2), new.version

    got, version = asyncio.run(work())
    assert sorted(got) == [0, 1, 2, 3] and version == 4 and new.path == "file-3"
    assert notes == ["a is back, with the weights of version 4"]


@pytest.mark.parametrize("replacement", [False, True])
def test_an_engine_that_dies_of_a_push_holds_up_none_and_is_not_said_to_be_back(replacement: bool) -> None:
    notes: list[str] = []
    dying, other = Engine("a", dies_on_push=True), Engine("b")

    async def work() -> list[int]:
        engines = EnginePool([other] if replacement else [dying, other], within, notes.append)  # type: ignore[list-item]
        await engines.update_weights(1, "file-1")
        if replacement:
            await engines.replace(dying)  # type: ignore[arg-type]  # as much of a client as it needs
        return await indices(engines, request("r"))

    assert len(asyncio.run(work())) == 4
    assert other.version == 1 and not dying.made and not notes


def test_a_push_that_hangs_is_named_with_its_engine() -> None:
    class Hung(Engine):
        async def update_weights(self, version: int, path: str) -> None:
            await asyncio.sleep(60)

    with pytest.raises(TimeoutError, match="engine-1: weight push of version 7"):
        asyncio.run(pool(Engine("engine"), Hung("engine-1")).update_weights(7, "file-7"))


def test_a_new_engine_that_fails_for_good_ends_the_wait_with_its_reason() -> None:
    class Broken(Engine):
        async def ready(self) -> dict[str, Any]:
            raise RuntimeError("engine: no such model")

    async def work() -> None:
        one = pool(Engine("a", dies_after=0))
        task = asyncio.create_task(indices(one, request("r")))
        await asyncio.sleep(0.02)
        await one.replace(Broken("a"))  # type: ignore[arg-type]  # as much of a client as it needs
        await asyncio.wait_for(task, 2)

    with pytest.raises(RuntimeError, match="no such model"):
        asyncio.run(work())


def test_a_pause_stops_every_engine_and_a_resume_starts_all() -> None:
    engines = [Engine("a"), Engine("b")]

    async def work() -> list[bool]:
        both = pool(*engines)
        await both.pause()
        paused = [e.paused for e in engines]
        both.resume()
        return [*paused, *(e.paused for e in engines)]

    assert asyncio.run(work()) == [True, True, False, False]
