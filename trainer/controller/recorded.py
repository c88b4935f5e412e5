"""The part of a journal that can be replayed: steps whose batches it still holds, and their first weights.

A step counts if the last record of each of its groups is a finished one: after a crash, groups are generated
again. The steps begin with the run's first one or, where the journal's beginning is gone (or another run's),
at the oldest checkpoint whose next step is there and, with PPO-off-policy, in the first epoch of its round.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.controller.journal import SEGMENT_GROUPS, records, replay
from trainer.controller.rounds import Minibatch
from trainer.jsonl import read_lines
from trainer.run_folder import checkpoints
from trainer.types import Group, Prompt


class Recorded:
    """The steps of a run's journal. `start`: the checkpoint they go on from; None: the first weights."""

    def __init__(self, run: Path) -> None:
        self._folder, self._finished = run / "journal", set[int]()
        self._trained: dict[int, dict[str, Any]] = {}
        for record in records(self._folder):
            if "issued" in record:
                self._finished.discard(record["issued"])
            elif "finished" in record:
                self._finished.add(record["finished"])
            elif "trained" in record:
                self._trained[record["trained"]] = record
        starts = [(0, None), *((int(p.name.removeprefix("step-")), p) for p in checkpoints(run))]
        usable = [(step, path) for step, path in starts if self._begins(step)]
        if not usable:
            raise ConfigError(
                f"--replay: the journal of {run} holds no step after its start or one of its checkpoints"
            )
        self.first, self.start = usable[0]
        self.last = self.first
        trained = {row["step"] for row in read_lines(run / "metrics.jsonl") if "learner/loss" in row}
        while self._holds(self.last + 1) and self.last + 1 in trained:  # a crash may have undone later ones
            self.last += 1

    def rounds(self, prompts: Mapping[str, Prompt], off_policy: bool) -> Iterator[list[Minibatch]]:
        """The minibatches of the steps, in order; with PPO-off-policy those of a round together."""

        @lru_cache(maxsize=4)
        def segment(number: int) -> dict[int, Group]:
            start = number * SEGMENT_GROUPS
            return replay(self._folder, start, prompts, start + SEGMENT_GROUPS)[1]

        def groups(ids: list[int]) -> tuple[Group, ...]:
            return tuple(segment(i // SEGMENT_GROUPS)[i] for i in ids)

        def minibatch(step: int) -> Minibatch:
            record = self._trained[step]
            aside = record.get("aside", [])
            later = int("groups" in record)  # an epoch after the first
            return Minibatch(groups([i for i in _ids(record) if i not in aside]), groups(aside), later)

        def newest_version(minibatch: Minibatch) -> int:
            return max(int(r.versions.max()) for g in minibatch.groups for r in g.rollouts)

        minibatches = map(minibatch, range(self.first + 1, self.last + 1))
        if off_policy:
            yield from (list(round_) for _, round_ in groupby(minibatches, newest_version))
        else:
            yield from ([one] for one in minibatches)

    def _holds(self, step: int) -> bool:
        return step in self._trained and self._finished.issuperset(_ids(self._trained[step]))

    def _begins(self, step: int) -> bool:
        """True if the next step is there, and is no later epoch's."""
        return self._holds(step + 1) and "groups" not in self._trained[step + 1]


def _ids(record: Mapping[str, Any]) -> list[int]:
    """The groups of a step, with those set aside."""
    return record.get("groups") or list(range(record["first"], record["last"] + 1))
