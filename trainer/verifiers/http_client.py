"""The client of an HTTP server that scores completions, a judge or a teacher, and a cache of what it said.

A request that fails by the server's or the network's fault is sent again, after pauses that double, with
jitter, until the deadline is over.
"""

import asyncio
import hashlib
import json
import os
import random
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, Generic, TypeVar

import httpx2

from trainer.config import ConfigError

IN_FLIGHT = 64  # requests at once
PAUSE_S, MAX_PAUSE_S = 0.5, 10.0  # before the first retry, and at most
ATTEMPT_SHARE = 1 / 3  # of the deadline: the longest silence of one attempt
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
REFUSED = (400, 413, 422)  # such as a conversation that is longer than the model allows
T = TypeVar("T")


class ServerFailedError(RuntimeError):
    """The server cannot go on: the run saves its steps and ends."""


class NoScoreError(Exception):
    """This completion has no score; the server goes on."""


class ScoringClient:
    """Calls of one event loop. ConfigError if the URL is none, or the API key's variable is not set.

    `role`: judge or teacher. `url_key`: the URL's key in the config, which errors name; `env` and
    `deadline_s` are keys api_key_env and deadline_s of the same section. `settings`: what can be wrong where
    the server refuses a route."""

    def __init__(self, role: str, url: str, env: str, deadline_s: float, url_key: str, settings: str) -> None:
        self._section = url_key.rpartition(".")[0]
        if not re.fullmatch(r"https?://[^@\s]+", url) or not _parses(url):
            raise ConfigError(
                f"{url_key}: expected http(s)://HOST:PORT, PORT a number, without a name or password"
            )
        self._key = os.environ.get(env, "")
        if env and not self._key:
            raise ConfigError(f"{self._section}.api_key_env: ${env} is not set")
        self._deadline_s, self._url_key, self._settings = deadline_s, url_key, settings
        self.name = f"the {role} at {url}"
        self._http = httpx2.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            # A connection per call: the server may close an idle one just as we use it again.
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
        )
        self._free = asyncio.Semaphore(IN_FLIGHT)

    async def call(self, method: str, route: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON of a successful answer. NoScoreError if the server refuses this body, ServerFailedError if
        it fails."""
        async with self._free:
            return await self._call(method, route, body)

    async def _call(self, method: str, route: str, body: dict[str, Any] | None) -> Any:
        deadline_s, began = self._deadline_s, time.monotonic()
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
                    text = f"{self.name} refuses {route}: {reason}; correct {self._settings}"
                    raise ServerFailedError(text)
            except httpx2.HTTPError as e:
                reason = str(e) or type(e).__name__
            pause = random.uniform(0.5, 1) * min(MAX_PAUSE_S, PAUSE_S * 2**attempt)
            if time.monotonic() + pause >= began + deadline_s:
                break
            await asyncio.sleep(pause)
        raise ServerFailedError(
            f"{self.name} has not answered for {self._section}.deadline_s = {deadline_s:g} s "
            f"({reason}): start its server, or correct --{self._url_key}"
        )


def _parses(url: str) -> bool:
    """True unless its port is no number, say."""
    try:
        return bool(httpx2.URL(url).host)
    except httpx2.InvalidURL:
        return False


class Cache(Generic[T]):
    """The answers of `ask` to the latest `size` requests; one under way is not asked again, either."""

    def __init__(self, ask: Callable[[Any], Awaitable[T]], size: int) -> None:
        self._ask, self._size = ask, size
        self._tasks: OrderedDict[bytes, asyncio.Future[T]] = OrderedDict()

    async def __call__(self, request: Any) -> T:
        """The answer to a request, which is JSON-able."""
        key = hashlib.sha256(json.dumps(request).encode()).digest()
        if key not in self._tasks:
            self._tasks[key] = asyncio.ensure_future(self._ask(request))
            if len(self._tasks) > self._size:
                self._tasks.popitem(last=False)
        self._tasks.move_to_end(key)
        return await asyncio.shield(self._tasks[key])  # another rollout may wait for it, too
