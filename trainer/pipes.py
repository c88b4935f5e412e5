"""Pipes to a process that may be frozen: `Connection.send` waits without end once the pipe is full, and
`Connection.recv` for the rest of a message of which a part has come."""

import os
import select
import socket
import struct
from multiprocessing.connection import Connection

LONGEST_S = 1e6  # more than any run waits; the system's counters end


def limit_waits(conn: Connection, seconds: float) -> None:
    """From now on `conn.send` raises BlockingIOError if the other side reads nothing for so long, and
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
