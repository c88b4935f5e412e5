"""Promises of an episode: tokens verbatim, masks by who made them, rewards and budgets; dropped failures."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from fakes import FakeEngine, context, group, having, prompts, rollout

from trainer.config import Config, EnvironmentConfig, InterruptionConfig, ObjectiveConfig
from trainer.controller.batch import build_batch, zero_variance
from trainer.controller.evaluate import score
from trainer.controller.rollout import rollout_group, sample_record
from trainer.controller.sampler import IssuedPrompt
from trainer.environments.pool import EnvironmentFailure, Step
from trainer.types import Completion, Group, Request


@dataclass
class FakeEpisode:
    """Answers each turn with the next of these steps; None: it fails."""

    steps: Sequence[Step | None]
    begin: Step = field(default_factory=lambda: Step(()))
    seconds: float = 0.25
    heard: list[dict[str, Any]] = field(default_factory=list)

    async def start(self, row: dict[str, Any]) -> Step:
        return self.begin

    async def step(self, message: dict[str, Any]) -> Step:
        self.heard.append(message)
        answer = self.steps[len(self.heard) - 1]
        if answer is None:
            raise EnvironmentFailure("environment Fake: step raised")
        return answer


@dataclass
class FakePool:
    """Hands out an episode of each of these in turn."""

    stories: list[FakeEpisode]
    opened: int = 0

    @asynccontextmanager
    async def episode(self, evaluation: bool = False) -> AsyncIterator[FakeEpisode]:
        self.opened += 1
        yield self.stories[self.opened - 1]


def says(text: str, reward: float | None = None, done: bool = False) -> Step:
    return Step(({"role": "user", "content": text},), reward, done)


def play(
    engine: FakeEngine,
    stories: list[FakeEpisode],
    max_new_tokens: int = 100,
    interruption: Any = None,
    pool: type[FakePool] = FakePool,
    **more: Any,
) -> Group:
    """A group of episodes; a text is written as the numbers of its characters less 500."""
    engine_keys = {"max_new_tokens": max_new_tokens, "interruption": interruption or InterruptionConfig()}
    environment = EnvironmentConfig(**{"kind": "fakes:Fake", **more})
    pipeline = {"completions_per_prompt": len(stories)}
    config = having(Config(environment=environment), pipeline=pipeline, engine=engine_keys)
    pools: Any = {"": pool(stories)}
    encode = lambda text: [ord(c) + 500 for c in text]  # noqa: E731
    ctx = context(config, engine, environments=pools, encode=encode)
    return asyncio.run(rollout_group(ctx, IssuedPrompt(5, 1, prompts(1)[0], 0)))


def test_an_episode_is_its_turns_and_what_the_environment_says_between_them() -> None:
    engine = FakeEngine(lambda request, index: 2)
    story = FakeEpisode([says("ab", 0.5), says("c"), says("bye", 2.0, done=True)], begin=says("?"))
    (one,) = play(engine, [story]).rollouts
    a, b, c, question = 597, 598, 599, 563
    assert one.token_ids.tolist() == [question, 10, 11, a, b, 10, 11, c, 10, 11]
    injected = [True, False, False, True, True, False, False, True, False, False]
    assert one.sampled.tolist() == [not x for x in injected]
    assert one.logprobs_gen.tolist() == [0.0 if x else -0.5 for x in injected]
    assert (one.reward, one.outcome, one.truncated) == (2.5, "correct", False)
    assert [m["content"] for m in story.heard] == ["10 11"] * 3
    # Each request is the sequence so far, and continues the one before.
    prompt = prompts(1)[0].token_ids
    assert [r.prompt_ids for r in engine.requests] == [
        (*prompt, *one.token_ids[:n].tolist()) for n in (1, 5, 8)
    ]
    assert [r.continues for r in engine.requests] == ["", *(r.request_id for r in engine.requests[:2])]
    assert len({r.seed for r in engine.requests}) == 3
    assert engine.log == [f"release {engine.requests[-1].request_id}"]  # its KV was kept in vain
    record = sample_record(Group(0, 0, prompts(1)[0], (one,)), 1)["completions"][0]
    contents = [(t["role"], t["content"], t.get("reward")) for t in record["turns"]]
    assert contents[:3] == [("user", "?", None), ("assistant", "10 11", 0.5), ("user", "ab", None)]
    assert (record["count"], record["seconds"], record["error"]) == (3, 0.25, "")


def test_engines_wait_for_a_process_and_for_each_answer() -> None:
    waits, during = 0, list[tuple[str, int]]()

    class Engine(FakeEngine):
        @contextmanager
        def waiting(self, request_id: str, state: str) -> Iterator[None]:
            nonlocal waits
            assert state == "tools"
            waits += 1
            yield
            waits -= 1

        async def stream(self, request: Request) -> AsyncIterator[list[Completion]]:
            during.append(("model", waits))
            async for ended in super().stream(request):
                yield ended

    class Slow(FakePool):
        @asynccontextmanager
        async def episode(self, evaluation: bool = False) -> AsyncIterator[FakeEpisode]:
            during.append(("process", waits))
            async with super().episode(evaluation) as one:
                yield one

    class Story(FakeEpisode):
        async def step(self, message: dict[str, Any]) -> Step:
            during.append(("answer", waits))
            return await super().step(message)

    story = Story([says("a"), says("b", 1.0, done=True)])
    play(Engine(lambda request, index: 2), [story], pool=Slow)
    assert during == [("process", 1), *[("model", 0), ("answer", 1)] * 2] and not waits


def test_no_two_turns_of_a_group_share_random_numbers() -> None:
    engine = FakeEngine(lambda request, index: 2)
    play(engine, [FakeEpisode([says("a")] * 4) for _ in range(4)], max_turns=4)
    assert len({r.seed for r in engine.requests}) == len(engine.requests) == 16


def test_turns_and_tokens_have_limits() -> None:
    engine = FakeEngine(lambda request, index: 50)
    (one,) = play(engine, [FakeEpisode([says("ab", 1.0)] * 9)], turn_tokens=4, max_turns=3).rollouts
    assert [r.max_tokens for r in engine.requests] == [4, 4, 4] and not one.truncated and one.reward == 3.0
    engine = FakeEngine(lambda request, index: 50)
    (one,) = play(engine, [FakeEpisode([says("ab", 1.0)] * 9)], turn_tokens=4, max_new_tokens=9).rollouts
    assert [r.max_tokens for r in engine.requests] == [4, 3] and len(one.token_ids) == 9
    assert one.truncated and one.reward == 2.0  # its last words count
    engine = FakeEngine(lambda request, index: 2)
    (one,) = play(engine, [FakeEpisode([says("abcdefgh", 1.0)] * 9)], max_new_tokens=9).rollouts
    assert one.truncated and len(one.token_ids) == 2  # there was no room for a further turn


def test_the_environment_hears_which_turn_is_the_last() -> None:
    interruption = InterruptionConfig(enabled=True, lo=8, hi=8, answer_tokens=2, end_marker="")
    cases: list[tuple[dict[str, Any], list[bool]]] = [
        ({"max_turns": 3}, [False, False, True]),
        ({"max_new_tokens": 9}, [False, True]),  # 4 tokens, 1 of the environment's, 4
        ({"interruption": interruption}, [False, True]),  # 4, 1, 3 and the answer
    ]
    for limits, last in cases:
        story = FakeEpisode([says("a", 1.0)] * 9)
        play(FakeEngine(lambda request, index: 50), [story], turn_tokens=4, **limits)
        assert [message["last"] for message in story.heard] == last


def test_an_interruption_comes_in_the_turn_that_reaches_the_budget() -> None:
    engine = FakeEngine(lambda request, index: 3 if len(engine.requests) == 3 else 4)
    interruption = InterruptionConfig(enabled=True, lo=8, hi=8, answer_tokens=9, end_marker="")
    story = FakeEpisode([says("a", 1.0), says("b", 1.0)])
    (one,) = play(engine, [story], interruption=interruption).rollouts
    assert one.token_ids.tolist() == [10, 11, 12, 13, 597, 10, 11, 12, 97, 98, 99, 10, 11, 12]
    assert one.interrupted and not one.truncated and one.reward == 2.0
    assert story.heard[1]["content"] == "10 11 12 97 98 99 10 11 12"  # the whole turn
    assert [r.keep_kv for r in engine.requests] == [("stop", "length"), ("stop", "length"), ()]


def test_an_episode_that_fails_keeps_its_tokens_and_has_no_reward() -> None:
    stories = [FakeEpisode([says("a", 1.0), None]), FakeEpisode([says("a", None, done=True)])]
    failed, unscored = play(FakeEngine(lambda request, index: 2), stories).rollouts
    assert (failed.outcome, failed.scored, len(failed.token_ids)) == ("error", False, 5)
    assert failed.episode["error"] == "environment Fake: step raised"
    assert (unscored.outcome, unscored.scored) == ("unscored", False)


def test_an_episode_without_room_for_a_turn_says_so() -> None:
    story = FakeEpisode([], begin=says("abcdefgh"))
    (one,) = play(FakeEngine(), [story], max_new_tokens=8).rollouts
    assert (one.outcome, len(one.token_ids)) == ("error", 0)
    assert one.episode["error"] == "the first messages take 8 of the episode's 8 tokens"


def test_a_failed_episode_is_no_pass_and_no_reward_in_an_evaluation() -> None:
    config = Config(environment=EnvironmentConfig(kind="fakes:Fake"))
    failed = rollout(0.0, outcome="error", episode={"count": 1})
    groups = [[rollout(-4.0), failed], [rollout(1.0), rollout(1.0)]]
    numbers = score(config, prompts(2), groups)
    assert (numbers["pass_rate"], numbers["mean_reward"], numbers["unscored"]) == (0.5, -1.5, 0.25)


@pytest.mark.parametrize("norm", ["batch", "group", "none"])
def test_what_has_no_reward_is_in_no_loss_and_in_no_baseline(norm: Any) -> None:
    objective = ObjectiveConfig(advantage_norm=norm)
    scored = [rollout(1.0), rollout(-1.0), rollout(-1.0)]
    failed = rollout(7.0, outcome="error", episode={"count": 1, "tool_calls": 0, "seconds": 3.0})
    prompt = prompts(1)[0]
    plain = build_batch([Group(0, 0, prompt, tuple(scored))], 1, objective, 0)
    mixed = build_batch([Group(0, 0, prompt, (failed, *scored))], 1, objective, 0)
    for a, b in zip(plain.sequences, mixed.sequences, strict=True):
        assert np.array_equal(a.advantages, b.advantages) and np.array_equal(a.token_weights, b.token_weights)
    assert mixed.stats["train/reward"] == plain.stats["train/reward"] == pytest.approx(-1 / 3)
    assert mixed.stats["train/pass_rate"] == pytest.approx(1 / 3)
    assert mixed.stats["environment/error"] == 0.25 and mixed.stats["environment/seconds"] == 3.0
    assert zero_variance(Group(0, 0, prompt, (failed, scored[1], scored[2])))
    assert Group(0, 0, prompt, (failed,)).pass_rate == 0.0 and group(prompt, 1, 2).pass_rate == 0.5
