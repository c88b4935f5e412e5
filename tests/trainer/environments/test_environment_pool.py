"""Promises of the pool of environments: the protocol, deadlines, faults that cost an episode, the sandbox."""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from processes import wait_until_gone

from trainer.config import Config, ConfigError, EnvironmentConfig
from trainer.controller.sources import check_sources
from trainer.environments.pool import (
    MAX_NOTES,
    MAX_STARTUP_FAILURES,
    EnvironmentFailure,
    EnvironmentPool,
    Step,
)

USER = {"role": "user", "content": "next"}
SAYS = {"role": "assistant", "content": "hello"}


def with_pool(
    work: Callable[[EnvironmentPool], Coroutine[Any, Any, Any]],
    notes: list[str] | None = None,
    **settings: Any,
) -> Any:
    """The result of some work with a pool."""
    config = EnvironmentConfig(**{"kind": "environments:Counter", **settings})
    pool = EnvironmentPool(config, (notes if notes is not None else []).append)
    try:
        return asyncio.run(work(pool))
    finally:
        pool.close()


async def play(pool: EnvironmentPool, row: dict[str, Any], turns: int = 3) -> list[Step]:
    async with pool.episode() as one:
        start = await one.start(row)
        return [start, *[await one.step(SAYS) for _ in range(turns)]]


async def failure(pool: EnvironmentPool, fault: str) -> str:
    with pytest.raises(EnvironmentFailure) as error:
        await play(pool, {"fault": fault})
    return str(error.value)


@pytest.mark.parametrize("kind", ["environments:Counter", "environments:Async"])
def test_episodes_of_one_pool_each_have_a_state_of_their_own(kind: str) -> None:
    async def work(pool: EnvironmentPool) -> list[list[Step]]:
        rows = ({"start": "A" if i % 2 else [{"role": "system", "content": "B"}, USER]} for i in range(8))
        first = await asyncio.gather(*(play(pool, row) for row in rows))
        return [*first, await play(pool, {})]  # in a process that has had an episode

    for i, (start, *steps) in enumerate(with_pool(work, kind=kind)[:8]):
        assert [m["content"] for m in start.messages] == (["A"] if i % 2 else ["B", "next"])
        assert [(s.messages, s.reward, s.done) for s in steps] == [
            ((USER,), 1.0, False), ((USER,), 2.0, False), ((USER,), 3.0, True)
        ]  # fmt: skip


def test_a_start_may_bring_tools() -> None:
    schema = {"type": "function", "function": {"name": "search"}}
    (start,) = with_pool(lambda pool: play(pool, {"start": [[USER], [schema]]}, turns=0))
    assert start == Step((USER,), tools=(schema,))


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("raises", "step raised KeyError: 'a bug' (environments.py:"),
        ("dies", "its process died in step"),
        (
            "lies",
            "step returned the reward nan and done False; expected a finite number or None, and True or",
        ),
        ("nothing", "step returned the messages [None]; expected text or a list of"),
        ("huge", "step returned the reward 1000"),
        ("halves", "its process sent no reply to step"),
        ("numpy", "step raised TypeError: Object of type float32 is not JSON serializable"),
        ("talks", "step returned the messages [{'role': 'user'}]; expected text or a list of"),
        ("hangs", "step took more than environment.turn_s = 3 s"),
        ("sleeps", "step took more than environment.turn_s = 3 s"),
        ("writes", "step raised PermissionError"),
    ],
)
def test_a_fault_costs_one_episode_and_says_which(fault: str, text: str) -> None:
    async def work(pool: EnvironmentPool) -> tuple[str, list[Step]]:
        error, good = await asyncio.gather(failure(pool, fault), play(pool, {"fault": "none"}))
        assert len(await play(pool, {"fault": "none"})) == 4  # in the place of the one that failed
        return error, good

    notes: list[str] = []
    error, good = with_pool(work, notes, kind="environments:Bad", turn_s=3)
    assert error.startswith(f"environment environments:Bad: {text}")
    assert good[-1].done and [step.reward for step in good] == [None, 1.0, 2.0, 3.0]
    assert notes == [f"{error}; the episode is dropped (the same failure is only counted from now on)"]


def test_different_failures_are_said_once_each_and_so_is_what_an_environment_prints() -> None:
    async def work(pool: EnvironmentPool) -> None:
        for fault in ("raises", "lies", "raises", "lies"):
            await failure(pool, fault)
        for _ in range(9):
            await play(pool, {"fault": "prints"}, turns=2)

    notes: list[str] = []
    with_pool(work, notes, kind="environments:Bad")
    assert ["raised KeyError" in note for note in notes[:2]] == [True, False]
    assert notes[2:] == ["environment environments:Bad printed: two | lines"] * MAX_NOTES


def test_what_an_environment_prints_before_it_raises_is_said() -> None:
    notes: list[str] = []
    with_pool(lambda pool: failure(pool, "complains"), notes, kind="environments:Bad")
    assert notes[1:] == ["environment environments:Bad printed: before the bug"]


def test_the_episode_has_a_deadline_over_all_its_calls() -> None:
    text = with_pool(lambda pool: failure(pool, "sleeps"), kind="environments:Bad", episode_s=0.4)
    assert text.endswith("step took more than environment.episode_s = 0.4 s")


def test_with_the_network_an_environment_may_write(tmp_path: Path) -> None:
    row = {"fault": "writes", "path": str(tmp_path / "file")}
    steps = with_pool(lambda pool: play(pool, row, turns=2), kind="environments:Bad", network=True)
    assert steps[-1].reward == 2.0 and (tmp_path / "file").exists()


