"""Python imports this at its start in every process of a run under test: it reports the roles' states.

A role's clock (`trainer.telemetry.Clock`) knows what the role does. Each change of state goes as a datagram
to the socket in FAULTS_SOCKET; the trainer itself has no code for this. Where a file of this name with the
suffix .poison exists, the role in it computes something that is not finite, once. FAULTS_CLOCK_JUMP makes the
wall clock jump to and fro by so many seconds.
"""

import math
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


def _report_states(address: str) -> None:
    from trainer.engines.backend import RequestQueue
    from trainer.telemetry import Clock
    from trainer.types import Request

    add, enter = RequestQueue.add, Clock.enter
    to = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)

    def reporting(self: Clock, state: str) -> str:
        previous = enter(self, state)
        if previous != state:
            with suppress(OSError):  # the driver has ended, or its queue is full
                to.sendto(f"{self.role} {state}".encode(), address)
            if (self.role, state) in _POISONED:
                _poison(Path(address + ".poison"), self.role)
        return previous

    Clock.enter = reporting  # type: ignore[method-assign]  # this is the point of the module

    def adding(self: RequestQueue, request: Request) -> None:
        if request.evaluation:  # the clock says so only afterwards
            with suppress(OSError):
                to.sendto(b"engine evaluate", address)
        add(self, request)

    RequestQueue.add = adding  # type: ignore[method-assign]  # it also reports


_POISONED = {("learner", "forward_backward"), ("engine", "generate")}  # where a role begins to compute


def _poison(file: Path, role: str) -> None:
    """The learner's next gradient is not a number; the engine's next log-probabilities are infinite."""
    if not file.exists() or file.read_text() != role:
        return
    file.unlink()
    if role == "learner":
        owner: Any = sys.modules["torch"].Tensor
        name = "backward"
    else:
        owner, name = sys.modules["trainer.engines.torch.engine"].TorchEngine, "_logits"
    real = getattr(owner, name)

    def poisoned(self: Any, *args: Any) -> Any:
        setattr(owner, name, real)
        return real(self * math.nan) if role == "learner" else math.inf * real(self, *args).abs()

    setattr(owner, name, poisoned)


def _let_the_wall_clock_jump(seconds: float) -> None:
    real = time.time
    time.time = lambda: real() + seconds * (int(real()) % 4 - 1.5)


if address := os.environ.get("FAULTS_SOCKET"):
    _report_states(address)
if jump := os.environ.get("FAULTS_CLOCK_JUMP"):
    _let_the_wall_clock_jump(float(jump))
