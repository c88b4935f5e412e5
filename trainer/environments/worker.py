"""The process of one episode at a time, which the fork server forks: it hosts the user's class.

    start(row)     -> messages, or (messages, tools)     before the model's first turn
    step(message)  -> messages, reward, done             after each turn of the model
    close()                                              optional; at the episode's end
    prepare(**options)                                   optional and static; once, before the processes are

Each may be async. `row` is the data's row, a dict. A message is a dict with a role and a content, both text;
`step` gets the model's, with role `assistant`. Messages may also be one text, a message of the user's. The
reward is a number, or None: this turn has none. `tools` are OpenAI function schemas, for the chat template.
Text that they print travels with the reply.
"""

import asyncio
import contextlib
import inspect
import io
import math
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.verifiers.code_runner import Channel
from trainer.verifiers.fork_server import Serve
from trainer.verifiers.kinds.function import imported
from trainer.verifiers.sandbox import limit, lock_down

MAX_PRINTED = 2000  # characters of one call's prints


def hosting(kind: str, options: Mapping[str, Any], network: bool, seconds: float) -> Serve:
    """Import the class; returns the work of a process, of so many CPU seconds at most."""
    environment = environment_class(kind, options)
    if prepare := getattr(environment, "prepare", None):
        prepare(**options)

    def said(printed: io.StringIO, instance: Any) -> dict[str, Any]:
        text = printed.getvalue()[:MAX_PRINTED].encode(errors="replace").decode()  # half a pair is no text
        return {"printed": text, "closes": hasattr(instance, "close")}

    def serve(pool: Channel) -> None:
        loop = asyncio.new_event_loop()  # it needs sockets
        if not network:
            limit(math.ceil(seconds))
            lock_down()
        asyncio.set_event_loop(loop)
        instance: Any = None
        while True:
            name, argument, number = pool.receive()
            call, printed = name, io.StringIO()
            try:
                with contextlib.redirect_stdout(printed):
                    if name == "start":
                        call = "__init__"
                        instance = environment(**options)
                        call = name
                    result = _call(loop, instance, name, argument)
                pool.send({"call": number, "result": result} | said(printed, instance))
            except Exception as e:  # also of a result that is no JSON
                error = f"{call} raised {_described(e)}"
                pool.send({"call": number, "error": error} | said(printed, instance))

    return serve


def environment_class(kind: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """The user's class; ConfigError if it cannot be imported, is none, or does not take the options."""
    environment = imported("environment.kind", kind)
    if missing := [name for name in ("start", "step") if not callable(getattr(environment, name, None))]:
        expected = "a class with start(row) and step(message); see docs/environments.md"
        raise ConfigError(f"environment.kind {kind}: it has no {missing[0]}; expected {expected}")
    try:
        signature = inspect.signature(environment)
    except ValueError:  # of a class that is not Python's, which says so itself
        return environment
    try:
        signature.bind(**options)
    except TypeError as e:
        takes = ", ".join(signature.parameters) or "none"
        raise ConfigError(f"environment.options: {kind} {e}; it takes {takes}") from e
    return environment


def _described(error: Exception) -> str:
    """The error and the user's line that raised it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300] + where


def _call(loop: asyncio.AbstractEventLoop, instance: Any, name: str, argument: Any) -> Any:
    """The result of a function of the environment, be it async or not."""
    result = instance.close() if name == "close" else getattr(instance, name)(argument)
    return loop.run_until_complete(result) if inspect.isawaitable(result) else result
