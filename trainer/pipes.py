"""Pipes to a process that may be frozen: `Connection.send` waits without end once the pipe is full, and
`Connection.recv` for the rest of a message of which a part has come."""

import asyncio
import os
import select
import socket
import struct
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from trainer.messages import Shutdown

LONGEST_S = 1e6  # more than any run waits; the system's counters end
MESSAGES_AT_ONCE = 64  # read before other work of the event loop gets its turn


def limit_waits(conn: Connection, seconds: float) -> None:
    """Make `conn.send` raise BlockingIOError if the other side reads nothing for so long, and
    `conn.recv` if it writes nothing. Call `recv` once something has arrived."""
    seconds = min(seconds, LONGEST_S)
    with socket.socket(fileno=os.dup(conn.fileno())) as pipe:  # every descriptor of the pipe has the limit
        # `send` tries once more to write what is left of a large message.
        for option, wait in ((socket.SO_SNDTIMEO, seconds / 2), (socket.SO_RCVTIMEO, seconds)):
            limit = struct.pack("ll", int(wait), int(wait % 1 * 1e6))
            pipe.setsockopt(socket.SOL_SOCKET, option, limit)


def has_room(conn: Connection) -> bool:
    """True if a small message can be sent without waiting for the reader."""
    poll = select.poll()
    poll.register(conn, select.POLLOUT)
    return bool(poll.poll(0))


def not_reading(role: str) -> TimeoutError:
    """The error to raise after a BlockingIOError of `send`: the rest of the message was not sent."""
    return TimeoutError(
        f"{role} has read no message for pipeline.deadline_s; raise it if this machine is only slow"
    )


def half_sent(role: str) -> TimeoutError:
    """The error to raise after a BlockingIOError of `recv`."""
    return TimeoutError(
        f"{role} has sent a part of a message and nothing more for pipeline.deadline_s; it may be frozen"
    )


class RoleClient:
    """The controller's end of the pipe to another role's process, for an event loop.

    Once the process is dead, or does not read what it is sent, every call raises one error with its name.
    """

    def __init__(self, conn: Connection, name: str) -> None:
        self.name, self._conn = name, conn
        self._dead: OSError | None = None
        self._replies: asyncio.Queue[Any] = asyncio.Queue()
        self._arrived = select.poll()  # whether a message waits to be read
        self._arrived.register(conn, select.POLLIN)
        asyncio.get_running_loop().add_reader(conn.fileno(), self._read)

    def close(self) -> None:
        """Ask the process to end."""
        asyncio.get_running_loop().remove_reader(self._conn.fileno())
        if self._dead is None and has_room(self._conn):  # the end of the pipe says the same
            with suppress(OSError):
                self._send(Shutdown())

    def _send(self, message: object) -> None:
        if self._dead is not None:
            raise self._dead
        try:
            self._conn.send(message)
        except OSError as e:
            raise self._end(e, not_reading(self.name)) from e

    def _read(self) -> None:
        try:
            for _ in range(MESSAGES_AT_ONCE):
                self._receive(self._conn.recv())
                if not self._arrived.poll(0):
                    break
        except (EOFError, OSError) as e:
            asyncio.get_running_loop().remove_reader(self._conn.fileno())
            self._received()  # what it sent before its death comes first
            self._end(e, half_sent(self.name))
        finally:
            self._received()

    async def _reply(self) -> Any:
        """The next answer, or the error after which none comes."""
        reply = await self._replies.get()
        if isinstance(reply, Exception):
            self._replies.put_nowait(reply)  # for whoever else waits
            raise reply
        return reply

    def _receive(self, message: Any) -> None:
        """Take in one message."""
        self._replies.put_nowait(message)

    def _received(self) -> None:
        """All messages that wait have been taken in."""

    def _fail(self, error: OSError) -> None:
        """Wake whoever waits for an answer with this error."""

    def _end(self, cause: Exception, frozen: OSError) -> OSError:
        died = ConnectionError(f"{self.name}'s process has died")
        self._dead = frozen if isinstance(cause, BlockingIOError) else died
        self._replies.put_nowait(self._dead)
        self._fail(self._dead)
        return self._dead
