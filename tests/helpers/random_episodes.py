"""Random episodes with an engine, and their tokens, masks and log-probs worked out from scratch.

The environments and a spy before the engine write down who said what, in order; what the chat templates put
around it is written by hand here.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chat_templates import CHATML, FORGETS, INST, LLAMA, tokenizer
from fakes import having
from transformers import DynamicCache

from trainer.config import Config, EnvironmentConfig, InterruptionConfig
from trainer.controller.context import RolloutContext
from trainer.controller.data import Reader, load_prompts
from trainer.controller.deadline import Deadline
from trainer.controller.process import decoder
from trainer.controller.rollout import rollout_group
from trainer.controller.sampler import IssuedPrompt
from trainer.environments.pool import EnvironmentFailure, Step
from trainer.types import Completion, Group, Prompt, Request, Rollout

LETTERS = "aeinorst"  # the tokenizer joins two of them
VOCABULARY = len(tokenizer("", LETTERS))
EPISODES = 10  # of a prompt
PUSH_EVERY = 23  # calls of the environments
OPEN_GROUPS = 3


@dataclass(frozen=True)
class Way:
    """One way to write conversations: a chat template, and its text by hand."""

    template: str
    message: Callable[[str, str], str]
    head: Callable[[list[Any]], str] = lambda tools: "<s>"
    begin: str = ""  # of the model's turn
    end: str = "<|im_end|>"  # of the model's turn


def _tools(tools: list[Any]) -> str:
    return f"<|im_start|>tools {json.dumps(tools)}<|im_end|>\n" if tools else ""


def _chatml(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


WAYS = {
    "chatml": Way(CHATML, _chatml, _tools, "<|im_start|>assistant\n", "<|im_end|>\n"),
    "forgets": Way(FORGETS, _chatml, lambda tools: "", "<|im_start|>assistant\n", "<|im_end|>\n"),
    "llama": Way(
        LLAMA,
        lambda role, text: f"<|head|>{role}<|/head|>\n\n{text.strip()}<|im_end|>",
        begin="<|head|>assistant<|/head|>\n\n",
    ),
    "inst": Way(INST, lambda role, text: f"[INST] {text} [/INST]"),
    "text": Way("", lambda role, text: text, lambda tools: "", end=""),
}


@dataclass
class Story:
    """An episode's environment, and a record of all that its two sides said, in order."""

    rng: np.random.Generator
    with_tools: bool
    before_step: Callable[[], Awaitable[None]]
    seconds: float = 0.0
    said: list[Step | tuple[Request, Completion]] = field(default_factory=list)

    async def start(self, row: dict[str, Any]) -> Step:
        schemas = [{"type": "function", "function": {"name": text}} for text in self._texts(2)]
        return self._say(Step(self._messages(2), tools=tuple(schemas * self.with_tools)))

    async def step(self, message: dict[str, Any]) -> Step:
        await self.before_step()
        if self.rng.random() < 0.03:
            raise EnvironmentFailure("it fails")
        reward = None if self.rng.random() < 0.5 else float(self.rng.normal())
        return self._say(Step(self._messages(3), reward, bool(self.rng.random() < 0.1)))

    def _say(self, step: Step) -> Step:
        self.said.append(step)
        return step

    def _messages(self, most: int) -> tuple[dict[str, Any], ...]:
        roles = self.rng.choice(["user", "tool", "system"], 3).tolist()
        return tuple({"role": r, "content": x} for r, x in zip(roles, self._texts(most), strict=False))

    def _texts(self, most: int) -> list[str]:
        alphabet = [*LETTERS, *"xyz01 .\n"]
        lengths = self.rng.integers(0, 15, self.rng.integers(0, most + 1))
        return ["".join(self.rng.choice(alphabet, n)) for n in lengths]


