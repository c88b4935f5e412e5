"""Promises of the pipe between controller and engine: neither side ever waits for the other to read."""

import asyncio
import multiprocessing
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest

from trainer.engines.protocol import EngineClient
from trainer.engines.torch.process import serve
from trainer.messages import Ack
from trainer.pipes import limit_waits
from trainer.telemetry import Clock
from trainer.types import Columns, Completion, Request

TIMEOUT_S = 20
T = TypeVar("T")


class AtOnce:
    """An engine that completes everything it was given in one step."""

    generated, evaluation_share = 0, 0.0

    def __init__(self) -> None:
        self.requests: list[Request] = []

    @property
    def idle(self) -> bool:
        return not self.requests

    def submit(self, request: Request) -> None:
        self.requests.append(request)

    def abort(self, request_ids: frozenset[str]) -> list[Completion]:
        return []

    def step(self) -> list[Completion]:
        ended = [completion(r.request_id, i) for r in self.requests for i in range(r.n)]
        self.requests.clear()
        return ended


def serving() -> tuple[Any, threading.Thread]:
    """The controller's end of a served engine's pipe, and the engine's thread."""
    (ours, theirs), (telemetry, _) = multiprocessing.Pipe(), multiprocessing.Pipe()
    clock = Clock("engine", lambda spans: None)
    thread = threading.Thread(target=serve, args=(AtOnce(), theirs, clock, telemetry), daemon=True)
    thread.start()
    return ours, thread


def completion(name: str, index: int, length: int = 3) -> Completion:
    ids = np.arange(length, dtype=np.int32)
    return Completion(name, index, ids, np.linspace(-1, 0, length, dtype=np.float32), ids * 0, "stop")


def message(*completions: Completion) -> Columns[Completion]:
    return Columns.from_records(completions)


def request(name: str, n: int) -> Request:
    return Request(name, tuple(range(1000)), n, 4, 1.0, frozenset({0}), 0)


def test_thousands_of_completions_meet_hundreds_of_requests_without_a_deadlock() -> None:
    conn, _ = serving()
    got: list[Completion] = []

    async def ask(client: EngineClient, r: Request) -> None:
        got.extend([c async for ended in client.stream(r) for c in ended])

    async def both() -> None:
        client = EngineClient(conn, "engine 0")
        requests = [request("many", 4096), *(request(f"r{i}", 1) for i in range(300))]
        await asyncio.gather(*(ask(client, r) for r in requests))
        client.close()

    in_a_thread(both)
    assert len(got) == 4396


def test_an_engine_that_does_not_read_is_named_even_if_the_pipe_is_full() -> None:
    """As when it is frozen: without a limit, `send` would hold up the controller for ever."""
    conn, _unread = multiprocessing.Pipe()
    limit_waits(conn, 0.3)

    async def ask() -> str:
        client = EngineClient(conn, "engine-1")
        large = replace(request("r", 1), prompt_ids=tuple(range(1_000_000)))
        with pytest.raises(TimeoutError, match=r"engine-1 has read no message for pipeline\.deadline_s"):
            await anext(client.stream(large))
        with pytest.raises(TimeoutError, match=r"engine-1 has read no message"):
            await client.update_weights(1, "")
        client.close()
        return "ended"

    assert in_a_thread(ask) == "ended"


def test_an_engine_that_stops_within_a_message_is_named_and_what_came_before_is_delivered() -> None:
    """As when it is frozen: without a limit, `recv` would hold up the controller for ever."""
    conn, theirs = multiprocessing.Pipe()
    limit_waits(conn, 0.3)

    async def ask() -> list[str]:
        client = EngineClient(conn, "engine-1")
        stream = client.stream(request("r", 2))
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        theirs.send(message(completion("r", 0)))
        os.write(theirs.fileno(), struct.pack("!i", 1000) + b"a part")
        got = [c.request_id for c in await first]
        with pytest.raises(TimeoutError, match=r"engine-1 has sent a part of a message and nothing more"):
            await anext(stream)
        return got

    assert in_a_thread(ask) == ["r"]


