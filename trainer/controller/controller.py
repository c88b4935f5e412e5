"""The loop that turns prompts into groups into batches, and new weights into the engine.

                 slots: (k+1)·P groups at first
                       |
    sampler --issue--> [rollout] [rollout] [rollout] ...      tasks, one a group
                       |   ^ tokens of mixed versions
                       v   |
                    engine(s) <--- weights v ---+              sync loop: in flight, between two tokens
                       |                        |
                  verifier pool                 |
                       |                        |
            finished groups, by group id        |
                       |                        |
                       v                        |
              batch n = groups nP .. nP+P-1 ----+--> learner ---> weights n+1

issue loop   produces groups    waits for a slot            unblocked by the sync loop
train loop   produces weights   waits for batch n's groups  unblocked by rollouts
sync loop    frees P slots      waits for the engines       unblocked by the train loop

Lag (PipelineRL-k). Batches take groups in the order they were issued. The first (k+1)·P groups start
at version 0; P more start each time the engines *hold* a further version v, so batch n is made of groups
that began at version n − k or later, and is trained on at version n: the lag is at most k by
construction, nothing is ever discarded, and k = 0 is strictly on-policy. The learner refuses older batches.

Lag (PPO-off-policy-k). A round is k·P groups, all begun and finished with the weights at its start, and then
k steps for each of `epochs`, whose weights no training rollout sees: the lag of the round's step j (from 0)
is exactly j. Slots for the next round are free once the engines hold the round's last version; other versions
reach them only to be evaluated.

Dynamic sampling (`zero_variance: resample`). A group without variance is set aside when its turn comes, and
its slot is free at once for a group at the end of the queue. The bound of PipelineRL-k holds as before: by
the time that a group starts at version v, (k+1+v)·P slots have been freed by versions, and one by each group
that was set aside, all of them issued earlier. So fewer than (k+1+v)·P kept groups come before this one: it
is in batch v + k at the latest.

Evaluation of version v happens while the engines hold v: the sync loop keeps newer weights back until its
completions have arrived. Training rollouts go on in the slots left over, and the lag bound paces the learner.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from trainer.config import Config
from trainer.controller.batch import Moments, build_batch
from trainer.controller.context import RolloutContext
from trainer.controller.data import Dataset
from trainer.controller.evaluate import evaluate
from trainer.controller.groups import Groups
from trainer.controller.journal import Journal, oldest_group
from trainer.controller.learner_client import LearnerClient
from trainer.controller.mixture import Mixture, task_metrics
from trainer.controller.rollout import sample_record
from trainer.controller.rounds import Minibatch, deal
from trainer.controller.sampler import Sampler
from trainer.controller.scores import to_score, with_teacher
from trainer.controller.supervised import supervised_metrics
from trainer.controller.weight_sync import WeightSync
from trainer.messages import StepDone
from trainer.types import Group, TokenScores

T = TypeVar("T")
Emit = Callable[[str, dict[str, Any]], None]


class Controller:
    """Runs one training up to its last step; `emit(kind, data)` sends events to the launcher."""

    def __init__(
        self,
        ctx: RolloutContext,
        dataset: Dataset,
        sampler: Sampler | Mixture,
        learner: LearnerClient,
        journal: Journal,
        emit: Emit,
    ) -> None:
        self.config: Config = ctx.config
        self.ctx, self.dataset, self.sampler = ctx, dataset, sampler
        self.learner, self.journal, self.emit = learner, journal, emit
        self.weights = WeightSync(ctx.config.engine, ctx.engine, learner, ctx.deadline, self._evaluates)
        self._wait_for = ctx.deadline.wait_for
        self.stop = asyncio.Event()  # set: stop after the current optimizer step
        self.keep = 0.0  # the compute at which the launcher asked for a checkpoint that is kept for good
        self.pace = 0.0  # compute of a step so far, as the launcher's ledger has it; 0: unknown
        self._kept = 0, 0.0  # the version of the newest such checkpoint, and that compute
        self.complete_by = ""  # why `stop` makes the run complete, such as "compute"; empty: it does not
        self.version = 0  # the learner's
        self._group_id = 0  # the first not yet trained on
        self._round_end = 0  # the last version of the current round
        self._scores: dict[int, list[TokenScores]] = {}  # of the round's groups, by id
        self._step: asyncio.Task[None] | None = None  # the current optimizer step
        self._moments = Moments()  # of the advantages of all batches
        self._longest = self.config.engine.longest_completion(len(ctx.phrase_ids))
        self._tasks: set[asyncio.Task[Any]] = set()  # cancelled when the run ends
        self.groups = Groups(ctx, sampler, journal, emit, self.spawn)

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Resume from the state in a checkpoint. Where RL follows supervised steps, or precedes them, the
        prompts and their history begin anew: the data may be others."""
        self.restore_learning(checkpoint)
        if checkpoint.get("supervised", False) != self.config.objective.supervised:
            self._group_id, self._moments = 0, Moments()
            return
        self.sampler.load_state_dict(checkpoint["sampler"])
        self.groups.restore(checkpoint, self.dataset.train)

    def restore_learning(self, checkpoint: dict[str, Any]) -> None:
        """The part of the state that does not concern the groups to come."""
        self.version, self._group_id = checkpoint["version"], checkpoint["group_id"]
        self._kept = self.version, checkpoint["kept"]
        self._moments = Moments(**checkpoint["advantages"])
        self.pace = checkpoint.get("pace", 0.0)  # that of an older version lacks it

    async def run(self) -> None:
        """Train up to the last step, or to the end of the current one once `stop` is set. After a fatal
        error, save the finished steps if the learner still can."""
        began = self.version
        try:
            await self._run()
        except Exception:  # whatever it is: save, then report it
            if self._step is not None:
                await asyncio.wait({self._step})  # it has a deadline
            if self.version > began:
                with suppress(Exception):
                    await self.save()
            raise

    async def _run(self) -> None:
        if (began := self.version) == 0:
            await self._evaluate(0)
        self.emit("training_begins", {"step": began})
        self.groups.free_slots(self.version)
        sync = self.spawn(self._sync_loop(), "sync loop")
        issue = self.spawn(self.groups.issue(), "issue loop")
        try:
            await self._first_of(self._train_loop(), sync, issue)
            # Wait for the last weights and their evaluation.
            await self._first_of(self.weights.published.join(), sync)
            ended = self.groups.exhausted or self.complete_by
            if ended and self.version > began and not self._evaluates(self.version):
                await self._evaluate(self.version)
        finally:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start a task, which is cancelled when the run ends."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _train_loop(self) -> None:
        """One round of optimizer steps after the other (PipelineRL: of one), with checkpoints where due."""
        pipeline = self.config.pipeline
        while self.version < pipeline.steps and not (self.groups.exhausted or self.stop.is_set()):
            waited = time.monotonic()
            batches = min(pipeline.minibatches if pipeline.off_policy else 1, pipeline.steps - self.version)
            generated, seed = await self._collect(batches), (self.config.seed, self.version)
            dealt = deal(generated, pipeline.epochs, seed)
            minibatches = list(islice(dealt, pipeline.steps - self.version))
            self._round_end = self.version + len(minibatches)
            await self._train_round(minibatches, time.monotonic() - waited)
        if self.groups.exhausted:
            text = f"training ends after step {self.version}: {self.sampler.exhausted}"
            self.emit("note", {"text": text})

    async def _train_round(self, minibatches: Sequence[Minibatch], waited: float = 0.0) -> None:
        unscored = [g for m in minibatches if not m.epoch for g in m.groups]
        for minibatch in minibatches:
            if self.stop.is_set() and not self.complete_by:  # the engines need a round's last version
                return
            if self.keep:
                await self.save()
            await self.weights.before_step()
            # A task of its own, so that it ends and can be saved when something else fails meanwhile.
            self._step = asyncio.create_task(self._train_step(minibatch, unscored, waited))
            await asyncio.shield(self._step)
            unscored, waited = [], 0.0
            last = self.version == self.config.pipeline.steps  # it is saved when the run ends
            if not last and due(self.version, self.config.logging.checkpoint_every):
                await self.save()

    async def _train_step(self, minibatch: Minibatch, unscored: Sequence[Group], waited: float) -> None:
        """Train on one batch, record it and publish the new weights. Before a round's first step all its
        groups are `unscored`."""
        groups, objective, step = minibatch.groups, self.config.objective, self.version + 1
        publish, steps = step == self._round_end or self._evaluates(step), self.planned_steps(step)
        async with self.weights.learner_turn(more=not publish):
            if unscored:
                self._scores = await self._score(unscored)
            scores = [score for g in groups for score in self._scores.get(g.group_id, ())]
            moments = replace(self._moments, closed=minibatch.epoch > 0)
            settings = step, objective, self.version, scores, minibatch.aside, self._longest, moments
            batch = replace(build_batch(groups, *settings), publish=publish, steps=steps)
            done = await self._wait_for(self.learner.train(batch), f"learner: optimizer step {step}")
            self.journal.trained(step, minibatch)
            self.version = done.version
            if minibatch.epoch == 0:
                self.journal.learned(step, groups, batch, done.tokens)
                self._moments = moments
                for group in minibatch.generated:
                    self.sampler.record(group)
                self._group_id = groups[-1].group_id + 1
            if publish:
                await self.weights.publish(done)
        self._report(done, minibatch, batch.stats | {"train/planned_steps": steps}, waited)

    def planned_steps(self, step: int) -> float:
        """Steps of the whole run, as expected before this one: pipeline.steps, or up to its compute."""
        pipeline = self.config.pipeline
        by_compute = pipeline.max_compute / self.pace if self.pace and pipeline.max_compute else math.inf
        return min(pipeline.steps, by_compute)

    async def _score(self, groups: Sequence[Group]) -> dict[int, list[TokenScores]]:
        """Scores of the rollouts by the learner's models, and a server's, by group id; empty if the objective
        needs none."""
        objective, scores = self.config.objective, iter(list[TokenScores]())
        if objective.needs_scores:
            work = self.learner.score(to_score(groups), objective.needs_logprobs)
            scores = iter(await self._wait_for(work, f"learner: score the data of step {self.version + 1}"))
        elif not objective.kl.by_url:
            return {}
        by_group = {g.group_id: list(islice(scores, len(g.rollouts))) for g in groups}
        return with_teacher(groups, by_group) if objective.kl.by_url else by_group

    async def _collect(self, count: int) -> list[Minibatch]:
        """The next `count` minibatches; fewer if every prompt is solved, none once a stop is requested."""
        minibatches: list[Minibatch] = []

        async def collect() -> None:
            for step in range(self.version, self.version + count):
                if (minibatch := await self.groups.minibatch(step)) is None:
                    return
                minibatches.append(minibatch)

        stop = asyncio.create_task(self.stop.wait())
        try:
            await self._first_of(self._wait_for(collect(), f"generate: step {self.version + 1}"), stop)
        finally:
            stop.cancel()
        return [] if self.stop.is_set() else minibatches

    async def _sync_loop(self) -> None:
        """Push new weights to the engines, free slots for new groups, evaluate where it is due."""
        while True:
            version, steps = await self.weights.push_newest()
            if version == self._round_end or not self.config.pipeline.off_policy:
                self.groups.free_slots(version)
            if self._evaluates(version):
                with self.weights.hold_version():
                    await self._evaluate(version)
            for _ in range(steps):
                self.weights.published.task_done()

    @property
    def ended_by(self) -> str:
        """The reason why the run is complete; empty if it was stopped."""
        reached = "steps" if self.version >= self.config.pipeline.steps else ""
        return reached or self.complete_by or ("solved" if self.groups.exhausted else "")

    def _evaluates(self, version: int) -> bool:
        return version == self.config.pipeline.steps or due(version, self.config.evaluation.every)

    async def _evaluate(self, version: int) -> None:
        """Score the weights that the engines hold by mean@k."""
        work = evaluate(self.ctx, self.dataset, version)
        self.emit("eval", await self._wait_for(work, f"evaluate: version {version}"))

    async def save(self) -> None:
        """Write a checkpoint of the present version, with the state that a resume needs."""
        sampler = self.sampler.state_dict()
        state = {"version": self.version, "group_id": self._group_id, "sampler": sampler}
        state["supervised"] = self.config.objective.supervised
        state["pending"] = self.groups.pending(self._group_id)
        state["advantages"], state["pace"] = asdict(self._moments), self.pace
        if self.keep:
            self._kept, self.keep = (self.version, self.keep), 0.0
        state["kept"] = self._kept[1] if self._kept[0] == self.version else 0.0  # also if written again
        path = str(Path(self.config.run_dir) / "checkpoints" / f"step-{self.version:06d}")
        async with self.weights.learner_turn():
            await self._wait_for(self.learner.save(path, state), f"learner: checkpoint {path}")
        self.emit("checkpoint", {"path": path, "step": self.version})
        self.journal.prune(oldest_group(self.config.run_dir, self._group_id))

    def _report(self, done: StepDone, minibatch: Minibatch, stats: dict[str, float], waited: float) -> None:
        groups = minibatch.groups
        progress = {"train/solved_share": self.sampler.solved_share, "train/epoch": groups[-1].epoch}
        progress["engine/push_s"] = self.weights.push_s
        progress["train/rollout_tokens"] = minibatch.generated_tokens
        progress |= task_metrics(groups, minibatch.aside, self.config.mixture)
        metrics = {"train/wait_s": waited} | progress | stats | done.metrics
        metrics = supervised_metrics(metrics) if self.config.objective.supervised else metrics
        self.emit("step", {"step": done.version} | metrics)
        for group in groups[: self.config.logging.samples_per_step]:
            self.emit("sample", sample_record(group, done.version))

    async def _first_of(self, work: Awaitable[None], *background: asyncio.Task[Any]) -> None:
        """Wait for `work`, but raise at once if a background task fails."""
        main = asyncio.ensure_future(work)
        try:
            done, _ = await asyncio.wait({main, *background}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            main.cancel()  # if it is not done
        await asyncio.wait({main})
        for task in done:
            task.result()


def due(step: int, every: int) -> bool:
    """True if an action with period `every` is due at this step; 0 means never."""
    return every > 0 and step % every == 0
