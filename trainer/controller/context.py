"""Everything that rollouts and evaluations need, whatever their prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.config import Config
from trainer.controller.deadline import Deadline
from trainer.controller.rewards import Rewards
from trainer.controller.teacher import Teacher
from trainer.engines.pool import EnginePool
from trainer.environments.pool import EnvironmentPool


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """The config, the engines, the scorers and environments, and the tokenizer's functions."""

    config: Config
    engine: EnginePool
    rewards: dict[str, Rewards]  # by task or further held-out set; of those without an environment
    decode: Callable[[list[list[int]]], list[str]]  # token ids -> texts without special tokens
    stop_ids: frozenset[int]
    phrase_ids: tuple[int, ...]  # the interruption phrase
    deadline: Deadline
    environments: dict[str, EnvironmentPool] = field(default_factory=dict)  # by task or held-out set
    encode: Callable[[str], Sequence[int]] = lambda text: ()  # without special tokens of its own
    tokenizer: Any = None  # of transformers, for its chat template
    teacher: Teacher | None = None  # behind a URL
