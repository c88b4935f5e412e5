"""The HTTP routes over one model. Each needs the token, and errors have OpenAI's format.

When a client leaves, aiohttp cancels the handler, and the engines abort its requests.
"""

import asyncio
import hmac
import traceback
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from trainer.config import ConfigError
from trainer.serve.answers import answer, chat_choice, id_choice, text_choice
from trainer.serve.body import (
    Chat,
    Completions,
    Generate,
    Served,
    chat_prompts,
    id_prompts,
    read,
    requests_of,
    text_prompts,
)  # fmt: skip
from trainer.types import Completion, Request

MAX_BYTES = 32 << 20  # of a request
SHOWN = 500  # characters of an error message
# The routes that generate: the kind of answer, its body, the body's prompts, and a completion as a choice.
GENERATING: dict[str, tuple[str, type[Any], Callable[..., Any], Callable[..., dict[str, Any]]]] = {
    "/inference/v1/generate": ("generate", Generate, id_prompts, id_choice),
    "/v1/completions": ("text_completion", Completions, text_prompts, text_choice),
    "/v1/chat/completions": ("chat.completion", Chat, chat_prompts, chat_choice),
}


class Routes:
    """The handlers of one model's routes."""

    def __init__(self, served: Served) -> None:
        self._served = served

    def application(self, token: str) -> web.Application:
        """The application; `token` is what every request must bring."""

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            authorization = request.headers.get("Authorization", "").encode()
            if not hmac.compare_digest(authorization, f"Bearer {token}".encode()):
                return _error(401, "expected Authorization: Bearer TOKEN, with this server's token")
            try:
                return await handler(request)
            except ConfigError as e:
                return _error(400, str(e))
            except web.HTTPException as e:
                return _error(e.status, f"{request.method} {request.path}: {e.reason}")
            except Exception as e:
                traceback.print_exc()  # to the log of this process
                return _error(500, f"the server failed: {e!r}")

        application = web.Application(middlewares=[guard], client_max_size=MAX_BYTES)
        application.router.add_get("/v1/models", self.models)
        for path in GENERATING:
            application.router.add_post(path, self.generate)
        return application

    async def models(self, request: web.Request) -> web.Response:
        """The one model."""
        card = {"id": self._served.name, "object": "model", "created": 0, "owned_by": "sigmoid-rl"}
        card["max_model_len"] = self._served.max_length
        return web.json_response({"object": "list", "data": [card]})

    async def generate(self, request: web.Request) -> web.Response:
        """The answer of a route that generates: each prompt's completions, one choice each."""
        kind, body_of, prompts_of, choice = GENERATING[request.path]
        body = read(body_of, await self._json(request))
        requests = requests_of(prompts_of(body, self._served), body, self._served)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._complete(one)) for one in requests]
        generated = [(one, task.result()) for one, task in zip(requests, tasks, strict=True)]
        choices = [choice(c, one, body, self._served) for one, completions in generated for c in completions]
        return web.json_response(answer(kind, choices, generated, self._served.name))

    async def _json(self, request: web.Request) -> dict[str, Any]:
        try:
            values = await request.json()
        except (ValueError, LookupError, RecursionError) as e:
            raise ConfigError(f"the body is no JSON: {e}") from e
        if isinstance(values, dict) and values.get("model") not in (None, name := self._served.name):
            raise web.HTTPNotFound(reason=f"this server's model is {name}")
        return values

    async def _complete(self, request: Request) -> list[Completion]:
        completions = [c async for ended in self._served.engines.stream(request) for c in ended]
        return sorted(completions, key=lambda c: c.index)


def _error(status: int, message: str) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message[:SHOWN], "type": kind, "param": None, "code": None}
    return web.json_response({"error": error}, status=status)
