"""The names of the role processes, the signals that stop them, and the report of the error that ends one."""

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType

from trainer.config import ConfigError
from trainer.messages import Failed
from trainer.telemetry import send

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # each stops a run, or a sweep, in order
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of Linux's prctl.h
_ends_with_launcher = False


def role_name(kind: str, index: int) -> str:
    """The name of a role's process: `engine`, `engine-1`, `engine-2` ..."""
    return kind if index == 0 else f"{kind}-{index}"


def role_kind(role: str) -> str:
    """`engine` of `engine-2`."""
    return role.partition("-")[0]


def role_index(role: str) -> int:
    """2 of `engine-2`, 0 of `engine`."""
    return int(role.partition("-")[2] or 0)


def end_with_launcher(launcher: int) -> None:
    """Have the kernel end this process, which is starting, with the launcher; on Linux, for its children."""
    global _ends_with_launcher
    _ends_with_launcher = os.getppid() == launcher
    if _ends_with_launcher:
        signal_at_death_of_parent(signal.SIGKILL)
    if os.getppid() != launcher and not Path(f"/proc/{launcher}").exists():
        os._exit(1)  # it died before


def started() -> None:
    """Let the role outlive the launcher from now on: the step under way is finished and saved."""
    if _ends_with_launcher:
        signal_at_death_of_parent(0)


def signal_at_death_of_parent(number: int) -> None:
    """Have the kernel send this process a signal (0: none) when its parent dies; on Linux."""
    if prctl := getattr(ctypes.CDLL(None), "prctl", None):
        prctl(PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Have the kernel make this process the parent of descendants whose parent dies; on Linux."""
    if prctl := getattr(ctypes.CDLL(None), "prctl", None):
        prctl(PR_SET_CHILD_SUBREAPER, 1)


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """The signals to stop that have come so far; each only adds to the list: a handler must take no locks."""
    came: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        came.append(signum)

    nohup = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    before = {stop: signal.signal(stop, note) for stop in set(STOPS) - nohup}
    try:
        yield came
    finally:
        for stop, handler in before.items():
            signal.signal(stop, handler)


def run_role(
    role: str,
    telemetry: Connection | None,
    work: Callable[[], None],
    diagnose: Callable[[Exception], tuple[str, Exception]] | None = None,
    ends_with_peer: bool = True,
) -> None:
    """Do a role's work; if it fails, report the error to the launcher and exit with code 1.

    With `ends_with_peer`, a broken pipe is no failure: the process at its other end died, and the launcher
    watches that process. `diagnose` may name another role, and a cause that says more than the
    error. A process without `telemetry` (a learner rank that torchrun started) reports on standard error.
    """
    try:
        work()
    except Exception as error:
        if ends_with_peer and isinstance(error, EOFError | BrokenPipeError | ConnectionResetError):
            return
        role, cause = diagnose(error) if diagnose else (role, error)
        message = str(cause) or repr(cause)
        if telemetry is None:
            print(f"error: {role}: {message}", file=sys.stderr)
        else:
            user_error = isinstance(cause, ConfigError)
            send(telemetry, Failed(role, message, traceback.format_exc(), user_error))
        raise SystemExit(1) from error