@pytest.mark.parametrize("ends", ["deadline", "pool", "dies"])
def test_what_an_environment_has_started_ends_with_its_process(ends: str, tmp_path: Path) -> None:
    """Its process is killed, ends with the pool, or dies; that which a process has started dies with the
    pool at the latest."""

    async def work(pool: EnvironmentPool) -> None:
        row = {"fault": f"serves_{ends}", "path": str(tmp_path / "pids")}
        async with pool.episode() as one:
            await one.start(row)
            await one.step(SAYS)
            if ends == "pool":
                await one.step(SAYS)
                return
            with pytest.raises(EnvironmentFailure, match="turn_s" if ends == "deadline" else "died"):
                await one.step(SAYS)
        if ends == "deadline":
            wait_until_gone(pids())

    def pids() -> list[int]:
        started = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert len(started) == 2
        return started

    with_pool(work, kind="environments:Bad", network=True, turn_s=2.0)
    wait_until_gone(pids())


def test_an_interpreter_of_its_own_has_its_own_packages(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nOTHER=1 exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    kind = "environments:Where"
    (start,) = with_pool(lambda pool: play(pool, {}, turns=0), kind=kind, python=str(python))
    other, _, *paths = start.messages[0]["content"].splitlines()
    assert other == "1" and paths and not any("-packages" in path for path in paths)
    (start,) = with_pool(lambda pool: play(pool, {}, turns=0), kind=kind)
    assert start.messages[0]["content"].startswith("no\n")
    missing = EnvironmentConfig(kind=kind, python=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"environments:Where: cannot start its interpreter: .*nowhere"):
        with_pool(lambda pool: asyncio.sleep(0), kind=kind, python=missing.python)
    with pytest.raises(ConfigError, match="cannot start its interpreter"):  # by a dry run, too
        check_sources(Config(environment=missing))


def test_prepare_is_called_once_before_processes_are_forked() -> None:
    async def work(pool: EnvironmentPool) -> set[str]:
        starts = await asyncio.gather(*(play(pool, {}, turns=0) for _ in range(4)))
        return {start.messages[0]["content"].splitlines()[1] for (start,) in starts}

    (prepared,) = with_pool(work, kind="environments:Where", options={"word": "a"})
    assert prepared.startswith("a ")


def test_no_more_episodes_are_open_than_there_are_processes() -> None:
    async def work(pool: EnvironmentPool) -> int:
        most = open_now = 0

        async def one() -> None:
            nonlocal most, open_now
            async with pool.episode() as episode:
                open_now += 1
                most = max(most, open_now)
                await episode.start({})
                open_now -= 1

        await asyncio.gather(*(one() for _ in range(9)))
        return most

    assert with_pool(work, processes=3) == 3


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("nowhere:Class", "environment.kind nowhere:Class: cannot import it"),
        ("environments:nothing", "environment.kind environments:nothing: cannot import it"),
        ("trainer.config:Config", "it has no start; expected a class with start(row) and step(message)"),
        (
            "environments:Bad",
            "unexpected keyword argument 'patience'; it takes turns, say",
        ),
    ],
)
def test_what_is_no_environment_is_refused(kind: str, text: str) -> None:
    with pytest.raises(ConfigError, match=r"environment\.") as error:
        with_pool(lambda pool: asyncio.sleep(0), kind=kind, options={"patience": 3})
    assert text in str(error.value)
    for python in ("", sys.executable):  # before anything is loaded, too, whoever imports it
        one = EnvironmentConfig(kind=kind, options={"patience": 3}, python=python)
        with pytest.raises(ConfigError) as early:
            check_sources(Config(environment=one))
        assert text in str(early.value)


def test_a_class_that_cannot_be_made_is_said_to_be_that() -> None:
    options = {"turns": 1, "say": None}
    text = with_pool(lambda pool: failure(pool, ""), kind="environments:Picky", options=options)
    assert text.startswith(
        "environment environments:Picky: __init__ raised ValueError: say (environments.py:"
    )


def test_a_close_that_fails_costs_no_episode() -> None:
    async def work(pool: EnvironmentPool) -> list[list[Step]]:
        return [await play(pool, {}) for _ in range(MAX_STARTUP_FAILURES + 1)]

    notes: list[str] = []
    assert all(steps[-1].done for steps in with_pool(work, notes, kind="environments:BadEnd"))
    assert not notes


def test_processes_that_die_while_they_wait_cost_no_episode() -> None:
    async def work(pool: EnvironmentPool) -> list[list[Step]]:
        await asyncio.gather(*(play(pool, {}) for _ in range(4)))
        pool._server.process.kill()
        pool._server.process.wait()
        await asyncio.sleep(0.2)
        return await asyncio.gather(*(play(pool, {}) for _ in range(6)))

    notes: list[str] = []
    assert len(with_pool(work, notes)) == 6
    assert set(notes) == {"the fork server died and is restarted"}


def test_an_episode_that_outlives_its_pool_starts_no_process() -> None:
    async def work(pool: EnvironmentPool) -> None:
        async def stuck() -> None:
            async with pool.episode() as one:
                await one.start({})
                await asyncio.sleep(60)

        task = asyncio.create_task(stuck())
        await asyncio.sleep(1)
        pool.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert pool._server.process.poll() is not None

    notes: list[str] = []
    with_pool(work, notes)
    assert not notes


def test_an_environment_that_never_works_ends_the_run() -> None:
    async def work(pool: EnvironmentPool) -> None:
        for _ in range(MAX_STARTUP_FAILURES - 1):
            await failure(pool, "raises")
        await play(pool, {"fault": "raises"})

    with pytest.raises(ConfigError, match="each of its first 50 episodes failed, the first by environment"):
        with_pool(work, kind="environments:Bad")
