"""A completion of several turns: the model's, and between them tokens that it did not sample.

    request ──> the model's turn ──respond──> injected tokens ──request that continues──> ... ──> completion

Forced interruption and environments are ways to respond. Token in, token out: each request's prompt is the
exact sequence so far, so its keys and values are still there. The turns of an episode are in the journal, and
a resumed run plays those again that are there.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.controller.context import RolloutContext
from trainer.types import Completion, FinishReason, Request, Rollout


@dataclass(frozen=True, slots=True)
class Turn:
    """The next turn: tokens that were not sampled, and then at most so many of the model."""

    injected: tuple[int, ...]
    max_tokens: int
    goes_on: tuple[FinishReason, ...] = ()  # ends after which a further turn may follow


Respond = Callable[[Completion], Awaitable[Turn | None]]
Part = tuple[tuple[int, ...], Completion]  # a turn of the model, after the tokens that were injected before


@dataclass(slots=True)
class Past:
    """An episode as the journal has it: its turns, and once it has ended the rollout."""

    parts: list[Part] = field(default_factory=list)
    rollout: Rollout | None = None

    def keep(self, usable: Callable[[NDArray[np.int32]], bool]) -> "Past":
        """The episode up to its first turn whose versions are not usable."""
        parts = list(takewhile(lambda part: usable(part[1].versions), self.parts))
        return self if len(parts) == len(self.parts) else Past(parts)


@dataclass(slots=True)
class Tape:
    """Plays the recorded turns of an episode again, and records further ones; by default there is none."""

    past: Past = field(default_factory=Past)
    record: Callable[[int, Part], None] = lambda number, part: None
    end: Callable[[Rollout], None] = lambda rollout: None
    differs: Callable[[], None] = lambda: None  # what is injected is not what it was

    def play(self, number: int, injected: tuple[int, ...]) -> Completion | None:
        """The recorded turn of this number; None, also for all later ones, if it followed other tokens."""
        recorded = self.past.parts[number:]
        if recorded and recorded[0][0] != injected:
            del self.past.parts[number:]
            self.differs()
            return None
        return recorded[0][1] if recorded else None


async def generate(
    ctx: RolloutContext, request: Request, first: Turn, respond: Respond, tape: Tape | None = None
) -> tuple[Completion, NDArray[np.bool_]]:
    """One completion of the request's prompt, and (T,) which of its tokens were sampled.

    `respond` gets each turn of the model and returns what follows it, or None. Turn t has the seed
    `request.seed + t`, unless the `tape` has it."""
    parts: list[Part] = []
    tape = tape or Tape()
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
        completion = tape.play(number, turn.injected)
        if completion is None:
            ((completion,),) = [ended async for ended in ctx.engine.stream(request)]
            tape.record(number, (turn.injected, completion))
        ctx.deadline.restart()
        parts.append((turn.injected, completion))
        turn = await respond(completion)
        continued = request.request_id if completion.finish_reason in request.keep_kv else ""
        if turn is None and continued:
            ctx.engine.release(continued)
        begin, ids = len(request.prompt_ids), completion.token_ids.tolist()
        request = replace(
            request, prompt_ids=(*request.prompt_ids, *ids), seed=request.seed + 1, continues=continued,
            turns=(*request.turns, begin, begin + len(ids)) if continued else (),
            experts_from=begin + len(ids) - 1 if request.experts_from >= 0 else -1,
        )  # fmt: skip
    if len(tape.past.parts) > len(parts):  # the environment has ended the episode earlier
        tape.differs()
    return joined(parts)


def joined(parts: Sequence[Part]) -> tuple[Completion, NDArray[np.bool_]]:
    """All turns in one completion, and (T,) which tokens were sampled; an empty one without turns.

    Injected tokens have the version of the token after them, or if that turn is empty of the one before.
    A token's experts are those of the pass that read it first: the one whose keys and values are kept."""
    if not parts:
        none = np.zeros(0, np.int32)
        return Completion("", 0, none, np.zeros(0, np.float32), none, "abort"), np.zeros(0, np.bool_)
    rows: list[tuple[NDArray[Any], ...]] = []
    last = np.zeros(1, np.int32)
    for injected, completion in parts:
        versions, n = completion.versions, len(injected)
        if n:
            version = versions[:1] if len(versions) else last
            unsampled = np.zeros(n, np.float32), version.repeat(n), np.zeros(n, np.bool_)
            rows.append((np.array(injected, np.int32), *unsampled))
        sampled = np.ones(len(versions), np.bool_)
        rows.append((completion.token_ids, completion.logprobs_gen, versions, sampled))
        last = versions[-1:] if len(versions) else last
    ids, logprobs, versions, sampled = map(np.concatenate, zip(*rows, strict=True))
    recorded = [one.experts for _, one in parts if one.experts is not None]
    experts = np.concatenate(recorded) if len(recorded) == len(parts) else None
    whole = replace(completion, token_ids=ids, logprobs_gen=logprobs, versions=versions, experts=experts)
    return whole, sampled
