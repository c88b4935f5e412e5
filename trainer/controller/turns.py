"""A completion of several turns: the model's, and between them tokens that it did not sample.

    request ──> the model's turn ──respond──> injected tokens ──request that continues──> ... ──> completion

Forced interruption and environments are ways to respond. Token in, token out: each request's prompt is the
exact sequence so far, so its keys and values are still there.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.controller.context import RolloutContext
from trainer.types import Completion, FinishReason, Request


@dataclass(frozen=True, slots=True)
class Turn:
    """The next turn: tokens that were not sampled, and then at most so many of the model."""

    injected: tuple[int, ...]
    max_tokens: int
    goes_on: tuple[FinishReason, ...] = ()  # ends after which a further turn may follow


Respond = Callable[[Completion], Awaitable[Turn | None]]


async def generate(
    ctx: RolloutContext, request: Request, first: Turn, respond: Respond
) -> tuple[Completion, NDArray[np.bool_]]:
    """One completion of the request's prompt, and (T,) which of its tokens were sampled.

    `respond` gets each turn of the model and returns what follows it, or None. Turn t has the seed
    `request.seed + t`."""
    parts: list[tuple[tuple[int, ...], Completion]] = []
    turn: Turn | None = first
    name = request.request_id
    while turn is not None:
        number = len(parts)
        request = replace(
            request,
            request_id=f"{name}.{number}" if number else name,
            prompt_ids=(*request.prompt_ids, *turn.injected),
            max_tokens=turn.max_tokens,
            keep_kv=turn.goes_on,
        )
        ((completion,),) = [ended async for ended in ctx.engine.stream(request)]
        ctx.deadline.restart()
        parts.append((turn.injected, completion))
        turn = await respond(completion)
        continued = request.request_id if completion.finish_reason in request.keep_kv else ""
        if turn is None and continued:
            ctx.engine.release(continued)
        ids = completion.token_ids.tolist()
        request = replace(
            request, prompt_ids=(*request.prompt_ids, *ids), seed=request.seed + 1, continues=continued
        )
    return joined(parts)


def joined(
    parts: Sequence[tuple[tuple[int, ...], Completion]],
) -> tuple[Completion, NDArray[np.bool_]]:
    """All turns in one completion, and (T,) which tokens were sampled.

    Injected tokens have the version of the token after them, or if that turn is empty of the one before."""
    ids: list[NDArray[Any]] = []
    logprobs: list[NDArray[Any]] = []
    versions: list[NDArray[Any]] = []
    for injected, completion in parts:
        before = [v[-1:] for v in versions if len(v)][-1:]
        version = next((v for v in (completion.versions[:1], *before) if len(v)), np.zeros(1, np.int32))
        ids += np.asarray(injected, np.int32), completion.token_ids
        logprobs += np.zeros(len(injected), np.float32), completion.logprobs_gen
        versions += np.repeat(version, len(injected)), completion.versions
    sampled = np.concatenate([np.full(len(part), i % 2 == 1) for i, part in enumerate(ids)])
    whole = replace(
        parts[-1][1],
        token_ids=np.concatenate(ids),
        logprobs_gen=np.concatenate(logprobs),
        versions=np.concatenate(versions),
    )
    return whole, sampled
