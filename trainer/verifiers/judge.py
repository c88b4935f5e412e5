"""The judge: a reward model's or a language model's score of a completion, which may be any real number.

It is the one scorer that uses the network. It is called from the controller's event loop, never from a
verifier worker, which has no network.
"""

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from trainer.config import ConfigError, JudgeConfig
from trainer.types import Prompt, Verdict
from trainer.verifiers import judge_model
from trainer.verifiers.http_client import Cache, NoScoreError, ServerFailedError
from trainer.verifiers.judge_server import Request, Server

CACHED = 65_536  # scores kept; the least recently used is dropped
MAX_STARTUP_FAILURES = 50  # if none of the first 50 completions gets a score, the judge itself is wrong
GRADE = """Question:\n{question}\n\nReference answer:\n{answer}\n\nAnswer to grade:\n{completion}\n
Is the answer to grade correct? Reply with one number from 0 (wrong) to 1 (correct) and nothing else."""


class Judge:
    """Judge for one event loop; close it. ConfigError if its settings are wrong."""

    def __init__(self, config: JudgeConfig, note: Callable[[str], None]) -> None:
        self._template = config.template or (GRADE if config.url and config.api == "chat" else "")
        try:
            self._template.format(question="", answer="", completion="")
        except (LookupError, ValueError) as e:
            raise ConfigError(
                f"verifier.judge.template: {type(e).__name__}: {e}; expected {{question}}, {{answer}} and "
                "{completion} only; write a literal brace twice"
            ) from e
        self._threshold, self._note = config.threshold, note
        self._backend = Server(config) if config.url else Model(config)
        self._cached: Cache[float] = Cache(self._backend.score, CACHED)
        self._failures, self._scored = 0, False
        self.close = self._backend.close

    async def score(self, prompt: Prompt, completion: str) -> Verdict:
        """The score, and whether it reaches the threshold; without a score: 0, `unparsable`."""
        completion = completion.encode(errors="replace").decode()  # half a surrogate pair cannot be sent
        request: Request = [
            {"role": "user", "content": prompt.text}, {"role": "assistant", "content": completion}
        ]  # fmt: skip
        if self._template:
            request = self._template.format(question=prompt.text, answer=prompt.answer, completion=completion)
        try:
            if not math.isfinite(value := await self._cached(request)):
                raise NoScoreError(f"its score is {value}")
            if self._template is GRADE and not 0 <= value <= 1:
                raise NoScoreError(f"its grade is {value}, which is not from 0 to 1")
        except NoScoreError as e:
            self._failures += 1
            if self._failures == 1:
                self._note(f"the judge gave no score: {e}; it counts as 0 (further ones are not reported)")
            if self._failures >= MAX_STARTUP_FAILURES and not self._scored:
                raise ServerFailedError(f"the judge scored none of {self._failures} completions: {e}") from e
            return Verdict(0.0, "unparsable")
        self._scored = True
        return Verdict(value, "correct" if value >= self._threshold else "wrong")


class Model:
    """A reward model in a process of its own; it gets all completions that wait in one go."""

    def __init__(self, config: JudgeConfig) -> None:
        kind, _, gpu = config.device.partition(":")
        if config.device != "cpu" and not (kind == "cuda" and gpu):
            raise ConfigError(f"verifier.judge.device {config.device!r}: expected cpu or cuda:N")
        self._pool = ProcessPoolExecutor(1, get_context("spawn"))
        self._turn, self._waiting = asyncio.Lock(), list[tuple[Request, asyncio.Future[float | None]]]()
        try:
            self._pool.submit(judge_model.load, config.path, kind, gpu).result()
        except Exception as e:  # of many kinds; its text is the user's clue
            self.close()
            raise ConfigError(f"verifier.judge.path {config.path}: {_text(e)}") from e

    async def score(self, request: Request) -> float:
        """The model's output."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[float | None] = loop.create_future()
        self._waiting.append((request, future))
        async with self._turn:
            if batch := self._waiting:  # else the one before has taken this request along
                self._waiting = []
                requests = [request for request, _ in batch]
                try:
                    scores = await loop.run_in_executor(self._pool, judge_model.scores, requests)
                except Exception as e:  # of many kinds, such as a GPU out of memory
                    raise ServerFailedError(f"the judge's process failed: {_text(e)}") from e
                for (_, waits), score in zip(batch, scores, strict=True):
                    waits.set_result(score)
        if (value := await future) is None:
            raise NoScoreError("the conversation is longer than the judge's model allows")
        return value

    def close(self) -> None:
        """End the process."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
