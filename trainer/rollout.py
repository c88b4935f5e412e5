"""One prompt group: generate, interrupt where the budget ends, verify."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trainer.config import Config
from trainer.engines.protocol import Engine
from trainer.sampler import Issued
from trainer.types import Completion, Group, Prompt, Request, Rollout
from trainer.verifiers.pool import VerifierPool


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """What every rollout needs beside its prompt."""

    config: Config
    engine: Engine
    verifier: VerifierPool
    decode: Callable[[list[int]], str]  # token ids -> text without special tokens
    stop_ids: frozenset[int]
    phrase_ids: tuple[int, ...]  # the interruption phrase, tokenised once


async def rollout_group(ctx: RolloutContext, issued: Issued) -> Group:
    """All completions of one prompt, interrupted and verified; verification begins as each one ends."""
    n = ctx.config.pipeline.completions_per_prompt
    seed = ctx.config.seed * 1_000_003 + issued.ordinal
    rollouts = await rollout_prompt(ctx, issued.prompt, n, f"g{issued.ordinal}", seed)
    return Group(issued.ordinal, issued.epoch, issued.prompt, tuple(rollouts))


async def rollout_prompt(
    ctx: RolloutContext, prompt: Prompt, n: int, request_id: str, seed: int, evaluation: bool = False
) -> list[Rollout]:
    """`n` verified rollouts of a prompt, in order of their index."""
    request = Request(
        request_id,
        prompt.token_ids,
        n,
        ctx.config.engine.max_new_tokens,
        ctx.config.engine.temperature,
        ctx.stop_ids,
        seed,
        evaluation,
    )
    if ctx.config.engine.interruption.enabled:
        return list(await asyncio.gather(*(_interrupted(ctx, prompt, request, i) for i in range(n))))
    verifying = {}
    async for completion in ctx.engine.stream(request):
        verifying[completion.index] = asyncio.ensure_future(_verified(ctx, prompt, completion))
    return [await verifying[i] for i in range(n)]


async def _interrupted(ctx: RolloutContext, prompt: Prompt, request: Request, index: int) -> Rollout:
    """Think up to a budget drawn from [lo, hi]; if still thinking then, append the phrase; then answer.

    The continuation is a new token-in request. Phrase tokens were not sampled: `sampled` is False there.
    """
    settings = ctx.config.engine.interruption
    budget = int(np.random.default_rng([request.seed, index]).integers(settings.lo, settings.hi + 1))
    think = replace(request, request_id=f"{request.request_id}.{index}", n=1, max_tokens=budget)
    think = replace(think, seed=request.seed * 65_537 + 2 * index)  # odd ones are for the answers
    first = await _only(ctx.engine, think)
    if first.finish_reason != "length":
        return await _verified(ctx, prompt, replace(first, index=index))
    ids = [int(t) for t in first.token_ids]
    answering = bool(settings.end_marker) and settings.end_marker in ctx.decode(ids)
    phrase = () if answering else ctx.phrase_ids
    answer = replace(
        think,
        request_id=f"{think.request_id}.answer",
        prompt_ids=(*request.prompt_ids, *ids, *phrase),
        max_tokens=settings.answer_tokens,
        seed=think.seed + 1,
    )
    second = await _only(ctx.engine, answer)
    return await _verified(
        ctx, prompt, _joined(first, phrase, second, index), phrase_at=len(ids), phrase=phrase
    )


def _joined(first: Completion, phrase: tuple[int, ...], second: Completion, index: int) -> Completion:
    """Thinking + phrase + answer as one completion; the phrase takes the version it was inserted under."""
    version = second.versions[:1] if len(second.versions) else first.versions[-1:]
    return Completion(
        first.request_id,
        index,
        np.concatenate([first.token_ids, np.asarray(phrase, np.int32), second.token_ids]),
        np.concatenate([first.logprobs, np.zeros(len(phrase), np.float32), second.logprobs]),
        np.concatenate([first.versions, np.repeat(version, len(phrase)), second.versions]),
        second.finish_reason,
    )


async def _only(engine: Engine, request: Request) -> Completion:
    (completion,) = [c async for c in engine.stream(request)]
    return completion


async def _verified(
    ctx: RolloutContext, prompt: Prompt, c: Completion, phrase_at: int = 0, phrase: tuple[int, ...] = ()
) -> Rollout:
    """The completion with its reward."""
    text = ctx.decode([int(t) for t in c.token_ids])
    verdict = await ctx.verifier.verify(text, prompt.answer, prompt.metadata)
    reward = ctx.config.verifier.wrong_reward
    reward += (ctx.config.verifier.correct_reward - reward) * verdict.score
    sampled = np.ones(len(c.token_ids), np.bool_)
    sampled[phrase_at : phrase_at + len(phrase)] = False
    return Rollout(
        c.token_ids,
        c.logprobs,
        c.versions,
        sampled,
        text,
        reward,
        verdict.outcome,
        truncated=c.finish_reason == "length",
        interrupted=bool(phrase),
    )


def sample_record(group: Group, step: int) -> dict[str, Any]:
    """A group's completions for a person to read, as written to samples.jsonl."""
    return {
        "step": step,
        "prompt": group.prompt.text,
        "answer": group.prompt.answer,
        "completions": [
            {"text": r.text, "reward": r.reward, "outcome": r.outcome, "tokens": len(r.token_ids)}
            for r in group.rollouts
        ],
    }
