"""The controller's client of the learner: one request at a time over a pipe."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from trainer import messages
from trainer.config import ConfigError
from trainer.controller.deadline import Deadline
from trainer.pipes import RoleClient
from trainer.types import TokenScores, TrainBatch, TrainSequence

R = TypeVar("R")
PUSH = "learner: weight push to the engines (if this way fails here, set engine.weight_push file)"


class LearnerClient(RoleClient):
    """Asks the learner process for steps, scores and checkpoints."""

    def __init__(self, conn: Connection) -> None:
        super().__init__(conn, "the learner")
        self._written: defaultdict[str, asyncio.Future[str]] = defaultdict(asyncio.Future)  # by path
        self._unanswered = False
        self._turn = asyncio.Lock()

    async def ready(self) -> dict[str, Any]:
        """The learner's description of itself, once it can take work."""
        return _checked(await self._reply(), messages.Ready).info

    async def train(self, batch: TrainBatch) -> messages.StepDone:
        """One optimizer step."""
        return await self._ask(batch, messages.StepDone)

    async def written(self, path: str) -> None:
        """Return once the weights at this path are complete; ConfigError if they cannot be."""
        if self._dead is not None:
            raise self._dead
        problem = await self._written[path]
        del self._written[path]
        if problem:
            raise ConfigError(problem)

    async def push(
        self, transfer: Callable[[str, dict[str, Any]], Awaitable[None]], deadline: Deadline
    ) -> None:
        """Let the learner send its weights to the engines. `transfer` makes the engine calls that it asks
        for, under deadlines of its own."""
        async with self._request():
            message: object = messages.Push()
            while True:
                reply = await deadline.wait_for(self._exchange(message), PUSH)
                if isinstance(reply, messages.Ack):
                    return
                call = _checked(reply, messages.Transfer)
                await transfer(call.call, call.info)
                message = messages.Ack()

    async def score(self, sequences: Sequence[TrainSequence], logprobs: bool) -> tuple[TokenScores, ...]:
        """Scores by the learner's models under their present weights; by the policy only for `logprobs`."""
        return (await self._ask(messages.Score(tuple(sequences), logprobs), messages.Scored)).scores

    async def save(self, path: str, controller_state: dict[str, Any]) -> None:
        """Write a checkpoint folder."""
        await self._ask(messages.Save(path, controller_state), messages.Ack)

    async def _ask(self, message: object, kind: type[R]) -> R:
        async with self._request():
            reply = await self._exchange(message)
        return _checked(reply, kind)

    @asynccontextmanager
    async def _request(self) -> AsyncIterator[None]:
        """One at a time, and none after one that failed, since its reply may still come."""
        async with self._turn:
            if self._unanswered:
                raise ConnectionError("the learner has not answered the request before")
            self._unanswered = True
            yield
            self._unanswered = False

    async def _exchange(self, message: object) -> Any:
        self._send(message)
        return await self._reply()

    def _receive(self, message: Any) -> None:
        if isinstance(message, messages.Written):
            self._written[message.path].set_result(message.problem)
        else:
            super()._receive(message)

    def _fail(self, error: OSError) -> None:
        for file in [f for f in self._written.values() if not f.done()]:
            file.set_exception(error)


def _checked(reply: object, kind: type[R]) -> R:
    """The reply, which must be of this kind; a refusal is raised."""
    if isinstance(reply, messages.Refused):
        raise ConfigError(reply.message)
    if not isinstance(reply, kind):
        raise RuntimeError(f"the learner answered {type(reply).__name__}; expected {kind.__name__}")
    return reply