@dataclass
class Spy:
    """An engine that also writes down all turns in the episodes' stories."""

    engine: Any
    stories: dict[str, Story] = field(default_factory=dict)  # by the request's name up to its turn

    async def stream(self, request: Request) -> AsyncIterator[list[Completion]]:
        async for ended in self.engine.stream(request):
            name = ".".join(request.request_id.split(".")[:2])
            self.stories[name].said += [(request, completion) for completion in ended]
            yield ended

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


@dataclass
class Pool:
    """Hands out the stories of a group in turn."""

    stories: Iterator[Story]

    @asynccontextmanager
    async def episode(self, evaluation: bool = False) -> AsyncIterator[Story]:
        yield next(self.stories)


@dataclass(frozen=True)
class Played:
    """An episode as the controller has it, and as it went."""

    way: Way
    ctx: RolloutContext
    prompt: Prompt
    story: Story
    rollout: Rollout

    @property
    def turns(self) -> list[tuple[Request, Completion]]:
        """The model's."""
        return [said for said in self.story.said if isinstance(said, tuple)]


async def play_all(
    engine: Any, groups: int, folder: Path, push: Callable[[], Awaitable[None]]
) -> list[Played]:
    """Play random episodes of so many prompts, several at once; weights are pushed meanwhile."""
    spy, calls, room = Spy(engine), 0, asyncio.Semaphore(OPEN_GROUPS)

    async def before_step() -> None:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0)
        if calls % PUSH_EVERY == 0:
            await push()

    async def one(number: int) -> list[Played]:
        async with room:
            name = list(WAYS)[number % len(WAYS)]
            ctx, prompt = _random_group(number, name, folder, spy)
            stories = [
                Story(np.random.default_rng([number, i]), name == "chatml", before_step)
                for i in range(EPISODES)
            ]
            spy.stories |= {f"g{number}.{i}": story for i, story in enumerate(stories)}
            pools: Any = {"": Pool(iter(stories))}
            ctx = replace(ctx, environments=pools)
            group: Group = await rollout_group(ctx, IssuedPrompt(number, 1, prompt, 0))
            ended = zip(stories, group.rollouts, strict=True)
            return [Played(WAYS[name], ctx, prompt, *parts) for parts in ended]

    return [x for played in await asyncio.gather(*map(one, range(groups))) for x in played]


def _random_group(number: int, name: str, folder: Path, engine: Any) -> tuple[RolloutContext, Prompt]:
    """Everything that the controller needs for a prompt, with random settings."""
    rng, fast = np.random.default_rng(number), tokenizer(WAYS[name].template, LETTERS)
    question: Any = f"question {number}"
    if rng.random() < 0.3 and name != "text":
        roles = {"system": "be good", "user": f"so {number}"}
        question = [{"role": role, "content": text} for role, text in roles.items()]
    source = folder / f"{number}.jsonl"
    source.write_text(json.dumps({"question": question}) + "\n")
    lowest = int(rng.integers(60, 300))
    interruption = InterruptionConfig(
        enabled=bool(rng.random() < 0.4), phrase="so:\n", lo=lowest, hi=lowest + 40, answer_tokens=9,
        end_marker="a" * int(rng.integers(2)),
    )  # fmt: skip
    turns, tokens = int(rng.integers(1, 9)), int(rng.integers(0, 2) * rng.integers(5, 25))
    config = having(
        Config(environment=EnvironmentConfig(kind="fakes:Fake", max_turns=turns, turn_tokens=tokens)),
        pipeline={"completions_per_prompt": EPISODES},
        engine={
            "max_new_tokens": int(rng.integers(150, 500)), "interruption": interruption,
            "temperature": float(rng.choice([1.0, 0.7])),
        },
        data={"source": str(source), "chat": name != "text", "held_out": 0},
    )  # fmt: skip
    (prompt,) = load_prompts(Reader(config.data, fast, environment=True)).train
    encode = partial(fast.encode, add_special_tokens=False)
    stops = frozenset({fast.eos_token_id, *map(int, rng.choice(len(fast), int(rng.integers(0, 8))))})
    phrase = tuple(encode(interruption.phrase))
    deadline = Deadline(600.0)
    ctx = RolloutContext(config, engine, {}, decoder(fast), stops, phrase, deadline)
    return replace(ctx, encode=encode, tokenizer=fast), prompt


