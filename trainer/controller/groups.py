"""The groups of a run, from the free slot in which one starts to the batch that it is trained in."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.controller.batch import zero_variance
from trainer.controller.context import RolloutContext
from trainer.controller.journal import Journal, issued_prompt, issued_record, replay
from trainer.controller.mixture import Mixture
from trainer.controller.rollout import rollout_group
from trainer.controller.rounds import Minibatch
from trainer.controller.sampler import IssuedPrompt, Sampler
from trainer.controller.supervised import supervised_group
from trainer.controller.turns import Past, Tape
from trainer.types import Group, Prompt

Spawn = Callable[[Coroutine[Any, Any, Group], str], asyncio.Task[Group]]


class Groups:
    """Starts a group for every free slot, and hands the groups over in the order in which they started."""

    def __init__(
        self,
        ctx: RolloutContext,
        sampler: Sampler | Mixture,
        journal: Journal,
        emit: Callable[[str, dict[str, Any]], None],
        spawn: Spawn,
    ) -> None:
        self._ctx, self._sampler, self._journal, self._emit, self._spawn = ctx, sampler, journal, emit, spawn
        self._pipeline, self._objective = ctx.config.pipeline, ctx.config.objective
        self.exhausted = False  # every prompt is solved
        self._slots: asyncio.Queue[int] = asyncio.Queue()  # free ones: the step that each is for, from 0
        self._opened = 0  # steps whose groups have slots
        self._started: asyncio.Queue[asyncio.Task[Group] | None] = asyncio.Queue()  # by id; None: no more
        self._noted = set[str]()  # what is said once
        self._issued = dict[int, IssuedPrompt]()  # and not trained on when the last checkpoint was written
        self._to_issue = list[IssuedPrompt]()  # again, before further prompts
        self._resumed = dict[int, Group]()  # finished before a resume
        self._pasts = dict[int, tuple[Prompt, dict[int, Past]]]()  # of groups that were pending then

    def restore(self, checkpoint: dict[str, Any], train: Sequence[Prompt]) -> None:
        """Resume from a checkpoint: keep finished groups and issue pending prompts again, whose episodes go
        on where they were.

        A group with tokens of versions after the checkpoint is generated again, since those weights are lost;
        so is one whose tokens would be too old: in PPO-off-policy the rest of a round that was cut short. Of
        an episode this holds from the first such turn on.
        """
        version, first = checkpoint["version"], checkpoint["group_id"]
        prompts = {p.prompt_id: p for p in train}
        self._issued, finished, pasts = replay(self._journal.folder, first, prompts)
        for record in checkpoint["pending"]:  # not in the journal of a run that branches here
            self._issued[record["issued"]] = issued_prompt(record, prompts, "the checkpoint")
        last = checkpoint["sampler"]["group_id"]
        self._to_issue = [self._issued[i] for i in sorted(self._issued) if i < last]
        for i, group in finished.items():
            usable = self._usable(i, version, first)
            if all(usable(rollout.versions) for rollout in group.rollouts):
                self._resumed[i] = group
        for i, episodes in pasts.items():
            usable = self._usable(i, version, first)
            self._pasts[i] = self._issued[i].prompt, {n: p.keep(usable) for n, p in episodes.items()}

    def _usable(self, group_id: int, version: int, first: int) -> Callable[[NDArray[np.int32]], bool]:
        """Tells if a group may be trained on, in its turn, after a resume at this version, with tokens of
        these versions."""
        batch = version + (group_id - first) // self._pipeline.prompts_per_step
        oldest = version if self._pipeline.off_policy else batch - self._pipeline.max_lag
        return lambda v: bool(oldest <= v.min(initial=version) and v.max(initial=version) <= version)

    def pending(self, first: int) -> list[dict[str, Any]]:
        """Records of the prompts that were issued from group `first` on, for a checkpoint."""
        self._issued = {i: issued for i, issued in self._issued.items() if i >= first}
        return list(map(issued_record, self._issued.values()))

    def free_slots(self, version: int) -> None:
        """Let the groups start that the scheme allows once the engines hold `version`."""
        last = min(version + self._pipeline.batches_open, self._pipeline.steps)
        for step in range(max(self._opened, version), last):
            for _ in range(self._pipeline.prompts_per_step):
                self._slots.put_nowait(step)
        self._opened = max(self._opened, last)

    async def issue(self) -> None:
        """Start a group whenever a slot is free; tasks queue in the order of their group ids."""
        while True:
            step = await self._slots.get()
            issued = self._to_issue.pop(0) if self._to_issue else self._sampler.next(step)
            if issued is None:
                break
            self._issued[issued.group_id] = issued
            self._started.put_nowait(self._spawn(self._rollout(issued), f"group {issued.group_id}"))
        self._started.put_nowait(None)
        await asyncio.Future()  # wait to be cancelled

    async def _rollout(self, issued: IssuedPrompt) -> Group:
        """One group, recorded in the journal when it starts and when it is complete; an episode by turns."""
        resumed = self._resumed.pop(issued.group_id, None)
        if resumed is not None and resumed.prompt == issued.prompt:
            return await self._scored(resumed)
        prompt, pasts = self._pasts.pop(issued.group_id, (issued.prompt, {}))
        pasts = pasts if prompt == issued.prompt else {}
        self._journal.issued(issued, pasts)
        if self._objective.supervised:
            group = supervised_group(self._ctx, issued)
        else:
            group = await rollout_group(self._ctx, issued, partial(self._tape, issued.group_id, pasts))
        self._journal.finished(group)
        return await self._scored(group)

    async def _scored(self, group: Group) -> Group:
        """The group with the log-probs of a teacher behind a URL, if there is one, recorded as well."""
        if (teacher := self._ctx.teacher) is None or group.logprobs_ref:
            return group
        with self._ctx.engine.waiting("", "teacher"):
            group = await teacher.score(group)
        self._ctx.deadline.restart()
        self._journal.scored(group)
        return group

    def _tape(self, group_id: int, pasts: Mapping[int, Past], index: int) -> Tape:
        """The journal of one episode."""
        name = f"episode {index} of group {group_id}: its environment, run again, said something else than "
        text = f"{name}before, so its turns from there on are generated again. To resume exactly, an "
        text += "environment must follow from its row and the model's turns alone (said once)"
        record, end = (partial(write, group_id, index) for write in (self._journal.turn, self._journal.ended))
        return Tape(pasts.get(index, Past()), record, end, partial(self._note_once, "differs", text))

    def _note_once(self, kind: str, text: str) -> None:
        if kind not in self._noted:
            self._noted.add(kind)
            self._emit("note", {"text": text})

    async def minibatch(self, step: int) -> Minibatch | None:
        """The next P groups by id, for a step (from 0); None if there are not so many more.

        To resample, groups without variance are set aside until `resample_limit` · P groups are generated.
        """
        groups: list[Group] = []
        aside: list[Group] = []
        objective, size = self._objective, self._pipeline.prompts_per_step
        while len(groups) < size:
            task = await self._started.get()
            if task is None:
                self.exhausted = True
                return None
            group = await task
            equal = objective.zero_variance == "resample" and zero_variance(group, objective.drop_truncated)
            if equal and size + len(aside) < objective.resample_limit * size:
                aside.append(group)
                self._slots.put_nowait(step)
                continue
            groups.append(group)
            if equal:
                text = f"{len(aside)} groups without variance were replaced in a batch of {size}, as many as "
                text += "objective.resample_limit allows: the next are in the batch, without a gradient"
                self._note_once("limit", text)
        return Minibatch(tuple(groups), tuple(aside))
