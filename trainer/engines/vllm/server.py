"""vLLM on another machine: its own server, every route behind the shared secret, and a place for weights.

    SIGMOID_RL_SECRET=... python -m trainer.engines.vllm.server --host 0.0.0.0 --port 8000 SETTINGS

SETTINGS are the run's own (`--recipe`, `--model.path`, `--engine.slots` ...). The run names the server in
engine.urls and sends its weights when it starts and after each step, so the model's folder here gives but the
architecture.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import ipaddress
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from trainer import run_folder
from trainer.cli import parse
from trainer.config import ConfigError
from trainer.engines.vllm.engine import check_installed, environment, vllm_settings
from trainer.models.resolve import resolve_model

SECRET = "SIGMOID_RL_SECRET"
FOLDER = "SIGMOID_RL_INCOMING"  # where weights are put, in shared memory where there is some
UPLOAD = "/weights"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Guard:
    """ASGI middleware around all of vLLM's routes: no secret, no answer. PUT /weights stores a file here."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self.app = app
        self.expected = f"Bearer {os.environ.get(SECRET, '')}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let through what bears the secret."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        given = dict(scope["headers"]).get(b"authorization", b"Bearer ")
        if not hmac.compare_digest(given, self.expected):
            if scope["type"] == "websocket":
                return await send({"type": "websocket.close", "code": 1008})
            return await _answer(send, 401, b'{"error": "wrong or missing secret"}')
        if scope["type"] == "http" and scope["path"] == UPLOAD and scope["method"] == "PUT":
            return await self._store(receive, send)
        return await self.app(scope, receive, send)

    async def _store(self, receive: Receive, send: Send) -> None:
        path = Path(os.environ[FOLDER]) / "incoming.safetensors"
        aside = path.with_suffix(".part")
        with aside.open("wb") as file:
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                file.write(message.get("body", b""))
                more = message.get("more_body", False)
        aside.replace(path)  # what a worker still maps of the file before stays until it is done
        await _answer(send, 200, b'{"path": "%b"}' % str(path).encode())


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until a signal comes; one line on standard error for a wrong setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; not loopback: needs the secret"
    )
    parser.add_argument("--port", type=int, default=8000)
    given, rest = parser.parse_known_args(argv)
    try:
        serve(given.host, given.port, rest)
    except ConfigError as e:
        raise SystemExit(f"error: {e}") from e


def serve(host: str, port: int, settings: Sequence[str]) -> None:
    """Check what can be checked, then run vLLM's server."""
    check_host(host)
    check_installed()
    check_port(host, port)
    config = parse(settings).config
    folder = resolve_model(config.model.path)
    where = run_folder.SHARED if run_folder.SHARED.is_dir() else Path(tempfile.gettempdir())
    run_folder.sweep(where)  # what servers that were killed have left
    incoming, lock = run_folder.weight_folder(where)
    environment(config.engine.threads or len(os.sched_getaffinity(0)))
    # VLLM_SERVER_DEV_MODE opens vLLM's routes for weights and pauses; Guard stands before them all.
    os.environ |= {"VLLM_SERVER_DEV_MODE": "1", FOLDER: str(incoming)}
    try:
        from vllm.entrypoints.launchers.api_server.entry import run_server
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
        own = {"host": host, "port": port, "tokens_only": True, "disable_uvicorn_access_log": True}
        own |= {"middleware": ["trainer.engines.vllm.server.Guard"]}
        for key, value in (vllm_settings(config, folder) | own).items():
            if not hasattr(args, key):
                raise RuntimeError(f"vLLM's server knows no setting {key!r}")
            setattr(args, key, value)
        validate_parsed_serve_args(args)
        print(f"vLLM server for {config.model.path} on {host}:{port} (starting)", file=sys.stderr, flush=True)
        asyncio.run(run_server(args))
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
        lock.close()


def check_host(host: str) -> None:
    """ConfigError where others could reach the server and no secret is set."""
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback and not os.environ.get(SECRET):
        raise ConfigError(
            f"--host {host} is not loopback and ${SECRET} is empty; set the same secret here and there"
        )


def check_port(host: str, port: int) -> None:
    """ConfigError where something else listens."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as e:
            raise ConfigError(f"--host {host} --port {port}: {e.strerror}; give another --port") from e


if __name__ == "__main__":
    main()
