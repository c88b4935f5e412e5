"""One prompt group: generate its completions, interrupt those that think too long, verify them.

Where the task has an environment, a completion is an episode, which `episode.py` plays.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.controller.context import RolloutContext
from trainer.controller.curriculum import completion_limit
from trainer.controller.episode import play
from trainer.controller.sampler import IssuedPrompt
from trainer.controller.turns import Tape, Turn, generate
from trainer.types import Completion, Group, Prompt, Request, Rollout
from trainer.verifiers.text import opened_thinking

END_TOKENS = 16  # of a prompt: `<think>` may be several
Tapes = Callable[[int], Tape]  # by the episode's index


async def rollout_group(
    ctx: RolloutContext, issued: IssuedPrompt, tapes: Tapes = lambda index: Tape()
) -> Group:
    """All completions of one prompt; each is verified as soon as it ends."""
    n = ctx.config.pipeline.completions_per_prompt
    seed = ctx.config.seed * 1_000_003 + issued.group_id
    name = f"g{issued.group_id}"
    rollouts = await rollout_prompt(ctx, issued.prompt, n, name, seed, issued.step, tapes, experts=True)
    return Group(issued.group_id, issued.epoch, issued.prompt, tuple(rollouts))


async def rollout_prompt(
    ctx: RolloutContext, prompt: Prompt, n: int, request_id: str, seed: int, step: int | None,
    tapes: Tapes = lambda index: Tape(), experts: bool = False,
) -> list[Rollout]:  # fmt: skip
    """`n` verified rollouts of a prompt, by index, for an optimizer step (from 0), or None: an evaluation.

    `experts`: with those of a mixture, for the learner to replay."""
    request = Request(
        request_id=request_id,
        prompt_ids=prompt.token_ids,
        n=n,
        max_tokens=completion_limit(ctx.config.curriculum, ctx.config.engine.max_new_tokens, step),
        temperature=ctx.config.engine.temperature,
        stop_ids=ctx.stop_ids,
        seed=seed,
        evaluation=step is None,
        experts_from=0 if experts else -1,
    )
    if prompt.task in ctx.environments:
        forced = ctx.config.engine.interruption.enabled
        budgets = [thinking_budget(ctx, seed, i) if forced else request.max_tokens for i in range(n)]
        episodes = (play(ctx, prompt, request, i, b, tapes(i)) for i, b in enumerate(budgets))
        return list(await asyncio.gather(*episodes))
    (end,) = ctx.decode([list(prompt.token_ids[-END_TOKENS:])])
    verify = partial(_verify, ctx, prompt, step, opened_thinking(end))
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
    settings, answers = ctx.config.engine.interruption, list[tuple[int, ...]]()

    async def respond(completion: Completion) -> Turn | None:
        if completion.finish_reason != "length" or answers:
            return None
        (text,) = ctx.decode([completion.token_ids.tolist()])
        answering = bool(settings.end_marker) and settings.end_marker in text
        answers.append(() if answering else ctx.phrase_ids)
        return Turn(answers[0], settings.answer_tokens)

    think = replace(request, request_id=f"{request.request_id}.{index}", n=1)
    think = replace(think, seed=request.seed * 65_537 + 2 * index)  # odd seeds are for the answers
    first = Turn((), thinking_budget(ctx, request.seed, index), goes_on=("length",))
    completion, sampled = await generate(ctx, think, first, respond)
    (text,) = ctx.decode([completion.token_ids.tolist()])
    return await verify(completion, text, sampled)


def thinking_budget(ctx: RolloutContext, seed: int, index: int) -> int:
    """Tokens before the interruption of a prompt's completion."""
    settings = ctx.config.engine.interruption
    return int(np.random.default_rng([seed, index]).integers(settings.lo, settings.hi + 1))


async def _verify(
    ctx: RolloutContext,
    prompt: Prompt,
    step: int | None,
    beginning: str,
    completion: Completion,
    text: str,
    sampled: NDArray[np.bool_] | None = None,
) -> Rollout:
    """The completion with its reward; `sampled` (T,) is False on an interruption's phrase, None: all are."""
    text = beginning + text
    with ctx.deadline.verification():
        scored = await ctx.rewards[prompt.task].score(prompt, text, len(completion.token_ids), step)
    return Rollout(
        token_ids=completion.token_ids,
        logprobs_gen=completion.logprobs_gen,
        versions=completion.versions,
        sampled=np.ones(len(completion.token_ids), np.bool_) if sampled is None else sampled,
        text=text,
        reward=scored.reward,
        outcome=scored.outcome,
        truncated=completion.finish_reason == "length",
        interrupted=sampled is not None and not sampled.all(),
        scores=scored.scores,
        experts=completion.experts,
    )


def sample_record(group: Group, step: int) -> dict[str, Any]:
    """A group's completions in readable form, for samples.jsonl."""
    return {
        "step": step,
        **({"task": group.prompt.task} if group.prompt.task else {}),
        "prompt": group.prompt.text,
        "answer": group.prompt.answer,
        "completions": [
            {"text": r.text, "reward": r.reward, "outcome": r.outcome, "tokens": len(r.token_ids)} | r.episode
            for r in group.rollouts
        ],
    }
