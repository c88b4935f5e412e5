"""The loop that turns prompts into groups into batches, and new weights into the engine.

                 slots: (k+1)·P active groups
                       |
    sampler --issue--> [rollout] [rollout] [rollout] ...      tasks, one a group
                       |   ^ tokens of mixed versions
                       v   |
                    engine(s) <--- weights v ---+              "pusher": in flight, between two tokens
                       |                        |
                  verifier pool                 |
                       |                        |
            finished groups, by group id        |
                       |                        |
                       v                        |
              batch n = groups nP .. nP+P-1 ----+--> learner ---> weights n+1

`feed`    produces groups      waits for a slot            unblocked by the pusher
`train`   produces weights     waits for batch n's groups  unblocked by rollouts
`push`    frees P slots        waits for the engines       unblocked by train

Lag (PipelineRL-k). Batches take groups in the order they were issued. The first (k+1)·P groups start
at version 0; P more start each time the engines *hold* a further version v, so batch n is made of groups
that began at version n − k or later, and is trained on at version n: the lag is at most k by
construction, nothing is ever discarded, and k = 0 is strictly on-policy. The learner refuses a batch beyond.

Evaluation of version v happens while the engines hold v: the pusher keeps newer weights back until its
completions are in, training rollouts go on in the slots left over, and the lag bound paces the learner.

Weights that go from GPU to GPU (engine.weight_push) are those the learner has at that moment, so it makes no
further step before the engines hold them. On GPUs they share, one side is away while the other works: the
engines sleep for a step, its push and a checkpoint, and no step begins amid an evaluation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from trainer.config import Config
from trainer.controller.batch import build_batch
from trainer.controller.data import Dataset
from trainer.controller.evaluate import evaluate
from trainer.controller.journal import Journal
from trainer.controller.learner_client import LearnerClient
from trainer.controller.rollout import RolloutContext, rollout_group, sample_record
from trainer.controller.sampler import IssuedPrompt, Sampler
from trainer.messages import StepDone
from trainer.types import Group

T = TypeVar("T")
Emit = Callable[[str, dict[str, Any]], None]


class Controller:
    """Runs one training from `first_step` to the last; `emit(kind, data)` tells the launcher."""

    def __init__(
        self,
        ctx: RolloutContext,
        dataset: Dataset,
        sampler: Sampler,
        learner: LearnerClient,
        journal: Journal,
        emit: Emit,
    ) -> None:
        self.config: Config = ctx.config
        self.ctx, self.dataset, self.sampler = ctx, dataset, sampler
        self._within = ctx.progress.within
        self.learner, self.journal, self.emit = learner, journal, emit
        self.stop = asyncio.Event()  # set: stop after the optimizer step under way
        self.version = 0  # the learner's
        self._slots = asyncio.Semaphore(0)
        self._group_id = 0  # the first not yet trained on
        self._groups: asyncio.Queue[asyncio.Task[Group] | None] = (
            asyncio.Queue()
        )  # by group id; None: no more
        self._step: asyncio.Task[None] | None = None  # the optimizer step under way
        self._exhausted = False  # every prompt is solved
        self._stepped = False  # in this process
        self._tasks: set[asyncio.Task[Any]] = set()  # all that must end with the run
        self._weights: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
        self._newest = ""  # the file of the weights that the engines hold
        self._direct = self.config.engine.weight_push in ("nccl", "ipc")
        self._transferred = -1  # the version that the learner itself has brought to the engines
        self._held = asyncio.Event()  # they hold what it has made last
        self._held.set()
        self._still = asyncio.Lock()
        self._restored: dict[int, Group] = {}
        self._pending: list[IssuedPrompt] = []

    def restore(
        self, version: int, first: int, issued: dict[int, IssuedPrompt], finished: dict[int, Group]
    ) -> None:
        """Go on from a checkpoint of `version`: finished groups from group `first` on are taken over,
        pending ones issued again.

        A group with tokens of weights newer than the checkpoint is generated again: those weights are gone.
        """
        self.version, self._group_id = version, first
        self._restored = {
            o: g for o, g in finished.items() if max(r.versions.max() for r in g.rollouts) <= version
        }
        self._pending = [issued[o] for o in sorted(issued)]

    async def run(self) -> None:
        """Train to the last step, or to the one under way when `stop` is set. What was learned before a
        fatal error is saved where the learner still can."""
        began = self.version
        try:
            await self._run()
        except Exception:  # whatever it is: saved first, then told
            if self._step is not None:
                await asyncio.wait({self._step})  # it has a deadline
            if self.version > began:
                with suppress(Exception):
                    await self.save()
            raise

    async def _run(self) -> None:
        if self.version == 0:
            await self._evaluate(0)
        self.emit("training_begins", {})
        for _ in range((self.config.pipeline.max_lag + 1) * self.config.pipeline.prompts_per_step):
            self._slots.release()
        pusher, feeder = self._spawn(self._push(), "push"), self._spawn(self._feed(), "feed")
        try:
            await self._first_of(self._train(), pusher, feeder)
            await self._first_of(self._weights.join(), pusher)  # the last weights, and their evaluation
            if self._exhausted and self._stepped and not self._evaluates(self.version):
                await self._evaluate(self.version)
        finally:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _feed(self) -> None:
        """Start a group whenever a slot is free; tasks queue in the order of their group ids."""
        for _ in range((self.config.pipeline.steps - self.version) * self.config.pipeline.prompts_per_step):
            await self._slots.acquire()
            issued = self._pending.pop(0) if self._pending else self.sampler.next()
            if issued is None:
                self._groups.put_nowait(None)
                break
            self._groups.put_nowait(self._spawn(self._group(issued), f"group {issued.group_id}"))
        await asyncio.Future()  # enough groups for the last batch are on their way

    async def _group(self, issued: IssuedPrompt) -> Group:
        """One group, journalled when it starts and when it is complete."""
        restored = self._restored.pop(issued.group_id, None)
        if restored is not None and restored.prompt == issued.prompt:
            return restored
        self.journal.issued(issued)
        group = await rollout_group(self.ctx, issued)
        self.journal.finished(group)
        return group

    async def _train(self) -> None:
        """Batch after batch through the learner."""
        pipeline = self.config.pipeline
        while self.version < pipeline.steps:
            step = self.version + 1
            waited = time.monotonic()
            groups = await self._collect(pipeline.prompts_per_step)
            if groups is None:
                return
            waited = time.monotonic() - waited
            if self.config.engine.colocate:
                await self._weights.join()
            await self._held.wait()
            # A task of its own: what fails meanwhile lets it end, so that its weights can be saved.
            self._step = asyncio.create_task(self._learn(step, groups, waited))
            await asyncio.shield(self._step)
            if step < pipeline.steps and _due(step, self.config.logging.checkpoint_every):
                await self.save()

    async def _learn(self, step: int, groups: list[Group], waited: float) -> None:
        """One batch through the learner."""
        batch = build_batch(groups, step, self.config.objective, self.version)
        async with self._engines_still(self.config.engine.colocate):
            done = await self._within(self.learner.train(batch), f"learner: optimizer step {step}")
            self._stepped = True
            for group in groups:
                self.sampler.record(group)
            self.journal.trained(step, groups[0].group_id, groups[-1].group_id)
            self.version, self._group_id = done.version, groups[-1].group_id + 1
            if self.config.engine.weight_push == "ipc":  # they are asleep: once is enough
                await self._transfer(done.version)
        if self._direct:
            self._held.clear()
        self._weights.put_nowait((done.version, done.weights_path))
        self._report(done, groups, batch.stats, waited)

    async def _collect(self, count: int) -> list[Group] | None:
        """The next `count` groups by group id; None once a stop is asked for or every prompt is solved."""

        async def collect() -> list[Group] | None:
            groups: list[Group] = []
            while len(groups) < count:
                task = await self._groups.get()
                if task is None:
                    self._exhausted = True
                    self.emit("note", {"text": f"ends after step {self.version}: {self.sampler.exhausted}"})
                    return None
                groups.append(await task)
            return groups

        groups = asyncio.ensure_future(self._within(collect(), f"generate: step {self.version + 1}"))
        stop = asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait({groups, stop}, return_when=asyncio.FIRST_COMPLETED)
            return None if stop.done() else groups.result()
        finally:
            groups.cancel()
            stop.cancel()

    async def _push(self) -> None:
        """Bring new weights to the engines, newest first but for versions that must be evaluated.

        The newest file stays: an engine that is started again needs it.
        """
        while True:
            waiting = [await self._weights.get()]
            while not self._evaluates(waiting[-1][0]) and not self._weights.empty():
                waiting.append(self._weights.get_nowait())
            version, _ = waiting[-1]
            written = [w[1] for w in waiting if w[1]]  # a step without gradient writes no file
            await self.hold(version, written[-1] if written else "")
            if written:
                for stale in filter(None, (self._newest, *written[:-1])):
                    Path(stale).unlink(missing_ok=True)
                self._newest = written[-1]
            for _ in range(len(waiting) * self.config.pipeline.prompts_per_step):
                self._slots.release()
            if self._evaluates(version):
                await self._evaluate(version)
            for _ in waiting:
                self._weights.task_done()

    async def hold(self, version: int, path: str) -> None:
        """Return once every engine holds `version`: from the file at `path` (empty: unchanged), or from the
        learner, which must be at that version."""
        if self._direct and self._transferred != version:
            async with self._engines_still():
                await self._transfer(version)
        elif not self._direct:
            push = self.ctx.engine.update_weights(version, path)
            await self._within(push, f"engines: weight push of version {version}")
        self._held.set()

    async def _transfer(self, version: int) -> None:
        """The learner's present weights into engines that stand still, and their label."""
        await self.learner.push(self.ctx.engine.transfer, self._within)
        label = self.ctx.engine.update_weights(version, "")
        await self._within(label, f"engines: label of version {version}")
        self._transferred = version

    @asynccontextmanager
    async def _engines_still(self, needed: bool = True) -> AsyncIterator[None]:
        """The engines stand still meanwhile, asleep where they share the learner's GPUs."""
        if not needed:
            yield
            return
        async with self._still:
            await self.ctx.engine.pause()
            yield
            self.ctx.engine.resume()

    def _evaluates(self, version: int) -> bool:
        return version == self.config.pipeline.steps or _due(version, self.config.evaluation.every)

    async def _evaluate(self, version: int) -> None:
        """mean@k of the weights the engines hold; its compute is that of when they were made."""
        began = time.monotonic()
        samples = self.config.evaluation.samples
        work = evaluate(self.ctx, self.dataset.held_out, samples, version)
        result = await self._within(work, f"evaluate: version {version}")
        self.emit("eval", {"step": version, "seconds": time.monotonic() - began} | asdict(result))

    async def save(self) -> None:
        """Write a checkpoint of the present version, with what a resume needs."""
        sampler = self.sampler.state_dict()
        state = {"version": self.version, "group_id": self._group_id, "sampler": sampler}
        path = str(Path(self.config.run_dir) / "checkpoints" / f"step-{self.version:06d}")
        async with self._engines_still(self.config.engine.colocate):
            await self._within(self.learner.save(path, state), f"learner: checkpoint {path}")
        self.emit("checkpoint", {"path": path, "step": self.version})

    def _report(self, done: StepDone, groups: list[Group], stats: dict[str, float], waited: float) -> None:
        data: dict[str, Any] = {"step": done.version, "train/wait_s": waited}
        data["train/solved_share"] = self.sampler.solved_share
        data["train/epoch"] = groups[-1].epoch
        self.emit("step", data | stats | done.metrics)
        for group in groups[: self.config.logging.samples_per_step]:
            self.emit("sample", sample_record(group, done.version))

    async def _first_of(self, work: Awaitable[None], *background: asyncio.Task[Any]) -> None:
        """Await `work`, but raise at once if a background task fails."""
        main = asyncio.ensure_future(work)
        done, _ = await asyncio.wait({main, *background}, return_when=asyncio.FIRST_COMPLETED)
        if main not in done:
            main.cancel()
            with suppress(asyncio.CancelledError):
                await main
        for task in done:
            task.result()


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
