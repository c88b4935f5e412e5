"""Promises of the controller's deadlines."""

import asyncio
import time

import pytest

from trainer.controller import deadline
from trainer.controller.deadline import Deadline


def test_time_in_which_the_process_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-Z: the clock goes on, and nothing runs."""
    monkeypatch.setattr(deadline, "LOOK_S", 0.05)

    async def stopped(seconds: float) -> None:
        await asyncio.sleep(0.1)
        time.sleep(seconds)
        await asyncio.sleep(0.1)

    asyncio.run(Deadline(0.5).wait_for(stopped(1.0), "a stop"))
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"a wait: no progress for pipeline\.deadline_s = 0\.5 s"):
        asyncio.run(Deadline(0.5).wait_for(asyncio.sleep(60), "a wait"))
    assert time.monotonic() - began >= 0.5


def test_engines_that_do_not_answer_are_named() -> None:
    deadline = Deadline(0.2)
    deadline.silent = lambda seconds: ["engine-1", "engine-3"] if seconds <= 0.2 else []
    with pytest.raises(TimeoutError, match=r"= 0\.2 s \(no answer from engine-1, engine-3\); raise"):
        asyncio.run(deadline.wait_for(asyncio.sleep(60), "evaluate: version 3"))


def test_a_start_and_a_restart_of_an_engine_have_a_deadline_of_their_own() -> None:
    async def waits() -> None:
        deadline = Deadline(0.1, 2.0)
        start = deadline.wait_for(asyncio.sleep(0.3), "engine: start", start=True)
        await asyncio.gather(start, deadline.wait_for(asyncio.sleep(0.3), "generate: step 5"))
        await deadline.wait_for(asyncio.sleep(0.3), "generate: step 5")

    with pytest.raises(TimeoutError, match=r"generate: step 5: no progress for pipeline\.deadline_s = 0.1 s"):
        asyncio.run(waits())

    async def start() -> None:
        deadline = Deadline(5.0, 0.2)
        work = asyncio.create_task(deadline.wait_for(asyncio.sleep(0.5), "engine: start", start=True))
        await asyncio.sleep(0.1)
        deadline.restart()  # completions of other engines are no progress of this one
        await work

    with pytest.raises(TimeoutError, match=r"no progress for pipeline\.start_deadline_s = 0.2 s"):
        asyncio.run(start())
