"""A vLLM server for runs on other machines: vLLM's own server, with every route behind a shared secret.

    SIGMOID_RL_SECRET=... python -m trainer.engines.vllm_server --host 0.0.0.0 --port 8000 SETTINGS

SETTINGS are those of the run (`--recipe`, `--model.path`, `--engine.slots` ...). The run names the server in
engine.urls and sends its weights at the start and after each step, so only the architecture is taken from the
model's folder on this machine.
"""

import argparse
import asyncio
import hmac
import ipaddress
import os
import shutil
import socket
import sys
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from trainer import run_folder
from trainer.cli import parse
from trainer.config import ConfigError
from trainer.engines.vllm.engine import SECRET, check_installed, set_environment, vllm_settings
from trainer.gpus import cpu_cores
from trainer.models.resolve import resolve_model

UPLOADS = "SIGMOID_RL_INCOMING"  # environment variable: folder for uploads, in shared memory if possible
UPLOAD_ROUTE = "/weights"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Guard:
    """ASGI middleware around all of vLLM's routes: checks the secret, and answers PUT /weights itself."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ.get(SECRET, '')}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass requests with the right secret on to vLLM."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        secret = dict(scope["headers"]).get(b"authorization", b"Bearer ")
        if not hmac.compare_digest(secret, self._expected):
            if scope["type"] == "websocket":
                return await send({"type": "websocket.close", "code": 1008})
            return await _answer(send, 401, b'{"error": "wrong or missing secret"}')
        if scope["type"] == "http" and scope["path"] == UPLOAD_ROUTE and scope["method"] == "PUT":
            return await self._store(receive, send)
        return await self._app(scope, receive, send)

    async def _store(self, receive: Receive, send: Send) -> None:
        path = Path(os.environ[UPLOADS]) / "incoming.safetensors"
        partial = path.with_suffix(".part")
        with partial.open("wb") as file:
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                file.write(message.get("body", b""))
                more = message.get("more_body", False)
        partial.replace(path)  # a worker that still maps the previous file keeps it
        await _answer(send, 200, b'{"path": "%b"}' % str(path).encode())


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until a signal comes; a wrong setting ends it with one line on standard error."""
    command, formatter = "python -m trainer.engines.vllm_server", argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog=command, description=__doc__, formatter_class=formatter)
    address = "address to listen on; any but loopback needs the secret"
    parser.add_argument("--host", default="127.0.0.1", help=address)
    parser.add_argument("--port", type=int, default=8000)
    arguments, rest = parser.parse_known_args(argv)
    try:
        serve(arguments.host, arguments.port, rest)
    except ConfigError as e:
        raise SystemExit(f"error: {e}") from e


def serve(host: str, port: int, settings: Sequence[str]) -> None:
    """Check the settings, then run vLLM's server."""
    check_host(host)
    check_installed()
    check_port(host, port)
    config = parse(settings).config
    folder = resolve_model(config.model.path)
    run_folder.sweep(run_folder.shared())  # folders of servers that were killed
    uploads, lock = run_folder.own_folder(run_folder.shared())
    set_environment(config.engine.threads or len(cpu_cores()), uploads)
    # VLLM_SERVER_DEV_MODE opens vLLM's routes for weights and pauses; Guard protects them.
    os.environ |= {"VLLM_SERVER_DEV_MODE": "1", UPLOADS: str(uploads)}
    try:
        from vllm.entrypoints.launchers.api_server.entry import run_server
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        try:
            from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
        except ImportError:  # vLLM 0.32
            from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args

        args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
        server_settings = {
            "host": host,
            "port": port,
            "tokens_only": True,
            "disable_uvicorn_access_log": True,
            "middleware": [f"{Guard.__module__}.{Guard.__qualname__}"],
        }
        vars(args).update(vllm_settings(config, folder) | server_settings)
        validate_parsed_serve_args(args)
        print(f"vLLM server for {config.model.path} on {host}:{port} (starting)", file=sys.stderr, flush=True)
        asyncio.run(run_server(args))
    finally:
        shutil.rmtree(uploads, ignore_errors=True)
        lock.close()


def check_host(host: str) -> None:
    """ConfigError if other machines could reach the server and no secret is set."""
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback and not os.environ.get(SECRET):
        raise ConfigError(
            f"--host {host} is not loopback and ${SECRET} is empty; set the same secret on both machines"
        )


def check_port(host: str, port: int) -> None:
    """ConfigError if another process listens on the port."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as e:
            raise ConfigError(f"--host {host} --port {port}: {e.strerror}; give another --port") from e