def by_hand(one: Played) -> tuple[list[int], list[bool]]:
    """The episode's tokens, and which of them the engine sampled."""
    ids: list[int] = []
    sampled: list[bool] = []
    before: Step | tuple[Request, Completion] | None = None
    for said in one.story.said:
        if isinstance(said, tuple):
            request, completion = said
            injected = _phrase(one, before[1]) if isinstance(before, tuple) else _said(one, before, ids)
            ids, sampled = ids + injected, sampled + [False] * len(injected)
            assert request.prompt_ids == tuple(ids)
            turn = completion.token_ids.tolist()
            ids, sampled = ids + turn, sampled + [True] * len(turn)
        before = said
    return ids, sampled


def _said(one: Played, step: Step | None, ids: list[int]) -> list[int]:
    """The tokens of what the environment said behind these."""
    assert step is not None
    way, encode, question = one.way, one.ctx.encode, one.prompt.metadata["question"]
    text = "".join(way.message(m["role"], m["content"]) for m in step.messages) + way.begin
    if ids:
        ended = ids[-1] == one.ctx.tokenizer.eos_token_id  # the model said so
        return list(encode(way.end.removeprefix("<|im_end|>" * ended) + text))
    if not way.template:  # what follows does not join the question's tokens
        return [*encode(question), *encode(text)]
    turns = question if isinstance(question, list) else [{"role": "user", "content": question}]
    conversation = "".join(way.message(m["role"], m["content"]) for m in turns)
    return list(encode(way.head(list(step.tools)) + conversation + text))


def _phrase(one: Played, thinking: Completion) -> list[int]:
    """The tokens of an interruption: the environment was not asked."""
    assert thinking.finish_reason == "length"
    marker = one.ctx.config.engine.interruption.end_marker
    (text,) = one.ctx.decode([thinking.token_ids.tolist()])
    return [] if marker and marker in text else list(one.ctx.phrase_ids)


@torch.no_grad()
def recomputed(one: Played, models: Callable[[int], Any], block: int) -> np.ndarray:
    """(P + T,) log-probs of all tokens by transformers. `models`: by version. Tokens keep the keys and values
    of the weights that they were fed to; a next turn feeds those behind the last whole block again, whose
    log-probs stay those of their first time."""
    feeds: list[tuple[int, int, int]] = []  # first token, end, version
    for request, completion in one.turns:
        start, length = len(request.prompt_ids), len(completion.token_ids)
        assert bool(request.continues) == bool(feeds)
        first = feeds[-1][1] // block * block if feeds else 0
        changes = np.flatnonzero(np.diff(completion.versions)) + 1
        for begin, end in zip([0, *changes], [*changes, length], strict=True):
            version = int(completion.versions[begin])
            if feeds and feeds[-1][1:] == (first, version):
                first = feeds.pop()[0]
            feeds.append((first, start + int(end) - 1, version))
            first = feeds[-1][1]
    known = 0
    ids = torch.tensor([[*one.turns[-1][0].prompt_ids, *one.turns[-1][1].token_ids.tolist()]])
    logprobs, cache = torch.zeros(ids.shape[1], dtype=torch.float64), DynamicCache()
    for first, end, version in feeds:
        if seen := cache.get_seq_length() - first:
            cache.crop(-seen)
        logits = models(version)(ids[:, first:end], past_key_values=cache, use_cache=True).logits[0]
        scores = (logits / one.ctx.config.engine.temperature).log_softmax(-1)
        scored = scores.gather(1, ids[0, first + 1 : end + 1, None])[:, 0]
        begin = max(first, known)
        logprobs[begin + 1 : end + 1] = scored[begin - first :]
        known = end
    return logprobs.numpy()
