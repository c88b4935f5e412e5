"""The fork server: a minimal process that imports a user's code once and then forks workers.

    pool --- 4-byte slot + a socket ---> fork server   "a new worker for this slot; kill the old one"
    pool <-- JSON lines, both ways ----> worker        such as one item, one verdict

A fork takes milliseconds, so a killed worker is replaced at once. It is safe here, since the fork server
has no threads. It has neither the run's main script nor its environment nor its open files.

`ForkServer` is the pool's end, `main` the process.
"""

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.roles import adopt_orphans, signal_at_death_of_parent
from trainer.verifiers.channel import DETACHED, ONE_THREAD
from trainer.verifiers.code_runner import Channel

START_S, SLOW_S = 120.0, 5.0  # limit for the fork server to import a user's code; from when on it is said
READY = b"ready"
SLOT_BYTES = 4
_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "TZ")
_PROJECT = str(Path(__file__).parents[2])
_INSTALLED = re.compile(r"/(site|dist)-packages(/|$)|/lib/python3")
Serve = Callable[[Channel], None]  # a worker's work: answer what comes, until the pool closes its connection


class ForkServer:
    """Starts workers. ConfigError, which begins with `label`, if the user's code cannot be imported.

    `program`: the `module:function` that gets the `arguments` (JSON-able), imports the user's code and
    returns the workers' Serve. `python`: an interpreter other than this one."""

    def __init__(
        self,
        program: str,
        arguments: Sequence[Any],
        label: str,
        note: Callable[[str], None],
        python: str = "",
    ) -> None:
        self._program, self._label, self._note = [program, json.dumps(arguments), label], label, note
        self._python = os.path.abspath(python or sys.executable)
        self.process, self._control = self._start()

    def worker(self, slot: int) -> socket.socket:
        """The connection of a new worker, not waited for; the fork server kills the slot's old one."""
        ours, worker_end = socket.socketpair()
        ours.setblocking(False)
        with worker_end:
            request = [slot.to_bytes(SLOT_BYTES, "big")], [worker_end.fileno()]
            try:
                socket.send_fds(self._control, *request)
            except OSError:
                self._note("the fork server died and is restarted")
                self.process, self._control = self._start()
                socket.send_fds(self._control, *request)
        return ours

    def close(self) -> None:
        """End the fork server, and the workers with it."""
        self._control.close()
        _end(self.process)

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Start the process with a minimal environment and wait until it has imported the user's code."""
        ours, server_end = socket.socketpair()
        environment = {k: os.environ[k] for k in _ENVIRONMENT if k in os.environ}
        # Without threads, forking is safe, and the cores are left to the learner and the engine.
        environment |= ONE_THREAD
        paths = [os.path.abspath(path) for path in sys.path if not path or os.path.exists(path)]
        if self._python != os.path.abspath(sys.executable):  # it has a library and packages of its own
            paths = [path for path in (*paths, _PROJECT) if not _INSTALLED.search(path)]
        environment |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "0"}
        with server_end:
            fd = str(server_end.fileno())
            command = [self._python, "-m", "trainer.verifiers.fork_server", fd, *self._program]
            try:
                server = subprocess.Popen(command, env=environment, pass_fds=[int(fd)], **DETACHED)
            except OSError as e:
                raise ConfigError(f"{self._label}: cannot start its interpreter: {e}") from e
        if (reply := self._reply(ours)) != READY:
            ours.close()
            _end(server)
            needs = f"Python with NumPy and sigmoid-rl: {self._python}"
            died = f"{self._label}: the fork server died at its start ({needs})"
            raise ConfigError(reply.decode() or died)
        return server, ours

    def _reply(self, control: socket.socket) -> bytes:
        """The message of a fork server that has imported the user's code, or has not."""
        control.settimeout(SLOW_S)
        try:
            return control.recv(65536)
        except TimeoutError:
            self._note(f"{self._label}: its import takes more than {SLOW_S:g} s; waiting up to {START_S:g} s")
        control.settimeout(START_S - SLOW_S)
        try:
            return control.recv(65536)
        except TimeoutError:
            return f"{self._label}: no import within {START_S:g} s".encode()


def _end(server: subprocess.Popen[bytes]) -> None:
    """Wait for the fork server, whose connection is closed, or kill it; its workers die with it."""
    try:
        server.wait(5.0)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def main(fd: int, program: str, arguments: Sequence[Any], label: str) -> None:
    """Serve the pool on socket `fd` until it closes, then kill every worker."""
    control = socket.socket(fileno=fd)
    module, _, name = program.partition(":")
    signal_at_death_of_parent(signal.SIGKILL)  # the import may hang, and watches no socket
    try:
        serve: Serve = getattr(import_module(module), name)(*arguments)
    except Exception as e:  # the pool raises it in the controller
        error = str(e) if isinstance(e, ConfigError) else f"{label}: {type(e).__name__}: {e}"
        control.sendall(error.encode())
        return
    # It would come at the end of the thread that started this process, too; from here on the socket says it.
    signal_at_death_of_parent(0)
    control.sendall(READY)
    adopt_orphans()
    workers: dict[bytes, int] = {}
    while True:
        slot, fds, _, _ = socket.recv_fds(control, SLOT_BYTES, 1)
        if not fds:
            break
        _reap(workers)
        _kill(workers.pop(slot, None))
        if not (pid := os.fork()):
            control.close()
            _work(fds[0], serve)
        os.close(fds[0])
        workers[slot] = pid
    for pid in _children(os.getpid()):
        _kill(pid)


def _reap(workers: dict[bytes, int]) -> None:
    """Forget the children that have ended: workers, and what they had started."""
    with suppress(ChildProcessError):  # there are none
        while ended := os.waitpid(-1, os.WNOHANG)[0]:
            for slot in [slot for slot, pid in workers.items() if pid == ended]:
                del workers[slot]


def _kill(pid: int | None) -> None:
    """Kill a child, with what it has started, and reap it; its id cannot be reused before that."""
    if pid is not None:
        _kill_started(pid)
        os.waitpid(pid, 0)


def _kill_started(pid: int) -> None:
    """Kill a process and all that descends from it, such as the servers of an environment; on Linux."""
    with suppress(OSError):  # it has ended, or is another user's
        os.kill(pid, signal.SIGSTOP)  # so that it starts no more
        for child in _children(pid):
            _kill_started(child)
        os.kill(pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    """The processes that this one has started, or that the kernel has given it since their parent died."""
    texts = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # that thread has ended
            texts.append(path.read_text())
    return [int(child) for text in texts for child in text.split()]


def _work(fd: int, serve: Serve) -> None:
    """Run the worker until the pool closes its connection; never returns."""
    try:
        os.chdir("/")
        signal_at_death_of_parent(signal.SIGKILL)  # so that a looping worker does not outlive the run
        serve(Channel(fd, fd))
    finally:
        for pid in _children(os.getpid()):
            _kill_started(pid)
        os._exit(0)  # skips the fork server's clean-up


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main(int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), sys.argv[4])
