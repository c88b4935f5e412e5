"""The tasks of a run: their prompts as one data set, and which task each group comes from.

Without a mixture there is one task, named ''. In a mixture, the task of a group is drawn by the shares from
(seed, group id) alone, and each task has a sampler, hence epochs and no-positive-resampling, of its own. A
task whose prompts are all solved ends; the others then divide its share in proportion to theirs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trainer.config import Config, ConfigError, SetConfig, TaskConfig
from trainer.controller.bad_rows import Skipped, allowed_share
from trainer.controller.data import Dataset, Reader, load_prompts, without_held_out
from trainer.controller.sampler import IssuedPrompt, Sampler
from trainer.types import Group, Prompt
from trainer.verifiers.verifier import find

DRAW = 1  # keeps these random numbers apart from those of the epochs


def load_tasks(config: Config, tokenizer: Any, held_out_only: bool = False) -> Dataset:
    """The prompts of all tasks, and the further held-out sets. ConfigError if a prompt is in two tasks, is
    trained on and in such a set, or has an answer that its verifier cannot compare with.

    `tokenizer`: a transformers tokenizer. `held_out_only`: there need not be any other prompts."""
    train: list[Prompt] = []
    held_out: list[Prompt] = []
    skipped: list[Skipped] = []
    for name, task in config.tasks.items():
        try:
            reader = reader_of(name, task, tokenizer, config.objective.supervised)
            data = load_prompts(reader, held_out_only)
        except ConfigError as e:
            raise ConfigError(f"mixture.{name}: {e}" if name else str(e)) from e
        train += data.train
        held_out += data.held_out
        skipped += data.skipped
    first: dict[str, Prompt] = {}
    for prompt in (*train, *held_out):
        if (other := first.setdefault(prompt.prompt_id, prompt)) is not prompt:
            raise ConfigError(
                f"the tasks {other.task} and {prompt.task} both have the prompt {prompt.text[:60]!r}; "
                "expected different texts: remove it from one of them, or change a template"
            )
    sets = {}
    trained = {p.prompt_id: p for p in train}
    share = min(allowed_share(task.data.source, task.data) for task in config.tasks.values())
    for name, one in config.sets.items():
        source, key = one.data.held_out_source or one.data.source, f"evaluation.sets.{name}"
        reader = reader_of(name, one, tokenizer)
        trained, chosen, more = without_held_out(trained, source, key, reader, share)
        sets[name] = tuple(chosen.values())
        skipped += more
    return Dataset(tuple(trained.values()), tuple(held_out), sets, tuple(skipped))


def reader_of(name: str, one: TaskConfig | SetConfig, tokenizer: Any, supervised: bool = False) -> Reader:
    """The reader of the prompts of a task or a held-out set."""
    verifiers = tuple(map(find, one.verifier.kinds))
    return Reader(one.data, tokenizer, name, verifiers, bool(one.environment.kind), supervised)


def shares(config: Config) -> dict[str, float]:
    """Each task's share of the groups; they add up to 1."""
    total = sum(task.share for task in config.tasks.values())
    return {name: task.share / total for name, task in config.tasks.items()}


def sampler_of(config: Config, train: Sequence[Prompt], note: Callable[[str], None]) -> "Sampler | Mixture":
    """The sampler of one task, or of a mixture with one each."""
    by_task = {name: [prompt for prompt in train if prompt.task == name] for name in config.tasks}
    samplers = {n: Sampler(p, config.pipeline, config.seed, config.curriculum) for n, p in by_task.items()}
    return Mixture(samplers, config, note) if config.mixture else samplers[""]


class Mixture:
    """A sampler over several tasks, used like the `Sampler` of one; `note` takes a line on a task's end."""

    def __init__(self, samplers: Mapping[str, Sampler], config: Config, note: Callable[[str], None]) -> None:
        self._samplers, self._config, self._note, self._shares = samplers, config, note, shares(config)
        self._group_id, self._ended = 0, list[str]()

    def next(self, step: int) -> IssuedPrompt | None:
        """The next prompt for an optimizer step, of the task drawn for this group; None when all ended."""
        while names := [name for name in self._samplers if name not in self._ended]:
            p = np.array([self._shares[name] for name in names])
            rng = np.random.default_rng([self._config.seed, self._group_id, DRAW])
            name = names[rng.choice(len(names), p=p / p.sum())]
            issued = self._samplers[name].next(step)
            if issued is not None:
                self._group_id += 1
                return replace(issued, group_id=self._group_id - 1)
            self._ended.append(name)
            self._note(f"the other tasks take the share of {name}: {self._samplers[name].exhausted}")
        return None

    @property
    def exhausted(self) -> str:
        """Message to the user when there is no next prompt."""
        return "; ".join(f"{name}: {sampler.exhausted}" for name, sampler in self._samplers.items())

    def record(self, group: Group) -> None:
        """Add a trained group to its prompt's history."""
        self._samplers[group.prompt.task].record(group)

    @property
    def solved_share(self) -> float:
        """Share of the training prompts that no-positive-resampling excludes, each task by its share."""
        return sum(self._shares[name] * sampler.solved_share for name, sampler in self._samplers.items())

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, JSON-able."""
        tasks = {name: sampler.state_dict() for name, sampler in self._samplers.items()}
        return {"group_id": self._group_id, "ended": list(self._ended), "tasks": tasks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`. ConfigError if it is of other tasks."""
        if set(saved := state.get("tasks", {})) != set(self._samplers):
            raise ConfigError(
                f"the checkpoint's tasks are {', '.join(saved) or 'not a mixture'}, the config's "
                f"{', '.join(self._samplers)}; resume with the tasks that the run began with"
            )
        self._group_id, self._ended = state["group_id"], list(state["ended"])
        for name, sampler in self._samplers.items():
            sampler.load_state_dict(saved[name])


def task_metrics(groups: Sequence[Group], aside: Sequence[Group], tasks: Iterable[str]) -> dict[str, float]:
    """Each task's share of the groups in a batch, and its pass rate, also over those set aside."""
    rates = {task: [g.pass_rate for g in (*groups, *aside) if g.prompt.task == task] for task in tasks}
    passed = {f"train/{task}/pass_rate": float(np.mean(values)) for task, values in rates.items() if values}
    named = [group.prompt.task for group in groups]
    return {f"train/{task}/share": named.count(task) / len(named) for task in rates} | passed
