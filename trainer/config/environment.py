"""The keys of `environment.`: episodes of several turns."""

from dataclasses import dataclass, field
from typing import Any

from trainer.config.values import NonNegativeInt, PositiveFloat, PositiveInt


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentConfig:
    kind: str = ""
    """Your class `module:Class` with start, step and close (docs/environments.md): a completion is then an episode of several turns, whose reward is the sum of the environment's. Empty: one answer, which `verifier` scores."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class."""
    python: str = ""
    """Interpreter of the environment's processes, such as `.venv-verifiers/bin/python`, for packages that cannot stand beside the trainer's. It needs NumPy. Empty: the trainer's own."""
    max_turns: PositiveInt = 8
    """The model's turns in one episode at most. Its tokens, with those that the environment adds, are limited by engine.max_new_tokens."""
    turn_tokens: NonNegativeInt = 0
    """Tokens of one turn of the model at most; 0: what is left of the episode's."""
    threshold: float = 1.0
    """Reward of an episode from which it is a pass."""
    processes: PositiveInt = 256
    """Episodes that are open at once, each with a process of its own; further ones wait. Evaluations have as many beside them."""
    turn_s: PositiveFloat = 60.0
    """Seconds that one call of the environment may take before its process is killed and the episode is dropped; less than pipeline.deadline_s."""
    episode_s: PositiveFloat = 600.0
    """Seconds that all calls of one episode may take together."""
    network: bool = False
    """Let the environment use the network, write files and start processes. False: it runs in the sandbox of SECURITY.md."""
