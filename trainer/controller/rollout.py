"""One prompt group: generate its completions, interrupt those that think too long, verify them."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from trainer.config import Config
from trainer.controller.curriculum import completion_limit
from trainer.controller.deadline import Deadline
from trainer.controller.rewards import Rewards
from trainer.controller.sampler import IssuedPrompt
from trainer.engines.pool import EnginePool
from trainer.types import Completion, Group, Prompt, Request, Rollout


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """Everything that all rollouts need, whatever their prompt."""

    config: Config
    engine: EnginePool
    rewards: dict[str, Rewards]  # by task
    decode: Callable[[list[list[int]]], list[str]]  # token ids -> texts without special tokens
    stop_ids: frozenset[int]
    phrase_ids: tuple[int, ...]  # the interruption phrase
    deadline: Deadline


async def rollout_group(ctx: RolloutContext, issued: IssuedPrompt) -> Group:
    """All completions of one prompt; each is verified as soon as it ends."""
    n = ctx.config.pipeline.completions_per_prompt
    seed = ctx.config.seed * 1_000_003 + issued.group_id
    rollouts = await rollout_prompt(ctx, issued.prompt, n, f"g{issued.group_id}", seed, issued.step)
    return Group(issued.group_id, issued.epoch, issued.prompt, tuple(rollouts))


async def rollout_prompt(
    ctx: RolloutContext, prompt: Prompt, n: int, request_id: str, seed: int, step: int | None
) -> list[Rollout]:
    """`n` verified rollouts of a prompt, by index, for an optimizer step (from 0), or None: an evaluation."""
    request = Request(
        request_id=request_id,
        prompt_ids=prompt.token_ids,
        n=n,
        max_tokens=completion_limit(ctx.config.curriculum, ctx.config.engine.max_new_tokens, step),
        temperature=ctx.config.engine.temperature,
        stop_ids=ctx.stop_ids,
        seed=seed,
        evaluation=step is None,
    )
    verify = partial(_verify, ctx, prompt, step)
    if ctx.config.engine.interruption.enabled:
        return list(await asyncio.gather(*(_interrupted(ctx, request, i, verify) for i in range(n))))
    tasks: dict[int, asyncio.Task[Rollout]] = {}
    async for ended in ctx.engine.stream(request):
        ctx.deadline.restart()
        texts = ctx.decode([c.token_ids.tolist() for c in ended])
        for completion, text in zip(ended, texts, strict=True):
            tasks[completion.index] = asyncio.create_task(verify(completion, text))
    return [await tasks[i] for i in sorted(tasks)]


async def _interrupted(
    ctx: RolloutContext, request: Request, index: int, verify: Callable[..., Awaitable[Rollout]]
) -> Rollout:
    """Think up to a budget drawn from [lo, hi]; if still thinking then, append the phrase; then answer.

    The completion has at most budget + phrase + answer_tokens tokens; engine.max_new_tokens is not used.
    The answer is a request that continues the thinking. The phrase is not sampled.
    """
    settings = ctx.config.engine.interruption
    budget = int(np.random.default_rng([request.seed, index]).integers(settings.lo, settings.hi + 1))
    think = replace(request, request_id=f"{request.request_id}.{index}", n=1, max_tokens=budget, keep_kv=True)
    think = replace(think, seed=request.seed * 65_537 + 2 * index)  # odd seeds are for the answers
    first = await _generate_one(ctx, think)
    ids = first.token_ids.tolist()
    (text,) = ctx.decode([ids])
    if first.finish_reason != "length":
        return await verify(first, text)
    answering = bool(settings.end_marker) and settings.end_marker in text
    phrase = () if answering else ctx.phrase_ids
    answer = replace(
        think,
        request_id=f"{think.request_id}.answer",
        prompt_ids=(*request.prompt_ids, *ids, *phrase),
        max_tokens=settings.answer_tokens,
        seed=think.seed + 1,
        keep_kv=False,
        continues=think.request_id,
    )
    joined = _joined(first, phrase, await _generate_one(ctx, answer))
    (text,) = ctx.decode([joined.token_ids.tolist()])
    return await verify(joined, text, slice(len(ids), len(ids) + len(phrase)))


def _joined(first: Completion, phrase: tuple[int, ...], second: Completion) -> Completion:
    """Thinking, phrase and answer in one; the phrase has the version of the answer's first token."""
    version = second.versions[:1] if len(second.versions) else first.versions[-1:]
    no_logprobs = np.zeros(len(phrase), np.float32)
    return replace(
        first,
        token_ids=np.concatenate([first.token_ids, np.asarray(phrase, np.int32), second.token_ids]),
        logprobs_gen=np.concatenate([first.logprobs_gen, no_logprobs, second.logprobs_gen]),
        versions=np.concatenate([first.versions, np.repeat(version, len(phrase)), second.versions]),
        finish_reason=second.finish_reason,
    )


async def _generate_one(ctx: RolloutContext, request: Request) -> Completion:
    ((completion,),) = [ended async for ended in ctx.engine.stream(request)]
    ctx.deadline.restart()
    return completion


async def _verify(
    ctx: RolloutContext,
    prompt: Prompt,
    step: int | None,
    completion: Completion,
    text: str,
    phrase: slice | None = None,
) -> Rollout:
    """The completion with its reward; the tokens of `phrase`, if it was interrupted, were not sampled."""
    with ctx.deadline.verification():
        scored = await ctx.rewards[prompt.task].score(prompt, text, len(completion.token_ids), step)
    sampled = np.ones(len(completion.token_ids), np.bool_)
    if phrase:
        sampled[phrase] = False
    return Rollout(
        token_ids=completion.token_ids,
        logprobs_gen=completion.logprobs_gen,
        versions=completion.versions,
        sampled=sampled,
        text=text,
        reward=scored.reward,
        outcome=scored.outcome,
        truncated=completion.finish_reason == "length",
        interrupted=phrase is not None and phrase.stop > phrase.start,
        scores=scored.scores,
    )


def sample_record(group: Group, step: int) -> dict[str, Any]:
    """A group's completions in readable form, for samples.jsonl."""
    return {
        "step": step,
        **({"task": group.prompt.task} if group.prompt.task else {}),
        "prompt": group.prompt.text,
        "answer": group.prompt.answer,
        "completions": [
            {"text": r.text, "reward": r.reward, "outcome": r.outcome, "tokens": len(r.token_ids)}
            for r in group.rollouts
        ],
    }