def test_the_end_of_a_run_does_not_wait_for_an_engine_that_does_not_read() -> None:
    """Neither do the aborts of what was asked, nor the message that it shall end."""
    conn, _unread = multiprocessing.Pipe()
    limit_waits(conn, 2 * TIMEOUT_S)

    async def give_up() -> float:
        client = EngineClient(conn, "engine-1")
        streams = [asyncio.create_task(anext(client.stream(request(f"r{i}", 1)))) for i in range(3)]
        await asyncio.sleep(0)
        with socket.socket(fileno=os.dup(conn.fileno())) as pipe, suppress(BlockingIOError):
            while True:
                pipe.send(bytes(100), socket.MSG_DONTWAIT)
        began = time.monotonic()
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        client.close()
        return time.monotonic() - began

    took = in_a_thread(give_up)
    assert took is not None and took < 5


def in_a_thread(work: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
    """The result of what must not block; None after TIMEOUT_S."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(asyncio.run(work())), daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    return results[0] if results else None


def test_an_engine_is_silent_only_while_it_owes_an_answer() -> None:
    """An idle engine sends nothing, and neither does one that has just been asked."""

    async def scenario() -> list[float]:
        ours, theirs = multiprocessing.Pipe()
        client = EngineClient(ours, "engine")

        async def after(seconds: float) -> float:
            await asyncio.sleep(seconds)
            return client.silent_s()

        silent = [await after(0.2)]
        push = asyncio.create_task(client.update_weights(1, ""))
        silent += [await after(0.05), await after(0.2)]
        theirs.send(Ack())
        await push
        silent.append(client.silent_s())
        stream = asyncio.create_task(anext(client.stream(request("a", 1))))
        silent.append(await after(0.2))
        pause = asyncio.create_task(client.pause())
        theirs.send(Ack())
        await pause
        silent.append(await after(0.05))  # it sleeps while the learner works
        client.resume()
        silent.append(await after(0.2))
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)
        return [*silent, client.silent_s()]

    idle, asked, pushing, pushed, generating, paused, resumed, aborted = asyncio.run(scenario())
    assert idle == pushed == paused == aborted == 0.0
    assert 0 < asked < pushing and pushing >= 0.2 and generating >= 0.1 and resumed >= 0.2


def test_an_engine_whose_controller_is_dead_ends() -> None:
    conn, thread = serving()
    conn.close()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def test_completions_that_wait_in_the_pipe_arrive_together_and_before_the_engines_death() -> None:
    async def main() -> list[list[int]]:
        ours, theirs = multiprocessing.Pipe()
        client = EngineClient(ours, "engine")
        received: list[list[int]] = []

        async def read() -> None:
            async for ended in client.stream(request("a", 4)):
                received.append([c.index for c in ended])

        reading = asyncio.create_task(read())
        await asyncio.sleep(0)  # the request is sent
        for i in range(3):  # each in a message of its own
            theirs.send(message(completion("a", i)))
        theirs.close()  # it dies with one completion to go
        with pytest.raises(ConnectionError, match=r"^engine's process has died$"):
            await asyncio.wait_for(reading, TIMEOUT_S)
        return received

    assert asyncio.run(main()) == [[0, 1, 2]]


def test_completions_are_delivered_although_a_later_message_cannot_be_read() -> None:
    async def main() -> list[int]:
        ours, theirs = multiprocessing.Pipe()
        client = EngineClient(ours, "engine")
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)  # it would be logged
        first = asyncio.create_task(anext(client.stream(request("a", 2))))
        await asyncio.sleep(0)  # the request is sent
        theirs.send(message(completion("a", 0)))
        theirs.send_bytes(b"no pickle")
        return [c.index for c in await asyncio.wait_for(first, TIMEOUT_S)]

    assert asyncio.run(main()) == [0]


def test_arrays_come_through_a_pipe_as_they_were_and_can_be_written_to() -> None:
    ours, theirs = multiprocessing.Pipe()
    sent = [completion("a", i, 5 - i) for i in (0, 5, 2)]
    theirs.send(message(*sent))
    for before, after in zip(sent, ours.recv().to_records(), strict=True):
        for field in ("token_ids", "logprobs_gen", "versions"):
            x, y = getattr(before, field), getattr(after, field)
            assert x.dtype == y.dtype and np.array_equal(x, y)
            assert y.flags.writeable  # torch.from_numpy warns otherwise
        assert (before.request_id, before.index) == (after.request_id, after.index)
