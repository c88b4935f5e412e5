"""A judge behind an OpenAI-compatible server: a language model that is asked to grade (`chat`), or a reward
model by vLLM 0.32's `classify` or `pooling`.
"""

import re
from typing import Any

from trainer.config import JudgeConfig
from trainer.verifiers.http_client import NoScoreError, ScoringClient, ServerFailedError

NUMBER = re.compile(r"(?<![\w./])-?(?:\d+(?:\.\d+)?|\.\d+)")  # not the 10 of 8/10
Request = str | list[dict[str, str]]  # a text, or a conversation


class Server:
    """The client. ConfigError if the URL is none, or the API key's variable is not set."""

    def __init__(self, config: JudgeConfig) -> None:
        self._config, self._model = config, config.model
        server = config.url, config.api_key_env, config.deadline_s
        self._client = ScoringClient("judge", *server, "verifier.judge.url", "url, api, model or key")

    async def score(self, request: Request) -> float:
        """The score. NoScoreError if the server refuses this request, ServerFailedError if it fails."""
        api, body, call = self._config.api, dict[str, Any](), self._client.call
        turns = [{"role": "user", "content": request}] if isinstance(request, str) else request
        if api == "chat":
            body |= {"messages": turns, "temperature": 0, "max_tokens": self._config.max_tokens}
        else:
            body |= {"input": request} if isinstance(request, str) else {"messages": turns}
            body["use_activation"] = False
        try:
            if not self._model:
                self._model = (await call("GET", "/v1/models"))["data"][0]["id"]
            route = "/v1/chat/completions" if api == "chat" else f"/{api}"
            return _score(api, await call("POST", route, {"model": self._model} | body))
        except (LookupError, TypeError, ValueError) as e:
            text = f"{self._client.name}: its reply is not that of verifier.judge.api {api}: {e!r}"
            raise ServerFailedError(text) from e

    def close(self) -> None:
        """No connection is kept open."""


def _score(api: str, reply: Any) -> float:
    """The last number in a language model's reply, or a reward model's one output (at the last token)."""
    if api != "chat":
        values = reply["data"][0]["probs" if api == "classify" else "data"]
        (value,) = values[-1] if isinstance(values[-1], list) else values
        return float(value)
    text = reply["choices"][0]["message"]["content"] or ""
    if not (numbers := NUMBER.findall(text)):
        raise NoScoreError(f"there is no number in its reply {text[-100:]!r}")
    return float(numbers[-1])
