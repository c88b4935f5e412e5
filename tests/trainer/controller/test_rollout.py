"""Promises of a rollout: interruption injects the phrase without loss; rewards, order and flags are exact."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fakes import FakeEngine, context, having, prompts

from trainer.config import Config, InterruptionConfig
from trainer.controller.evaluate import sampling_error
from trainer.controller.rollout import rollout_group
from trainer.controller.sampler import IssuedPrompt
from trainer.types import Prompt


def configured(**interruption: Any) -> Config:
    engine = {"interruption": InterruptionConfig(**interruption), "max_new_tokens": 6}
    return having(Config(), pipeline={"completions_per_prompt": 3}, engine=engine)


def run(config: Config, engine: FakeEngine) -> Any:
    return asyncio.run(rollout_group(context(config, engine), IssuedPrompt(5, 1, prompts(1)[0], 0)))


def test_rollouts_come_in_the_order_of_their_index_with_their_reward() -> None:
    group = run(configured(), FakeEngine(lambda request, index: 4 + index))
    assert [len(r.token_ids) for r in group.rollouts] == [4, 5, 6]
    assert [r.reward for r in group.rollouts] == [-1.0, 1.0, -1.0]  # the fake verifier alternates
    assert [r.truncated for r in group.rollouts] == [False, False, False]
    assert (group.group_id, group.epoch, group.pass_rate) == (5, 1, 1 / 3)
    assert run(configured(), FakeEngine(lambda request, index: 7)).rollouts[0].truncated


@pytest.mark.parametrize(("prompt", "text"), [
    ("2+2?<think>\n", "<think>\n10 11"), ("2+2?<think>\n\n</think>\n\n", "10 11"), ("2+2?", "10 11"),
])  # fmt: skip
def test_a_scorer_sees_the_thinking_that_the_prompt_has_opened(
    prompt: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what such a completion says before it is cut, or before `</think>`, would be its answer."""
    ctx, seen = context(configured(), FakeEngine(lambda request, index: 2)), list[str]()
    decode, score = ctx.decode, ctx.rewards[""].score
    ids = [list(prompts(1)[0].token_ids)]

    async def scored(prompt: Prompt, text: str, tokens: int, step: int | None) -> Any:
        seen.append(text)
        return await score(prompt, text, tokens, step)

    monkeypatch.setattr(ctx.rewards[""], "score", scored)
    ctx = replace(ctx, decode=lambda batch: [prompt] if batch == ids else decode(batch))
    group = asyncio.run(rollout_group(ctx, IssuedPrompt(5, 1, prompts(1)[0], 0)))
    assert seen == [text] * 3 == [rollout.text for rollout in group.rollouts]


def test_an_interrupted_completion_is_thinking_phrase_answer_and_the_phrase_carries_no_loss() -> None:
    engine = FakeEngine(lambda request, index: 3 if request.continues else 50, tick=0)
    config = configured(enabled=True, lo=4, hi=8, answer_tokens=9, end_marker="")
    group = run(config, engine)
    for rollout in group.rollouts:
        budget = len(rollout.token_ids) - 3 - 3
        assert 4 <= budget <= 8
        assert rollout.interrupted and not rollout.truncated
        # the fake engine's ids count from 10; the phrase is 97, 98, 99
        expected = [*range(10, 10 + budget), 97, 98, 99, 10, 11, 12]
        assert rollout.token_ids.tolist() == expected
        assert rollout.sampled.tolist() == [True] * budget + [False] * 3 + [True] * 3
        assert (rollout.logprobs_gen[~rollout.sampled] == 0).all()
    answers = [r for r in engine.requests if r.continues]
    assert {r.max_tokens for r in answers} == {9}
    for request in answers:  # token in, token out: prompt + thinking + phrase
        assert request.prompt_ids[:3] == prompts(1)[0].token_ids and request.prompt_ids[-3:] == (97, 98, 99)
    thoughts = {r.max_tokens for r in engine.requests if not r.continues}
    assert len(thoughts) > 1  # drawn per completion


def test_a_completion_that_ends_within_its_budget_is_left_alone() -> None:
    group = run(configured(enabled=True, lo=20, hi=20), FakeEngine(lambda request, index: 5))
    assert [r.interrupted for r in group.rollouts] == [False] * 3
    assert all(r.sampled.all() and len(r.token_ids) == 5 for r in group.rollouts)


def test_a_completion_already_answering_goes_on_without_the_phrase() -> None:
    engine = FakeEngine(lambda request, index: 2 if request.continues else 50)
    group = run(configured(enabled=True, lo=4, hi=4, end_marker="12"), engine)  # token 12 reads "12"
    assert [r.token_ids.tolist() for r in group.rollouts] == [[10, 11, 12, 13, 10, 11]] * 3
    assert not any(r.interrupted for r in group.rollouts) and all(r.sampled.all() for r in group.rollouts)


def test_an_answer_cut_at_its_own_limit_is_truncated() -> None:
    group = run(configured(enabled=True, lo=4, hi=4, answer_tokens=2), FakeEngine(lambda request, index: 50))
    assert all(r.truncated and r.interrupted for r in group.rollouts)


def test_no_two_completions_share_random_numbers() -> None:
    engine = FakeEngine()
    run(configured(enabled=True, lo=2, hi=2, answer_tokens=2), engine)
    seeds = [r.seed for r in engine.requests]
    assert len(set(seeds)) == len(seeds) == 6


def test_the_standard_error_is_that_of_sampling_fixed_prompts() -> None:
    # two prompts, k = 4: p = (1, .5); unbiased p(1-p) = (0, .25·4/3); Var = (.3333/4)/4
    correct = np.array([[1, 1, 1, 1], [1, 0, 1, 0]], float)
    assert np.isclose(sampling_error(correct), (0.25 * 4 / 3 / 4) ** 0.5 / 2)
    rng = np.random.default_rng(0)
    p = rng.random(50)
    draws = rng.random((2000, 50, 4)) < p[:, None]
    errors = np.array([sampling_error(d.astype(float)) for d in draws])
    assert np.isclose(draws.mean((1, 2)).std(), np.sqrt((errors**2).mean()), rtol=0.05)
    assert sampling_error(np.ones((10, 4))) == 0.5 / 40  # a perfect score does not claim certainty
