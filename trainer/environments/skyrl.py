"""An environment of skyrl-gym (0.4.0): `init(prompt)`, `step(text)`, `close()`."""

from typing import Any

import skyrl_gym
from omegaconf import DictConfig

from trainer.verifiers.kinds.function import imported


class SkyRL:
    """`env`: an id that skyrl-gym knows, or your class `module:Class`, which is registered under that name.
    `config`: its `env_config`. Its `extras` are the data's row."""

    def __init__(self, env: str, config: dict[str, Any] | None = None) -> None:
        self._env, self._config = env, DictConfig(config or {})
        if ":" in env and env not in skyrl_gym.registry:
            imported("environment.options.env", env)
            skyrl_gym.register(id=env, entry_point=env)

    def start(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        prompt = row["question"]
        turns = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        self._made = skyrl_gym.make(self._env, env_config=self._config, extras=row)
        messages, _ = self._made.init(turns)
        if messages[: len(turns)] != turns:
            raise ValueError("init changed the prompt; expected it with more messages behind it")
        return list(messages[len(turns) :])

    def step(self, message: dict[str, Any]) -> tuple[list[dict[str, Any]], float, bool]:
        output = self._made.step(message["content"])
        return list(output["observations"]), float(output["reward"]), bool(output["done"])

    def close(self) -> None:
        self._made.close()
