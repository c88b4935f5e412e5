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

    async def check(self) -> dict[str, float]:
        """The backend is alive."""
        return {"kv_use": 0.5, "preemptions": 0.0}


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


def test_a_report_has_the_highest_of_what_vllm_said_since_the_one_before() -> None:
    ours, telemetry = multiprocessing.Pipe()
    activity = Activity(Clock("engine", telemetry.send), telemetry)
    for use, preempted in ((0.4, 0.0), (0.9, 2.0), (0.5, 3.0)):
        activity.observe({"kv_use": use, "preemptions": preempted})
    for tokens in (5, 8):
        activity.tokens = tokens
        activity.report(idle=True)
    assert ours.recv().data == {"tokens": 5, "busy_s": 0.0, "kv_use": 0.9, "preemptions": 3.0}
    assert ours.recv().data == {"tokens": 8, "busy_s": 0.0}
