"""Promises of the process around vLLM, with a backend in its place."""

import asyncio
import multiprocessing
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from trainer.engines.backend import Activity
from trainer.engines.vllm.process import Sample, Scheduler
from trainer.messages import Abort, Shutdown, UpdateWeights
from trainer.telemetry import Clock
from trainer.types import Completion, Request


class Slow:
    """Like vLLM, ignores the abort of a sample that it is still receiving."""

    limit = 1000

    def __init__(self) -> None:
        self.known: dict[str, asyncio.Event] = {}
        self.aborts = 0

    async def sample(self, sample: Sample, salt: int) -> Completion:
        await asyncio.sleep(0.2)
        ended = self.known[sample.id] = asyncio.Event()
        await ended.wait()
        return sample.completion((), np.zeros(0, np.float32), (), "abort")

    async def abort(self, sample_ids: Iterable[str]) -> None:
        self.aborts += 1
        for sample in sample_ids:
            if sample in self.known:
                self.known[sample].set()

    async def check(self) -> dict[str, float]:
        """The backend is alive."""
        return {"kv_use": 0.5, "preemptions": 0.0}


class Recording(Slow):
    """Ends samples at once, but for `running`; writes down in which order and with which salt they start."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[tuple[str, int]] = []

    async def sample(self, sample: Sample, salt: int) -> Completion:
        self.started.append((sample.request.request_id, salt))
        await asyncio.sleep(1.0 if sample.request.request_id == "running" else 0.01)
        reason = "stop" if sample.request.request_id == "ended" else "length"
        return sample.completion((5,), np.zeros(1, np.float32), (), reason)

    async def pause(self, free_gpu: bool) -> None:
        """Nothing runs."""

    async def resume(self, free_gpu: bool) -> None:
        """Nothing runs."""

    async def load(self, version: int, *paths: str) -> None:
        """There are no weights."""


def serve(backend: Any, slots: int) -> tuple[Any, asyncio.Task[None]]:
    """The controller's end of the pipe to a scheduler of this backend, and the scheduler's task."""
    ours, theirs = multiprocessing.Pipe()
    launcher, telemetry = multiprocessing.Pipe()
    clock = Clock("engine", telemetry.send)
    task = asyncio.create_task(Scheduler(backend, theirs, clock, Activity(clock, telemetry), slots).run())
    task.add_done_callback(lambda _: launcher.close())  # open until then
    return ours, task


def test_what_continues_goes_first_and_has_the_salt_of_what_it_continues() -> None:
    def request(name: str, **changes: Any) -> Request:
        return Request(name, (1, 2), 1, 10, 1.0, frozenset(), 0, **changes)

    async def body() -> list[tuple[str, int]]:
        backend = Recording()
        ours, serving = serve(backend, slots=1)
        for name in ("think", "ended"):
            ours.send(request(name, keep_kv=("length",)))
            await asyncio.to_thread(ours.recv)
        ours.send(UpdateWeights(3, ""))
        await asyncio.to_thread(ours.recv)
        ours.send(request("running"))
        for name in ("new", "evaluation", "newer"):
            ours.send(request(name, evaluation=name == "evaluation"))
        ours.send(request("answer", continues="think"))
        for _ in range(5):
            await asyncio.to_thread(ours.recv)
        ours.send(request("unknown", continues="ended"))  # it ended by itself
        await asyncio.to_thread(ours.recv)
        ours.send(Shutdown())
        await serving
        return backend.started[2:]

    started = asyncio.run(body())
    assert [name for name, _ in started] == ["running", "answer", "evaluation", "new", "newer", "unknown"]
    assert [salt for _, salt in started] == [3, 0, 3, 3, 3, 3]


def test_an_abort_reaches_a_sample_that_vllm_is_still_receiving() -> None:
    async def body() -> tuple[Any, int]:
        backend = Slow()
        ours, serving = serve(backend, slots=8)
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


def test_experts_are_asked_for_and_checked_from_where_they_are_not_known() -> None:
    """The request, and the seam where vLLM's output becomes a completion: on a CPU vLLM returns none."""

    def sample(first: int) -> Sample:
        return Sample(Request("a", (1, 2, 3), 1, 10, 1.0, frozenset(), 0, experts_from=first), 0)

    def ended(first: int, count: int | None, reason: str = "length") -> NDArray[Any] | None:
        experts = None if count is None else np.arange(count * 6, dtype=np.uint8).reshape(count, 3, 2)
        return sample(first).completion((7, 8), np.zeros(2, np.float32), (), reason, experts=experts).experts

    starts = [sample(first).parameters["routed_experts_prompt_start"] for first in (-1, 0, 2)]
    assert starts == [3, 0, 2]  # of a request that wants none, those of the prompt are not computed
    whole, rest = ended(0, 4), ended(2, 2)
    assert whole is not None and rest is not None
    assert whole.tolist() == np.arange(24).reshape(4, 6).tolist() and rest.shape == (2, 6)
    assert ended(-1, 4) is ended(0, None) is ended(0, 3, "abort") is None
    with pytest.raises(RuntimeError, match="vLLM ended a with the experts of 5 tokens; expected those of 4"):
        ended(0, 5)
