"""The verifier pool: judges completions in worker processes or sandboxes, called from asyncio.

Every item gets a verdict. What judges one that exceeds the time limit is killed (`timeout`), and one that
dies is replaced (`crash`). A worker has one item at a time, so no other item is lost with it.
"""

import asyncio
import logging
from typing import Any

from trainer.config import ConfigError, VerifierConfig
from trainer.types import Prompt, Verdict
from trainer.verifiers.verifier import Note, Scorer, find
from trainer.verifiers.workers import Workers

MAX_STARTUP_CRASHES = 50  # if the first 50 verdicts are all crashes, the scorer itself is wrong
log = logging.getLogger(__name__)


class VerifierPool:
    """Scorer for one event loop; close it. ConfigError if the kind is unknown or cannot be started."""

    def __init__(self, config: VerifierConfig, warn: Note = log.warning) -> None:
        self._config, self._report, self._verifier = config, warn, find(config.kind)
        self._free = asyncio.Semaphore(config.workers)
        self._crashes, self._first_crash, self._works = 0, "", False
        self._workers = Workers(self._verifier, config, warn) if self._verifier.needs_worker else None
        self._judge = self._workers.judge if self._workers else self._verifier.start(config)

    async def score(self, prompt: Prompt, completion: str) -> Verdict:
        """The verdict: at once if comparing text settles it, else at most the time limit after a worker or a
        sandbox is free."""
        item = completion, prompt.answer, prompt.metadata
        if verdict := self._verifier.quick(*item):
            return verdict
        assert self._judge is not None
        async with self._free:
            try:
                async with asyncio.timeout(self._config.timeout_s):
                    verdict = await self._judge(*item)
            except TimeoutError:
                verdict = Verdict(0.0, "timeout")
            except OSError as e:
                self._count_crash(str(e))
                return Verdict(0.0, "crash")
        self._works = True
        return verdict

    def close(self) -> None:
        """End the workers."""
        if self._workers is not None:
            self._workers.close()

    def _count_crash(self, detail: str) -> None:
        """Report the first crash only: the metrics count all. ConfigError if the scorer has only crashed."""
        self._crashes += 1
        self._first_crash = self._first_crash or detail
        if self._crashes == 1:
            self._report(f"verifier {self._config.kind}: {detail} (further crashes are only counted)")
        if self._crashes >= MAX_STARTUP_CRASHES and not self._works:
            raise ConfigError(
                f"verifier.kind {self._config.kind}: each of its first {MAX_STARTUP_CRASHES} verdicts was a "
                f"crash, the first by {self._first_crash}; expected a score from 0 to 1: correct the function"
            )


def open_scorer(settings: VerifierConfig, note: Note, shared: dict[Any, Scorer]) -> Scorer:
    """The scorer of the settings' kind, started; `shared` keeps those that several tasks use."""
    return find(settings.kind).open(settings, note, shared) or VerifierPool(settings, note)
