"""Processes forked from a server that has imported what a run needs: they start at once, where a new one
imports torch and transformers for five seconds."""

import importlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import forkserver, util
from pathlib import Path
from typing import Final

from trainer.launcher import supervisor

ROLES = (
    supervisor.ENGINES["torch"], supervisor.LEARNER, supervisor.CONTROLLER, supervisor.EVALUATION,
    supervisor.SERVER, supervisor.NUMERICS,
)  # fmt: skip
LOGS = "out.log", "err.log"
METHOD: Final = "forkserver"
CONTEXT = multiprocessing.get_context(METHOD)
CONTEXT.set_forkserver_preload([  # vLLM excepted; whichever test starts the server
    *(target.partition(":")[0] for target in ROLES),
    "transformers.models.qwen3.modeling_qwen3", "trainer.main",
])  # fmt: skip


class Forked:
    """`python -m MODULE FLAGS` in a session of its own: the subset of subprocess.Popen that tests use.

    Its roles are forked, too, by a child of its own, so that they belong to its process group.
    """

    def __init__(self, argv: Sequence[str], folder: Path, environment: dict[str, str]) -> None:
        for name in LOGS:
            (folder / name).write_text("")
        self._process = CONTEXT.Process(target=_launch, args=(argv[2:], str(folder), environment))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        self._process.join(0)
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _launch(words: Sequence[str], folder: str, environment: dict[str, str]) -> None:
    os.setsid()
    for stream, name in enumerate(LOGS, 1):
        with open(Path(folder) / name, "a") as file:
            os.dup2(file.fileno(), stream)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    vars(util)["spawnv_passfds"] = _fork_server
    server = vars(forkserver)["_forkserver"]
    server.set_forkserver_preload([])
    server.ensure_running()  # while this process has no pipe that the server would hold open
    vars(supervisor)["CONTEXT"] = CONTEXT
    module = importlib.import_module(words[0] if words[0] == "trainer.main" else f"{words[0]}.__main__")
    raise SystemExit(module.main([*words[1:]]))


def _fork_server(path: str, args: Sequence[str], fds: Sequence[int]) -> int:
    """In place of a new interpreter that imports everything again: `args` end with a call of its main."""
    if pid := os.fork():
        return pid
    try:
        first = 3
        for fd in (*sorted(fds), os.sysconf("SC_OPEN_MAX")):  # an end of a pipe more, and nobody would notice
            os.closerange(first, fd)  # that its other end is closed
            first = fd + 1
        exec(args[-1])
    finally:
        os._exit(0)
