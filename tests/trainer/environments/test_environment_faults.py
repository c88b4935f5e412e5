"""Promises of environments whose process fails: one episode is dropped and counted, and nothing hangs."""

import asyncio
import os
import signal
from dataclasses import replace

import pytest
from fakes import FakeEngine, context, having, prompts

from trainer.config import Config, EnvironmentConfig
from trainer.controller.rollout import rollout_group
from trainer.controller.sampler import IssuedPrompt
from trainer.controller.turns import Tape
from trainer.environments.pool import EnvironmentFailure, EnvironmentPool
from trainer.types import Group, Request, Rollout

EPISODES, VICTIM, TURN_S = 4, 2, 4.0
SETTINGS = EnvironmentConfig(
    kind="hostile_environments:Hostile", network=True, turn_s=TURN_S, max_turns=5, threshold=3.0
)


def words(request: Request, index: int) -> int:
    """Episode i says i + 1 words a turn."""
    return int(request.request_id.split(".")[1]) + 1


async def group(pool: EnvironmentPool, fault: str, victim: int, ends: list[tuple[int, Rollout]]) -> Group:
    """A group of episodes, of which the one of so many words meets the fault."""
    config = having(Config(environment=SETTINGS), pipeline={"completions_per_prompt": EPISODES})
    encode = lambda text: [ord(c) for c in text]  # noqa: E731  # a one-line tokenizer
    ctx = context(config, FakeEngine(words), environments={"": pool}, encode=encode)
    prompt = replace(prompts(1)[0], metadata={"fault": fault, "victim": victim})

    def tape(index: int) -> Tape:
        return Tape(end=lambda rollout: ends.append((index, rollout)))

    return await rollout_group(ctx, IssuedPrompt(5, 0, prompt, 0), tape)


FAULTS = {
    "killed": "its process died in step",
    "frozen": f"step took more than environment.turn_s = {TURN_S:g} s",
    "slow": f"step took more than environment.turn_s = {TURN_S:g} s",
    "a_part_of_a_line": f"step took more than environment.turn_s = {TURN_S:g} s",
    "a_part_of_a_line_and_death": "its process died in step: it closed the connection",
    "a_line_without_an_end": "its process died in step: its reply exceeds",
    "two_lines_at_once": "its process sent no reply to step",
    "a_reply_to_another_call": "its process sent a reply to something else than step",
    "no_json": "its process sent no reply to step",
    "deep": "its process sent no reply to step",
}


@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, marks=pytest.mark.slow) if f in ("slow", "a_part_of_a_line") else f for f in FAULTS],
)
def test_a_fault_of_one_process_drops_one_episode_of_its_group(fault: str) -> None:
    notes, ends = list[str](), list[tuple[int, Rollout]]()

    async def work() -> tuple[Group, Group]:
        bad = await group(pool, fault, VICTIM, ends)
        return bad, await group(pool, fault, 0, [])  # in the same processes, and one new one

    pool = EnvironmentPool(SETTINGS, notes.append)
    try:
        bad, good = asyncio.run(work())
    finally:
        pool.close()
    assert [r.reward for r in good.rollouts] == [3.0] * EPISODES
    outcomes = [r.outcome for r in bad.rollouts]
    assert outcomes == ["error" if i + 1 == VICTIM else "correct" for i in range(EPISODES)]
    failed = bad.rollouts[VICTIM - 1]
    assert failed.episode["error"].startswith(f"environment {SETTINGS.kind}: {FAULTS[fault]}")
    assert [r.reward for r in bad.rollouts if r.scored] == [3.0] * (EPISODES - 1)
    assert "false" not in str([r.episode["turns"] for r in bad.rollouts if r.scored])
    assert sorted(index for index, _ in ends) == [*range(EPISODES)]  # each ended once
    assert len(notes) == 1


def test_a_fork_server_that_is_frozen_costs_the_episodes_that_need_a_process() -> None:
    """Those that have one go on; when it is continued, all is as before."""
    row, said = {"fault": "none", "victim": 0}, {"role": "assistant", "content": "a"}

    async def work() -> None:
        async with pool.episode() as before:
            await before.start(row)
            os.kill(pool._server.process.pid, signal.SIGSTOP)
            async with pool.episode() as late:
                with pytest.raises(EnvironmentFailure, match="start took more than environment"):
                    await late.start(row)
            assert (await before.step(said)).reward == 1.0
        os.kill(pool._server.process.pid, signal.SIGCONT)
        async with pool.episode() as after, pool.episode() as further:
            for one in (after, further):
                await one.start(row)
                assert (await one.step(said)).reward == 1.0

    pool = EnvironmentPool(SETTINGS, lambda text: None)
    try:
        asyncio.run(work())
    finally:
        pool.close()
