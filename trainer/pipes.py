"""Sending to a process that may be frozen: `Connection.send` waits without end once the pipe is full."""

import os
import select
import socket
import struct
from multiprocessing.connection import Connection

LONGEST_S = 1e6  # more than any run waits; the system's counters end


def limit_send(conn: Connection, seconds: float) -> None:
    """From now on `conn.send` raises BlockingIOError if the other side reads nothing for so long."""
    wait = min(seconds, LONGEST_S) / 2  # `send` tries once more to write what is left of a large message
    with socket.socket(fileno=os.dup(conn.fileno())) as pipe:  # every descriptor of the pipe has the limit
        limit = struct.pack("ll", int(wait), int(wait % 1 * 1e6))
        pipe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def has_room(conn: Connection) -> bool:
    """Whether a small message can be sent without waiting for the reader."""
    poll = select.poll()
    poll.register(conn, select.POLLOUT)
    return bool(poll.poll(0))


def not_reading(role: str) -> TimeoutError:
    """The error to raise after such a BlockingIOError: a part of the message is sent, and none can follow."""
    return TimeoutError(
        f"{role} has read no message for pipeline.deadline_s; raise it if this machine is only slow"
    )
