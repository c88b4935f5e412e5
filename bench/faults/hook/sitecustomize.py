"""Python imports this at its start in every process of a run under test: it reports the roles' states.

A role's clock (`trainer.telemetry.Clock`) knows what the role does. Each change of state goes as a datagram
to the socket in FAULTS_SOCKET; the trainer itself has no code for this. FAULTS_CLOCK_JUMP makes the wall
clock jump to and fro by so many seconds.
"""

import os
import socket
import time
from contextlib import suppress


def _report_states(address: str) -> None:
    from trainer.engines.request_queue import RequestQueue
    from trainer.telemetry import Clock
    from trainer.types import Request

    add, enter, to = (
        RequestQueue.add,
        Clock.enter,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK),
    )

    def reporting(self: Clock, state: str) -> str:
        left = enter(self, state)
        if left != state:
            with suppress(OSError):  # the driver has ended, or its queue is full
                to.sendto(f"{self.role} {state}".encode(), address)
        return left

    Clock.enter = reporting  # type: ignore[method-assign]  # this is the point of the module

    def adding(self: RequestQueue, request: Request) -> None:
        if request.evaluation:  # the clock says so only afterwards
            with suppress(OSError):
                to.sendto(b"engine evaluate", address)
        add(self, request)

    RequestQueue.add = adding  # type: ignore[method-assign]  # as above


def _let_the_wall_clock_jump(seconds: float) -> None:
    real = time.time
    time.time = lambda: real() + seconds * (int(real()) % 4 - 1.5)


if address := os.environ.get("FAULTS_SOCKET"):
    _report_states(address)
if jump := os.environ.get("FAULTS_CLOCK_JUMP"):
    _let_the_wall_clock_jump(float(jump))
