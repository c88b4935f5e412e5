"""Promises of the process around vLLM, with a backend in its place."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterable
from typing import Any

import numpy as np

from trainer.engines.request_queue import Activity
from trainer.engines.vllm.process import Scheduler, make_completion, sample_id
from trainer.messages import Abort, Shutdown
from trainer.telemetry import Clock
from trainer.types import Completion, Request


class Slow:
    """Like vLLM, ignores the abort of a sample that it is still receiving."""

    limit = 1000

    def __init__(self) -> None:
        self.known: dict[str, asyncio.Event] = {}
        self.aborts = 0

    async def sample(self, request: Request, index: int, version: int) -> Completion:
        await asyncio.sleep(0.2)
        ended = self.known[sample_id(request, index)] = asyncio.Event()
        await ended.wait()
        return make_completion(
            request, index, token_ids=(), logprobs=np.zeros(0, np.float32), version_spans=(),
            finish_reason="abort", engine="vLLM",
        )  # fmt: skip

    async def abort(self, sample_ids: Iterable[str]) -> None:
        self.aborts += 1
        for sample in sample_ids:
            if sample in self.known:
                self.known[sample].set()

    async def check(self) -> None:
        """The backend is alive."""


def test_an_abort_reaches_a_sample_that_vllm_is_still_receiving() -> None:
    async def body() -> tuple[Any, int]:
        ours, theirs = multiprocessing.Pipe()
        _launcher, telemetry = multiprocessing.Pipe()
        backend: Any = Slow()
        clock = Clock("engine", telemetry.send)
        scheduler = Scheduler(backend, theirs, clock, Activity(clock, telemetry), slots=8)
        serving = asyncio.create_task(scheduler.run())
        ours.send(Request("a", (1, 2), 2, 10, 1.0, frozenset(), 0))
        ours.send(Abort(frozenset({"a"})))
        there = await asyncio.to_thread(ours.poll, 10)
        ended = ours.recv().to_records() if there else ()
        await asyncio.sleep(1.5)  # samples that have ended are not aborted again
        aborts = backend.aborts
        ours.send(Shutdown())
        await serving
        return {(c.request_id, c.index) for c in ended}, aborts

    assert asyncio.run(body()) == ({("a", 0), ("a", 1)}, 2)
