"""A server of OpenEnv: it shows a digit, and the answer is the same digit; three times.

The reward of a turn is half for the digit at its end, half for being short.

python tests/environments/echo_server.py PORT
"""

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    message: str


class Shown(Observation):
    text: str


class Echo(Environment[Say, Shown, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._random, self._steps, self._shown = random.Random(), 0, ""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Shown:
        self._random, self._steps = random.Random(seed), 0
        return self._show(None)

    def step(self, action: Say, timeout_s: float | None = None, **kwargs: Any) -> Shown:
        self._steps += 1
        text = action.message.strip()
        return self._show((text[-1:] == self._shown) / 2 + text.isdigit() / max(len(text), 1) / 2)

    @property
    def state(self) -> State:
        return State(step_count=self._steps)

    def _show(self, reward: float | None) -> Shown:
        self._shown = str(self._random.randrange(10))
        return Shown(text=f"{self._shown} = ", reward=reward, done=self._steps == 3)


def shout(message: dict[str, Any]) -> dict[str, Any]:
    return {"message": message["content"].removeprefix("It is ")}


def first_word(observation: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "tool", "content": observation["text"].split()[0]}]


if __name__ == "__main__":
    app = create_fastapi_app(Echo, Say, Shown, max_concurrent_envs=1000)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
