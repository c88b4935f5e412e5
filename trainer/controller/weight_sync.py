"""Weight sync: brings new weights to the engines, in the way that engine.weight_push names.

`file`         the learner writes each version to a file and may go on; the engines load the newest file.
`nccl`, `ipc`  the learner sends the weights it has at that moment, while the engines are paused, so it takes
               no further step until the engines hold them. While they keep a version for an evaluation, it
               goes on, and they get its newest afterwards; but it waits at one that is to be evaluated.

With engine.colocate, learner and engines share GPUs and take turns: the engines sleep while the learner
steps (and sends the new weights by `ipc`), scores or saves. In this mode no step begins during an evaluation.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path

from trainer.config import EngineConfig
from trainer.controller.deadline import Deadline
from trainer.controller.learner_client import LearnerClient
from trainer.engines.pool import EnginePool
from trainer.messages import StepDone


class WeightSync:
    """Knows which version the engines hold, and pauses them when the learner needs that."""

    def __init__(
        self,
        config: EngineConfig,
        engine: EnginePool,
        learner: LearnerClient,
        deadline: Deadline,
        must_push: Callable[[int], bool],  # whether this version may not be skipped
    ) -> None:
        self._must_push = must_push
        self._config, self._engine, self._learner, self._deadline = config, engine, learner, deadline
        self.published: asyncio.Queue[StepDone] = asyncio.Queue()  # done when pushed, and evaluated if due
        self.push_s = 0.0  # seconds of the latest push, until every engine held the weights
        self._version = -1  # held by the engines
        self._file = ""  # of the weights they hold; it stays, since a restarted engine loads it
        self._synced = asyncio.Event()  # cleared: the learner must not change its weights
        self._synced.set()
        self._kept = False  # the engines must not get other weights
        self._learner_turn = asyncio.Lock()
        self._pause_lock = asyncio.Lock()
        self._paused = False

    async def push(self, version: int, path: str = "") -> None:
        """Return once every engine holds `version`: from the file at `path` (empty: unchanged), or from the
        learner, which must be at that version."""
        if not self._config.direct_push:
            # Engines that sleep cannot load: a checkpoint may follow its step at once.
            async with self._pause_lock if self._config.colocate else nullcontext():
                await self._update(version, path)
        elif self._version != version:
            async with self._engines_paused():
                await self._update(version, send=True)
        self._synced.set()

    async def before_step(self) -> None:
        """Return once the learner may change its weights."""
        if self._config.colocate:
            await self.published.join()
        await self._synced.wait()

    def learner_turn(self, more: bool = False) -> AbstractAsyncContextManager[None]:
        """The context of a call to the learner; engines that share its GPUs sleep inside, and go on sleeping
        if `more` such calls follow before the engines are needed."""
        return self._engines_paused(more) if self._config.colocate else self._learner_turn

    @contextmanager
    def hold_version(self) -> Iterator[None]:
        """The engines keep their version in this block; the learner may go on as long as it has batches."""
        self._kept = True
        try:
            yield
        finally:
            self._kept = False

    async def publish(self, step: StepDone) -> None:
        """Queue a step's weights for `push_newest`. Call it within the step's `learner_turn`."""
        if self._config.weight_push == "ipc":  # the engines are asleep already
            await self._update(step.version, send=True)
        if self._config.direct_push and not (self._kept and not self._must_push(step.version)):
            self._synced.clear()
        self.published.put_nowait(step)

    async def push_newest(self) -> tuple[int, int]:
        """Push the newest published step, without skipping a version that must be pushed. Returns the version
        and the number of steps taken from `published`."""
        steps = [await self.published.get()]
        # By NCCL the learner sends what it has, so a step that is under way ends first.
        async with self._learner_turn if self._config.weight_push == "nccl" else nullcontext():
            while not self._must_push(steps[-1].version) and not self.published.empty():
                steps.append(self.published.get_nowait())
            for step in [s for s in steps if not s.written]:
                wait = self._learner.written(step.weights_path)
                await self._deadline.wait_for(wait, f"learner: write the weights of version {step.version}")
            files = [s.weights_path for s in steps if s.weights_path]  # a step without gradient writes none
            await self.push(steps[-1].version, files[-1] if files else "")
        if files:
            for stale in filter(None, (self._file, *files[:-1])):
                Path(stale).unlink(missing_ok=True)
            self._file = files[-1]
        return steps[-1].version, len(steps)

    async def _update(self, version: int, path: str = "", send: bool = False) -> None:
        """Bring the engines to `version`: by a file, or (`send`) by the learner."""
        began = time.monotonic()
        if send:
            await self._learner.push(self._engine.transfer, self._deadline)
        update = self._engine.update_weights(version, path)
        await self._deadline.wait_for(update, f"engines: weight push of version {version}")
        self._version, self.push_s = version, time.monotonic() - began

    @asynccontextmanager
    async def _engines_paused(self, more: bool = False) -> AsyncIterator[None]:
        async with self._pause_lock:
            if not self._paused:
                await self._engine.pause()
            self._paused = False  # if the block fails, they are resumed
            try:
                yield
                self._paused = more
            finally:
                if not self._paused:
                    self._engine.resume()
