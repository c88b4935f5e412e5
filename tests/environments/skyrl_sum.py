"""An environment of skyrl-gym in two turns."""

from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class Sum(BaseTextEnv):
    """After a wrong sum there is a second try, for half of the reward."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        self._answer, self._share = str((extras or {})["answer"]), env_config.share

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        return [*prompt, {"role": "user", "content": "Go on."}], {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        right = action.strip() == self._answer
        again = [] if right or self.turns == 2 else [{"role": "user", "content": "Again."}]
        reward = float(right) * (1.0 if self.turns == 1 else self._share)
        return BaseTextEnvStepOutput(observations=again, reward=reward, done=not again, metadata={})
