"""One prompt group: generate, interrupt where the budget ends, verify."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from trainer.config import Config
from trainer.controller.sampler import IssuedPrompt
from trainer.engines.protocol import Engine
from trainer.types import Completion, Group, Prompt, Request, Rollout
from trainer.verifiers.pool import Verdict, VerifierPool

T = TypeVar("T")


class Progress:
    """Deadlines by what moves: every completion and every verdict starts `deadline_s` anew for all waits."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s, self.at = deadline_s, time.monotonic()
        self.verifying = 0  # completions that wait for a worker's verdict

    async def within(self, work: Awaitable[T], what: str) -> T:
        """The result of `work`, or a TimeoutError that names `what` once nothing has moved for too long."""
        task, began = asyncio.ensure_future(work), time.monotonic()
        try:
            while not task.done():
                left = max(began, self.at) + self.deadline_s - time.monotonic()
                if left <= 0:
                    stage = "verify: " if self.verifying else ""
                    raise TimeoutError(
                        f"{stage}{what}: nothing has come for pipeline.deadline_s = {self.deadline_s:g} s; "
                        "raise it if this machine is only slow"
                    )
                await asyncio.wait({task}, timeout=left)
            return task.result()
        finally:
            task.cancel()


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """What every rollout needs beside its prompt."""

    config: Config
    engine: Engine
    verifier: VerifierPool
    decode: Callable[[list[list[int]]], list[str]]  # token ids -> texts without special tokens
    stop_ids: frozenset[int]
    phrase_ids: tuple[int, ...]  # the interruption phrase, tokenised once
    progress: Progress


async def rollout_group(ctx: RolloutContext, issued: IssuedPrompt) -> Group:
    """All completions of one prompt, interrupted and verified; verification begins as each one ends."""
    n = ctx.config.pipeline.completions_per_prompt
    seed = ctx.config.seed * 1_000_003 + issued.group_id
    rollouts = await rollout_prompt(ctx, issued.prompt, n, f"g{issued.group_id}", seed)
    return Group(issued.group_id, issued.epoch, issued.prompt, tuple(rollouts))


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
    judged: list[Judged] = []
    async for ended in ctx.engine.stream(request):
        ctx.progress.at = time.monotonic()
        judged += _judge(ctx, prompt, ended)
    return [await _rollout(ctx, j) for j in sorted(judged, key=lambda j: j.completion.index)]


async def _interrupted(ctx: RolloutContext, prompt: Prompt, request: Request, index: int) -> Rollout:
    """Think up to a budget drawn from [lo, hi]; if still thinking then, append the phrase; then answer.

    At most budget + phrase + answer_tokens; engine.max_new_tokens is not used.

    The continuation is a new token-in request. Phrase tokens were not sampled: `sampled` is False there.
    """
    settings = ctx.config.engine.interruption
    budget = int(np.random.default_rng([request.seed, index]).integers(settings.lo, settings.hi + 1))
    think = replace(request, request_id=f"{request.request_id}.{index}", n=1, max_tokens=budget)
    think = replace(think, seed=request.seed * 65_537 + 2 * index)  # odd ones are for the answers
    first = await _only(ctx, think)
    if first.finish_reason != "length":
        return await _rollout(ctx, _judge(ctx, prompt, [first])[0])
    ids = [int(t) for t in first.token_ids]
    answering = bool(settings.end_marker) and settings.end_marker in ctx.decode([ids])[0]
    phrase = () if answering else ctx.phrase_ids
    answer = replace(
        think,
        request_id=f"{think.request_id}.answer",
        prompt_ids=(*request.prompt_ids, *ids, *phrase),
        max_tokens=settings.answer_tokens,
        seed=think.seed + 1,
    )
    second = await _only(ctx, answer)
    (judged,) = _judge(ctx, prompt, [_joined(first, phrase, second)])
    return await _rollout(ctx, judged, slice(len(ids), len(ids) + len(phrase)))


def _joined(first: Completion, phrase: tuple[int, ...], second: Completion) -> Completion:
    """Thinking + phrase + answer as one completion; the phrase takes the version it was inserted under."""
    version = second.versions[:1] if len(second.versions) else first.versions[-1:]
    return Completion(
        first.request_id,
        first.index,
        np.concatenate([first.token_ids, np.asarray(phrase, np.int32), second.token_ids]),
        np.concatenate([first.logprobs_gen, np.zeros(len(phrase), np.float32), second.logprobs_gen]),
        np.concatenate([first.versions, np.repeat(version, len(phrase)), second.versions]),
        second.finish_reason,
    )


async def _only(ctx: RolloutContext, request: Request) -> Completion:
    ((completion,),) = [ended async for ended in ctx.engine.stream(request)]
    ctx.progress.at = time.monotonic()
    return completion


@dataclass(frozen=True, slots=True)
class Judged:
    """A completion with its verdict; where a worker must decide, that is on its way."""

    completion: Completion
    text: str
    verdict: Verdict | asyncio.Task[Verdict]


def _judge(ctx: RolloutContext, prompt: Prompt, completions: Sequence[Completion]) -> list[Judged]:
    texts = ctx.decode([c.token_ids.tolist() for c in completions])
    return [
        Judged(c, t, ctx.verifier.quick(t, prompt.answer) or asyncio.create_task(_ask(ctx, prompt, t)))
        for c, t in zip(completions, texts, strict=True)
    ]


async def _ask(ctx: RolloutContext, prompt: Prompt, text: str) -> Verdict:
    ctx.progress.verifying += 1
    try:
        return await ctx.verifier.verify(text, prompt.answer, prompt.metadata)
    finally:
        ctx.progress.verifying -= 1
        ctx.progress.at = time.monotonic()


async def _rollout(ctx: RolloutContext, judged: Judged, phrase: slice = slice(0)) -> Rollout:
    """The completion with its reward; the tokens of `phrase` were not sampled."""
    c, verdict = judged.completion, judged.verdict
    if not isinstance(verdict, Verdict):
        verdict = await verdict
    reward = ctx.config.verifier.wrong_reward
    reward += (ctx.config.verifier.correct_reward - reward) * verdict.score
    sampled = np.ones(len(c.token_ids), np.bool_)
    sampled[phrase] = False
    return Rollout(
        c.token_ids,
        c.logprobs_gen,
        c.versions,
        sampled,
        judged.text,
        reward,
        verdict.outcome,
        truncated=c.finish_reason == "length",
        interrupted=not sampled.all(),
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
