"""A judge behind an OpenAI-compatible server: a language model that is asked to grade (`chat`), or a reward
model by vLLM 0.32's `classify` or `pooling`.

A request that fails by the server's or the network's fault is sent again, after pauses that double, with
jitter, until verifier.judge.deadline_s is over.
"""

import asyncio
import os
import random
import re
import time
from itertools import count
from typing import Any

import httpx2

from trainer.config import ConfigError, JudgeConfig

IN_FLIGHT = 64  # requests at once
PAUSE_S, MAX_PAUSE_S = 0.5, 10.0  # before the first retry, and at most
ATTEMPT_SHARE = 1 / 3  # of the deadline: the longest silence of one attempt
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
REFUSED = (400, 413, 422)  # such as a conversation that is longer than the model allows
NUMBER = re.compile(r"(?<![\w./])-?(?:\d+(?:\.\d+)?|\.\d+)")  # not the 10 of 8/10
Request = str | list[dict[str, str]]  # a text, or a conversation


class JudgeFailedError(RuntimeError):
    """The judge cannot go on: the run saves its steps and ends."""


class NoScoreError(Exception):
    """This completion has no score; the judge goes on."""


class Server:
    """The client. ConfigError if the URL is none, or the API key's variable is not set."""

    def __init__(self, config: JudgeConfig) -> None:
        if not re.fullmatch(r"https?://[^@\s]+", config.url):
            raise ConfigError("verifier.judge.url: expected http(s)://HOST:PORT, without a name or password")
        self._key = os.environ.get(config.api_key_env, "")
        if config.api_key_env and not self._key:
            raise ConfigError(f"verifier.judge.api_key_env: ${config.api_key_env} is not set")
        self._config, self._model = config, config.model
        self._name = f"the judge at {config.url}"
        self._http = httpx2.AsyncClient(
            base_url=config.url.rstrip("/").removesuffix("/v1"),
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            # A connection per call: the server may close an idle one just as we use it again.
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
        )
        self._free = asyncio.Semaphore(IN_FLIGHT)

    async def score(self, request: Request) -> float:
        """The score. NoScoreError if the server refuses this request, JudgeFailedError if it fails."""
        api, body = self._config.api, dict[str, Any]()
        turns = [{"role": "user", "content": request}] if isinstance(request, str) else request
        if api == "chat":
            body |= {"messages": turns, "temperature": 0, "max_tokens": self._config.max_tokens}
        else:
            body |= {"input": request} if isinstance(request, str) else {"messages": turns}
            body["use_activation"] = False
        async with self._free:
            try:
                if not self._model:
                    self._model = (await self._call("GET", "/v1/models"))["data"][0]["id"]
                route = "/v1/chat/completions" if api == "chat" else f"/{api}"
                return _score(api, await self._call("POST", route, {"model": self._model} | body))
            except (LookupError, TypeError, ValueError) as e:
                text = f"{self._name}: its reply is not that of verifier.judge.api {api}: {e!r}"
                raise JudgeFailedError(text) from e

    async def _call(self, method: str, route: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON of a successful answer."""
        deadline_s, began = self._config.deadline_s, time.monotonic()
        for attempt in count():
            remaining = began + deadline_s - time.monotonic()
            try:
                timeout = min(remaining, deadline_s * ATTEMPT_SHARE)
                response = await self._http.request(method, route, json=body, timeout=timeout)
                if response.is_success:
                    return response.json()
                text = response.text.replace(self._key, "***") if self._key else response.text
                reason = f"HTTP {response.status_code} {' '.join(text.split())[:300]}"
                if response.status_code in REFUSED:
                    raise NoScoreError(reason)
                if response.status_code not in TRANSIENT:
                    text = f"{self._name} refuses {route}: {reason}; correct url, api, model or key"
                    raise JudgeFailedError(text)
            except httpx2.HTTPError as e:
                reason = str(e) or type(e).__name__
            pause = random.uniform(0.5, 1) * min(MAX_PAUSE_S, PAUSE_S * 2**attempt)
            if time.monotonic() + pause >= began + deadline_s:
                break
            await asyncio.sleep(pause)
        raise JudgeFailedError(
            f"{self._name} has not answered for verifier.judge.deadline_s = {deadline_s:g} s ({reason}): "
            "start its server, or correct --verifier.judge.url"
        )

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
