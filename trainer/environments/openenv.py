"""An environment of OpenEnv (0.10.0), whose server runs elsewhere: actions and observations are dicts.

Needs `environment.network`. The client has a thread of its own, which answers the server's pings while the
model speaks.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

from trainer.verifiers.kinds.function import imported


def rows(count: int = 4000) -> Iterator[dict[str, Any]]:
    """Prompts that are a number, which is the seed of the server's `reset`."""
    for seed in range(count):
        yield {"question": f"{seed:04d}\n", "reset": {"seed": seed}}


class OpenEnv:
    """`action`: the field that gets the model's text, or your function `module:function`, message -> action.
    `observation`: the field that is the next message, or your function, observation -> messages; empty: the
    whole observation as JSON. `client`: further arguments of GenericEnvClient."""

    def __init__(self, base_url: str, action: str = "message", observation: str = "", **client: Any) -> None:
        self._client = self.prepare()(base_url=base_url, **client).sync()
        self._action = _function("action", action) or (lambda message: {action: message["content"]})
        read = (lambda seen: str(seen[observation])) if observation else json.dumps
        self._read = _function("observation", observation) or read

    @staticmethod
    def prepare(**options: Any) -> Any:
        """OpenEnv's client, imported here: the trainer's own interpreter may lack it, and reads `rows`."""
        from openenv import GenericEnvClient

        return GenericEnvClient

    def start(self, row: dict[str, Any]) -> Any:
        """The first observation; the row's column `reset`, a dict, has the server's arguments."""
        self._client.connect()
        return self._read(self._client.reset(**row.get("reset", {})).observation)

    def step(self, message: dict[str, Any]) -> tuple[Any, float | None, bool]:
        result = self._client.step(self._action(message))
        reward = None if result.reward is None else float(result.reward)
        return self._read(result.observation), reward, result.done

    def close(self) -> None:
        self._client.close()


def _function(option: str, name: str) -> Callable[..., Any] | None:
    return imported(f"environment.options.{option}", name) if ":" in name else None
