"""One episode: the model and an environment take turns until one of them, or a limit, ends it.

The reward is the sum of the turns' rewards. An episode whose environment fails, or that got no reward at all,
is dropped from loss and baseline (outcome `error` or `unscored`). With forced interruption the budget of
thinking is that of the whole episode: in the turn that reaches it, the phrase lets the model answer.
"""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from trainer.config import SetConfig, TaskConfig
from trainer.controller.context import RolloutContext
from trainer.controller.conversation import Turn as Message
from trainer.controller.conversation import chat_turns, wrapped
from trainer.controller.rewards import penalised
from trainer.controller.turns import Tape, Turn, generate, joined
from trainer.environments.pool import EnvironmentFailure, Episode, Step
from trainer.environments.rendering import ChatRendering, Rendering, TextRendering
from trainer.types import Completion, FinishReason, Outcome, Prompt, Request, Rollout

SEEDS = 1 << 16  # of one episode: one a turn


async def play(
    ctx: RolloutContext, prompt: Prompt, request: Request, index: int, budget: int, tape: Tape
) -> Rollout:
    """An episode of the prompt with at most `budget` tokens, before an interruption.

    One that the tape has is not played again; of one that was open when the run was killed, the environment
    begins anew, and hears the recorded turns."""
    if tape.past.rollout is not None:
        return tape.past.rollout
    task = ctx.config.scored[prompt.task]
    request = replace(request, request_id=f"{request.request_id}.{index}", n=1)
    request = replace(request, seed=(request.seed * 65_537 + index) * SEEDS)
    async with AsyncExitStack() as stack:
        with ctx.engine.waiting("", "evaluate" if request.evaluation else "tools"):  # for a free process
            pool = ctx.environments[prompt.task]
            environment = await stack.enter_async_context(pool.episode(request.evaluation))
        one = _Episode(ctx, task, environment, rendering_of(ctx, prompt, task), budget, request.evaluation)
        first = await one.begin(prompt)
        completion, sampled = await generate(ctx, request, first, one.respond, tape) if first else joined([])
    (text,) = ctx.decode([completion.token_ids.tolist()])
    outcome: Outcome = "correct" if (one.reward or 0.0) >= task.environment.threshold else "wrong"
    outcome = "error" if one.error else "unscored" if one.reward is None else outcome
    tokens, penalty = int(sampled.sum()), task.verifier.length_penalty
    penalty_score = penalised(tokens, outcome, penalty)
    rollout = Rollout(
        token_ids=completion.token_ids,
        logprobs_gen=completion.logprobs_gen,
        versions=completion.versions,
        sampled=sampled,
        text=text,
        reward=(one.reward or 0.0) + sum(penalty_score.values()),
        outcome=outcome,
        truncated=one.truncated,
        interrupted=one.interrupted,
        scores={"environment": one.reward or 0.0} | penalty_score if penalty_score else {},
        episode={
            "turns": one.messages, "count": one.turns, "tool_calls": one.tool_calls,
            "seconds": environment.seconds, "error": one.error,
        },
        experts=completion.experts,
    )  # fmt: skip
    tape.end(rollout)
    return rollout


def rendering_of(ctx: RolloutContext, prompt: Prompt, task: TaskConfig | SetConfig) -> Rendering:
    """The way to write this prompt's episodes as tokens: by the chat template if it is a conversation."""
    turns = chat_turns(prompt.metadata, prompt.text, task.data)
    if not turns:
        return TextRendering(ctx.encode)

    def template(messages: list[Message], tools: list[Any]) -> str:
        return wrapped(ctx.tokenizer, messages, task.data, tools)

    return ChatRendering(template, ctx.encode, turns, prompt.token_ids)


@dataclass(slots=True)
class _Episode:
    """The state of an episode between its turns."""

    ctx: RolloutContext
    task: TaskConfig | SetConfig
    environment: Episode
    rendering: Rendering
    budget: int
    evaluation: bool
    request_id: str = ""  # of the model's newest turn
    messages: list[Message] = field(default_factory=list)  # of both sides, for people
    reward: float | None = None  # so far
    used: int = 0  # tokens, also those that were injected
    turns: int = 0  # of the model
    tool_calls: int = 0
    pending: list[int] = field(default_factory=list)  # ids of the model's present turn
    forced: bool = False  # to answer
    interrupted: bool = False
    truncated: bool = False
    error: str = ""

    async def begin(self, prompt: Prompt) -> Turn | None:
        """Start the environment; returns the first turn, or None if there is none."""
        start = await self._ask(self.environment.start(prompt.metadata))
        return self._turn(lambda: self.rendering.first(start), start) if start else None

    async def respond(self, completion: Completion) -> Turn | None:
        """Give the environment a turn of the model; returns the next one, or None at the end."""
        interruption, settings = self.ctx.config.engine.interruption, self.task.environment
        self.request_id = completion.request_id
        self.pending += completion.token_ids.tolist()
        self.used += len(completion.token_ids)
        (text,) = self.ctx.decode([self.pending])
        spent = completion.finish_reason == "length" and self.used >= self.budget
        if spent and interruption.enabled and not self.forced:
            answering = bool(interruption.end_marker) and interruption.end_marker in text
            phrase = () if answering else self.ctx.phrase_ids
            self.pending += phrase
            self.forced, self.interrupted = True, bool(phrase)
            return Turn(phrase, interruption.answer_tokens)
        message = self.rendering.message(text)
        self.turns += 1
        self.tool_calls += len(message.get("tool_calls", ()))
        self.messages.append({**message, "content": text, "tokens": len(self.pending)})
        last = spent or self.forced or self.turns == settings.max_turns
        if (step := await self._ask(self.environment.step({**message, "last": last}))) is None:
            return None
        if step.reward is not None:
            self.reward = (self.reward or 0.0) + step.reward
            self.messages[-1]["reward"] = step.reward
        if step.done or last:
            self.truncated = spent and not step.done
            self.messages += step.messages
            return None
        pending, self.pending = self.pending, []
        return self._turn(lambda: self.rendering.more(pending, step.messages), step)

    def _turn(self, render: Callable[[], tuple[int, ...]], step: Step) -> Turn | None:
        self.messages += step.messages
        try:
            injected = render()
        except EnvironmentFailure as e:  # the chat template refuses
            self.error = str(e)
            return None
        self.used += len(injected)
        if (room := self.budget - self.used) <= 0:
            self.truncated = True
            if not self.turns:
                self.error = f"the first messages take {self.used} of the episode's {self.budget} tokens"
            return None
        settings, last = self.task.environment, self.turns + 1 == self.task.environment.max_turns
        goes_on: tuple[FinishReason, ...] = ("stop", "length")
        if last:  # but for an interruption
            goes_on = ("length",) if self.ctx.config.engine.interruption.enabled else ()
        return Turn(injected, min(room, settings.turn_tokens or room), goes_on)

    async def _ask(self, call: Awaitable[Step]) -> Step | None:
        """The environment's answer; None if it fails."""
        try:
            state = "evaluate" if self.evaluation else "tools"
            engines = self.ctx.engine.waiting(self.request_id, state)
            with self.ctx.deadline.verification(), engines:
                return await call
        except EnvironmentFailure as e:
            self.error = str(e)
            return None
