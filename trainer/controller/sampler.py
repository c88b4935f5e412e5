"""The order of prompts: shuffled epochs over the training prompts, without the solved ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.config import PipelineConfig
from trainer.types import Group, Prompt


@dataclass(frozen=True, slots=True)
class IssuedPrompt:
    """A prompt handed to a rollout task. Group ids count from 0 without gaps."""

    group_id: int
    epoch: int
    prompt: Prompt


class Sampler:
    """Issues prompts; each epoch is a permutation that depends on (seed, epoch) only.

    No-positive-resampling (ScaleRL): a prompt is solved, and not issued again, once its pass rate over all
    its trained rollouts reaches the threshold.
    """

    def __init__(self, prompts: Sequence[Prompt], config: PipelineConfig, seed: int) -> None:
        self._prompts = {p.prompt_id: p for p in prompts}
        self._ids = sorted(self._prompts)
        self._config, self._seed = config, seed
        self._history: dict[str, tuple[int, int]] = {}  # prompt id -> (correct, rollouts)
        self._group_id = self._epoch = self._position = 0
        self._order = self._permutation()

    def next(self) -> IssuedPrompt | None:
        """The next unsolved prompt; None when every prompt is solved."""
        for _ in range(2 * len(self._ids)):
            if self._position == len(self._order):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._permutation()
            prompt_id = self._ids[self._order[self._position]]
            self._position += 1
            if not self.solved(prompt_id):
                issued = IssuedPrompt(self._group_id, self._epoch, self._prompts[prompt_id])
                self._group_id += 1
                return issued
        return None

    @property
    def exhausted(self) -> str:
        """Message to the user when there is no next prompt."""
        return (
            f"all {len(self._ids)} training prompts have been solved at a pass rate of "
            f"{self._config.npr_threshold} or more, so no-positive-resampling leaves none: give more or "
            "harder data, or set --pipeline.no_positive_resampling false"
        )

    def record(self, group: Group) -> None:
        """Add a trained group to its prompt's history."""
        correct, total = self._history.get(group.prompt.prompt_id, (0, 0))
        correct += sum(r.outcome == "correct" for r in group.rollouts)
        self._history[group.prompt.prompt_id] = (correct, total + len(group.rollouts))

    def solved(self, prompt_id: str) -> bool:
        """Whether no-positive-resampling excludes this prompt."""
        correct, total = self._history.get(prompt_id, (0, 0))
        return (
            self._config.no_positive_resampling
            and total > 0
            and correct / total >= self._config.npr_threshold
        )

    @property
    def solved_share(self) -> float:
        """Share of the training prompts that no-positive-resampling excludes."""
        return sum(map(self.solved, self._ids)) / len(self._ids)

    def state_dict(self) -> dict[str, Any]:
        """Position and history for a checkpoint, JSON-able."""
        return {
            "group_id": self._group_id,
            "epoch": self._epoch,
            "position": self._position,
            "history": {k: list(v) for k, v in self._history.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self._group_id, self._epoch, self._position = state["group_id"], state["epoch"], state["position"]
        self._history = {k: (v[0], v[1]) for k, v in state["history"].items()}
        self._order = self._permutation()

    def _permutation(self) -> list[int]:
        return [int(i) for i in np.random.default_rng([self._seed, self._epoch]).permutation(len(self._ids))]
