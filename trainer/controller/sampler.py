"""The order of prompts: shuffled epochs over the training prompts that are open and not solved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.config import CurriculumConfig, PipelineConfig
from trainer.controller.curriculum import difficulties, open_count
from trainer.types import Group, Prompt


@dataclass(frozen=True, slots=True)
class IssuedPrompt:
    """A prompt handed to a rollout task. Group ids count from 0 without gaps."""

    group_id: int
    epoch: int
    prompt: Prompt
    step: int  # from 0: the first that could train on it when its slot became free


class Sampler:
    """Issues prompts; each epoch is a permutation that depends on (seed, epoch) only, of which an epoch skips
    the prompts that are solved, or not open, when it comes to them.

    No-positive-resampling (ScaleRL): a prompt is solved, and not issued again, once its pass rate over its
    trained rollouts, or those of its latest epochs, reaches the threshold. Curriculum: of the unsolved
    prompts, a share is open, the easiest ones.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        config: PipelineConfig,
        seed: int,
        curriculum: CurriculumConfig = CurriculumConfig(),  # noqa: B008  # it is frozen
    ) -> None:
        self._prompts = {p.prompt_id: p for p in prompts}
        self._ids = sorted(self._prompts)
        self._config, self._seed, self._curriculum = config, seed, curriculum
        self._by = curriculum.by if curriculum.kind != "none" else ""
        by_column = self._by not in ("", "pass_rate")
        self._difficulties = difficulties(prompts, self._by) if by_column else {}
        # By prompt id: correct, rollouts; one such pair, or with npr_history as many as that: one an epoch.
        self._history: dict[str, list[int]] = {}
        self._open: tuple[int, frozenset[str]] | None = None  # at which step; None: the history has changed
        self._group_id = self._epoch = self._position = 0
        self._order = self._permutation()

    def next(self, step: int) -> IssuedPrompt | None:
        """The next prompt, for an optimizer step; None when every prompt is solved."""
        for _ in range(2 * len(self._ids)):
            if self._position == len(self._order):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._permutation()
            prompt_id = self._ids[self._order[self._position]]
            self._position += 1
            if not self.solved(prompt_id) and (not self._by or prompt_id in self._open_at(step)):
                issued = IssuedPrompt(self._group_id, self._epoch, self._prompts[prompt_id], step)
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
        scored = [r.outcome == "correct" for r in group.rollouts if r.scored]
        if not scored:
            return
        history, epochs = self._history.setdefault(group.prompt.prompt_id, []), self._config.npr_history
        history += sum(scored), len(scored)
        history[:] = history[-2 * epochs :] if epochs else (sum(history[::2]), sum(history[1::2]))
        self._open = None

    def solved(self, prompt_id: str) -> bool:
        """True if no-positive-resampling excludes this prompt."""
        measured = self._config.no_positive_resampling and prompt_id in self._history
        return measured and self._pass_rate(prompt_id) >= self._config.npr_threshold

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
        self._history, self._open = {k: list(v) for k, v in state["history"].items()}, None
        self._order = self._permutation()

    def _pass_rate(self, prompt_id: str) -> float:
        """The measured pass rate of a prompt; .5 before it is measured."""
        history = self._history.get(prompt_id, (1, 2))
        return sum(history[::2]) / sum(history[1::2])

    def _open_at(self, step: int) -> frozenset[str]:
        """The unsolved prompts that the curriculum opens at a step."""
        if self._open is None or self._open[0] != step:
            by_column = self._difficulties
            unsolved = [i for i in self._ids if not self.solved(i)]
            unsolved.sort(key=lambda i: by_column[i] if by_column else -self._pass_rate(i))
            count = open_count(self._curriculum, self._curriculum.start, len(unsolved), step)
            self._open = step, frozenset(unsolved[:count])
        return self._open[1]

    def _permutation(self) -> list[int]:
        return [int(i) for i in np.random.default_rng([self._seed, self._epoch]).permutation(len(self._ids))]
