"""The learner as the controller sees it: one request at a time over its pipe."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from trainer.config import ConfigError
from trainer.engines.pool import Within
from trainer.messages import (
    Push,
    Pushed,
    Ready,
    Refused,
    Save,
    Saved,
    Score,
    Scored,
    Shutdown,
    StepDone,
    Transfer,
    Transferred,
)
from trainer.types import TrainBatch, TrainSequence

R = TypeVar("R")
PUSHING = "learner: weight push to the engines (engine.weight_push file does it another way)"


class LearnerClient:
    """Asks the learner process for steps, scores and checkpoints. ConnectionError once it is dead."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        self._replies: asyncio.Queue[Any] = asyncio.Queue()
        self._owes = False  # an answer, that nobody may wait for any more
        self._turn = asyncio.Lock()
        asyncio.get_running_loop().add_reader(conn.fileno(), self._receive)

    async def ready(self) -> dict[str, Any]:
        """What the learner says of itself once it can take work."""
        return _of(await self._replies.get(), Ready).info

    async def train(self, batch: TrainBatch) -> StepDone:
        """One optimizer step."""
        return await self._ask(batch, StepDone)

    async def push(self, transfer: Callable[[str, dict[str, Any]], Awaitable[None]], within: Within) -> None:
        """Let it bring its weights to the engines; `transfer` makes at them the calls that it asks for, and
        has deadlines of its own."""
        async with self._turn:
            self._check()
            message: object = Push()
            self._owes = True  # until all is done, whatever fails on the way
            while not isinstance(answer := await within(self._exchange(message), PUSHING), Pushed):
                call = _of(answer, Transfer)
                await transfer(call.call, call.info)
                message = Transferred()
            self._owes = False

    async def score(self, sequences: Sequence[TrainSequence]) -> tuple[NDArray[np.float32], ...]:
        """Log-probs of the sequences' tokens under the learner's present weights."""
        return (await self._ask(Score(tuple(sequences)), Scored)).logprobs

    async def save(self, path: str, controller_state: dict[str, Any]) -> None:
        """Write a checkpoint folder."""
        await self._ask(Save(path, controller_state), Saved)

    def close(self) -> None:
        """Ask the process to end."""
        asyncio.get_running_loop().remove_reader(self._conn.fileno())
        try:
            self._conn.send(Shutdown())
        except OSError:
            return  # it is gone already

    async def _ask(self, message: object, reply: type[R]) -> R:
        async with self._turn:
            self._check()
            self._owes = True
            answer = await self._exchange(message)
            self._owes = False
            return _of(answer, reply)

    def _check(self) -> None:
        if self._owes:
            raise ConnectionError("the learner has not answered what it was asked before")

    async def _exchange(self, message: object) -> Any:
        try:
            self._conn.send(message)
        except OSError as e:
            raise ConnectionError("the learner's process has died") from e
        return await self._replies.get()

    def _receive(self) -> None:
        try:
            self._replies.put_nowait(self._conn.recv())
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self._conn.fileno())
            self._replies.put_nowait(ConnectionError("the learner's process has died"))


def _of(reply: object, kind: type[R]) -> R:
    if isinstance(reply, Exception):
        raise reply
    if isinstance(reply, Refused):
        raise ConfigError(reply.message)
    if not isinstance(reply, kind):
        raise RuntimeError(f"the learner answered {type(reply).__name__} where {kind.__name__} was expected")
    return reply
