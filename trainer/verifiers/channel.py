"""The pool's end of a connection to a worker or a sandbox: messages in both directions, each a line of JSON.

JSON and not pickle, since the other end may have executed a model's text; its end is `code_runner.Channel`.
"""

import asyncio
import json
import socket
from subprocess import DEVNULL
from typing import Any

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
# Options of a process that may execute a model's text; Ctrl-C reaches the group of the launcher alone.
DETACHED: dict[str, Any] = {"stdin": DEVNULL, "stdout": DEVNULL, "stderr": DEVNULL, "start_new_session": True}


async def ask(conn: socket.socket, message: Any, limit: int) -> Any:
    """The reply to a message. OSError if there is none, or one of more than `limit` bytes; ValueError or
    RecursionError if it is no JSON."""
    loop, reply = asyncio.get_running_loop(), bytearray()
    await loop.sock_sendall(conn, json.dumps(message).encode() + b"\n")
    while not reply.endswith(b"\n"):
        chunk = await loop.sock_recv(conn, 1 << 16)
        reply += chunk
        if not chunk or len(reply) > limit:
            raise ConnectionError(
                "it closed the connection" if not chunk else f"its reply exceeds {limit} bytes"
            )
    return json.loads(reply)
