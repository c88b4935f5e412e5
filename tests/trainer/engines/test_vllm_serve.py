"""Promises of the process around vLLM, with a backend in its place."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterable
from typing import Any

import numpy as np

from trainer.engines.vllm.process import Sample, _Serving
from trainer.messages import Abort, Shutdown
from trainer.telemetry import Clock
from trainer.types import Completion, Request


class Slow:
    """As vLLM: the abort of a sample that it has not taken in yet is ignored."""

    limit = 1000

    def __init__(self) -> None:
        self.known: dict[Sample, asyncio.Event] = {}
        self.aborts = 0

    async def sample(self, request: Request, index: int, version: int) -> Completion:
        await asyncio.sleep(0.2)
        ended = self.known[request.request_id, index] = asyncio.Event()
        await ended.wait()
        none = np.zeros(0, np.int32)
        return Completion(request.request_id, index, none, none.astype(np.float32), none, "abort")

    async def abort(self, samples: Iterable[Sample]) -> None:
        self.aborts += 1
        for sample in samples:
            if sample in self.known:
                self.known[sample].set()

    async def check(self) -> None:
        """It lives."""


def test_an_abort_reaches_a_sample_that_vllm_is_just_being_given() -> None:
    async def body() -> tuple[Any, int]:
        ours, theirs = multiprocessing.Pipe()
        _telemetry, told = multiprocessing.Pipe()
        backend: Any = Slow()
        serving = asyncio.create_task(_Serving(backend, theirs, told, Clock("engine", told.send), 8).serve())
        ours.send(Request("a", (1, 2), 2, 10, 1.0, frozenset(), 0))
        ours.send(Abort(frozenset({"a"})))
        there = await asyncio.to_thread(ours.poll, 10)
        ended = ours.recv().to_records() if there else ()
        await asyncio.sleep(1.5)  # what has ended is aborted no more
        aborts = backend.aborts
        ours.send(Shutdown())
        await serving
        return {(c.request_id, c.index) for c in ended}, aborts

    assert asyncio.run(body()) == ({("a", 0), ("a", 1)}, 2)
