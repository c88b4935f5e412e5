"""The pool: every item gets a verdict; nothing hangs, escapes or gets lost in a worker."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from trainer.config import ConfigError, VerifierConfig
from trainer.types import Answer, Prompt, Verdict
from trainer.verifiers.pool import VerifierPool

LOOP = asyncio.Runner()  # a pool belongs to one event loop
Item = tuple[str, Answer, dict[str, Any]]  # completion, answer, columns
USERS = "rewards_of_a_user:judge"


def prompt(answer: Answer, metadata: dict[str, Any] | None = None) -> Prompt:
    return Prompt("0", "Question?", (1,), answer, metadata or {})


@contextmanager
def opened(kind: str, workers: int = 1, timeout_s: float = 5.0, **more: Any) -> Iterator[VerifierPool]:
    """A pool, closed at the end of the block."""
    pool = VerifierPool(VerifierConfig(kind=kind, workers=workers, timeout_s=timeout_s), **more)
    yield pool
    pool.close()


def judge(pool: VerifierPool, *items: Item) -> list[Verdict]:
    async def judge_all() -> list[Verdict]:
        async with asyncio.timeout(60):
            return list(await asyncio.gather(*(pool.score(prompt(a, m), text) for text, a, m in items)))

    return LOOP.run(judge_all())


def outcomes(pool: VerifierPool, *items: Item) -> list[str]:
    return [v.outcome for v in judge(pool, *items)]


def test_math_compares_by_value_with_each_answer_and_a_hundred_at_once_are_all_answered() -> None:
    half, point = r"\frac{1}{2}", r"\left(3, \frac{\pi}{2}\right)"
    several = ("42", half, r"\frac{\pi}{2}")  # 42 must be written as a number
    expected: list[tuple[str, Answer, str]] = [
        ("0.5", half, "correct"),
        (r"\frac{2}{4}", half, "correct"),
        ("0.6", half, "wrong"),
        (r"(3, \pi/2)", point, "correct"),
        (r"(\pi/2, 3)", point, "wrong"),
        ("1 + 2x", "2x+1", "correct"),
        (r"\frac{2}{4}", several, "correct"),
        (r"\pi/2", several, "correct"),
        ("17+25", several, "wrong"),
    ]
    for i in range(1, 101):
        gold = rf"\frac{{{i + i % 2}}}{{3}}"
        expected.append((rf"\frac{{{2 * i}}}{{6}}", gold, "wrong" if i % 2 else "correct"))
    with opened("math", workers=2, timeout_s=8.0) as pool:
        verdicts = outcomes(pool, *((rf"\boxed{{{text}}}", answer, {}) for text, answer, _ in expected))
    assert verdicts == [outcome for *_, outcome in expected]


def test_an_answer_that_hangs_in_c_is_killed_and_the_pool_goes_on() -> None:
    tower = (r"\boxed{7^{7^{7^{7}}}}", r"\frac{3}{7}", {})
    third = (r"\boxed{\frac{2}{6}}", r"\frac{1}{3}", {})
    with opened("math", timeout_s=1.5) as pool:
        verdicts = outcomes(pool, third, tower, third, tower, third)
    assert verdicts == ["correct", "timeout", "correct", "timeout", "correct"]


USER = """
import os, socket, subprocess, time
LOADED_FROM = os.getcwd()

def judge(completion, answer, metadata):
    if completion == "loop":
        while True: pass
    if completion == "exit": os._exit(3)
    if completion == "raise": raise KeyError("no such column")
    if completion == "two": return 2.0
    if completion == "forge":  # a reply of 4,000 nested lists, on whichever descriptor leads to the pool
        for fd in range(3, 64):
            try: os.write(fd, b"[" * 4000 + b"\\n")
            except OSError: pass
    if completion == "memory": return float(len(bytearray(16 << 30)) > 0)
    if completion == "secret":
        return float("MY_TOKEN" in os.environ or "hunter2" in open("/proc/self/environ").read())
    if completion == "cwd": return float(os.getcwd() != LOADED_FROM)
    return float(completion == answer) if completion != "half" else 0.5

def escapes(completion, answer, metadata):
    path = metadata["path"]
    tries = [
        lambda: open(path, "w"), lambda: open(path, "ab"), lambda: os.open(path, os.O_CREAT | os.O_RDWR),
        lambda: os.system("touch " + path), lambda: subprocess.run(["touch", path]), os.fork,
        lambda: os.posix_spawn("/bin/touch", ["touch", path], {}), lambda: os.mkdir(path),
        lambda: os.execv("/bin/touch", ["touch", path]), lambda: os.kill(os.getppid(), 9),
        socket.socket, lambda: os.unlink(metadata["present"]), lambda: os.rename(metadata["present"], path),
        lambda: __import__("ctypes").CDLL(None),
    ]
    done = 0
    for attempt in tries:
        try: attempt()
        except OSError: continue
        done += 1
    return done / len(tries)
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rewards_of_a_user.py").write_text(USER)
    (tmp_path / "broken_rewards.py").write_text("import nothing_of_this_name\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("MY_TOKEN", "hunter2")
    return tmp_path


def test_a_users_function_judges_and_its_failures_are_contained(user_module: Path) -> None:
    expected = {
        "a": "correct", "b": "wrong", "half": "wrong", "loop": "timeout", "exit": "crash", "raise": "crash",
        "two": "crash", "memory": "crash", "secret": "wrong", "cwd": "correct", "forge": "crash",
    }  # fmt: skip
    with opened(USERS, workers=2, timeout_s=3.0) as pool:
        verdicts = judge(pool, *((text, "a", {}) for text in [*expected, "a"]))
    assert [v.outcome for v in verdicts] == [*expected.values(), "correct"]
    assert [v.score for v in verdicts][:4] == [1.0, 0.0, 0.5, 0.0]


def test_a_function_that_only_crashes_is_reported_once_and_ends_the_run(user_module: Path) -> None:
    warnings: list[str] = []
    with opened(USERS, workers=2, warn=warnings.append) as pool:
        assert judge(pool, *[("raise", "a", {})] * 49)[-1].outcome == "crash"
        (line,) = warnings
        assert "KeyError: 'no such column'" in line
        with pytest.raises(ConfigError, match="first 50 verdicts was a crash, the first by KeyError"):
            judge(pool, ("raise", "a", {}))


def test_a_cancelled_item_leaves_no_answer_for_the_next(user_module: Path) -> None:
    async def cancel_then_ask() -> Verdict:
        looping = asyncio.create_task(pool.score(prompt("a"), "loop"))
        await asyncio.sleep(0.3)
        looping.cancel()
        async with asyncio.timeout(15):
            return await pool.score(prompt("b"), "b")

    with opened(USERS, timeout_s=20.0) as pool:
        assert LOOP.run(cancel_then_ask()).outcome == "correct"


def test_an_item_that_is_cancelled_after_the_end_starts_no_process(
    user_module: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def close_then_cancel() -> None:
        looping = asyncio.create_task(pool.score(prompt("a"), "loop"))
        await asyncio.sleep(0.3)
        pool.close()
        looping.cancel()
        await asyncio.wait([looping])

    with opened(USERS, timeout_s=20.0) as pool:
        assert pool._workers is not None
        server = pool._workers.fork_server.process
        LOOP.run(close_then_cancel())
        assert pool._workers.fork_server.process is server and "fork server died" not in caplog.text


def test_the_pool_survives_its_fork_server(user_module: Path) -> None:
    with opened(USERS) as pool:
        assert pool._workers is not None
        os.kill(pool._workers.fork_server.process.pid, signal.SIGKILL)
        pool._workers.fork_server.process.wait()
        first, second = outcomes(pool, ("a", "a", {}), ("a", "a", {}))
        assert first in ("crash", "correct") and second == "correct"


def test_closing_the_pool_kills_a_looping_worker(user_module: Path) -> None:
    async def leave_it_looping() -> None:
        task = asyncio.create_task(pool.score(prompt("a"), "loop"))
        await asyncio.sleep(0.3)
        assert pool._workers is not None
        server = pool._workers.fork_server.process.pid
        children = Path(f"/proc/{server}/task/{server}/children")
        if children.exists():
            worker = int(children.read_text().split()[0])
            pool.close()
            assert not Path(f"/proc/{worker}").exists()
        task.cancel()

    with opened(USERS, timeout_s=60.0) as pool:
        LOOP.run(leave_it_looping())


def test_nothing_that_a_scorer_executes_escapes(user_module: Path, tmp_path: Path) -> None:
    present, path = tmp_path / "present", tmp_path / "written"
    present.write_text("here")
    with opened("rewards_of_a_user:escapes") as pool:
        verdicts = judge(pool, ("x", "y", {"path": str(path), "present": str(present)}))
    assert verdicts == [Verdict(0.0, "wrong")]
    assert present.exists() and not path.exists()


SECCOMP = """
import os, socket, sys
from trainer.verifiers import sandbox
sandbox._seccomp()
path = sys.argv[1]
if len(os.listdir("/")) == 0 or not open("/proc/self/status").read(): sys.exit("reading is refused")
for attempt in (lambda: open(path, "w"), lambda: os.mkdir(path), os.fork, socket.socket,
                lambda: os.execv("/bin/true", ["true"]), lambda: os.kill(os.getpid(), 0)):
    try: attempt()
    except PermissionError: continue
    os._exit(9)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux's")
def test_the_kernel_refuses_without_the_audit_hook(tmp_path: Path) -> None:
    with socket.socket():  # this machine allows what the sandbox refuses below
        pass
    done = subprocess.run([sys.executable, "-c", SECCOMP, str(tmp_path / "x")], timeout=60)
    assert done.returncode == 0 and not (tmp_path / "x").exists()


def test_a_wrong_import_is_refused_at_the_start(user_module: Path) -> None:
    for kind, expected in {
        "no_such_module:f": "cannot import it: ModuleNotFoundError",
        "broken_rewards:f": "nothing_of_this_name",
        "rewards_of_a_user:absent": "AttributeError",
        "rewards_of_a_user:USER": "AttributeError",
        "rewards_of_a_user:LOADED_FROM": "LOADED_FROM is str, expected a function",
    }.items():
        with pytest.raises(ConfigError) as caught:
            VerifierPool(VerifierConfig(kind=kind))
        assert expected in str(caught.value) and "\n" not in str(caught.value)


HANGING = """
import sys, trainer.verifiers.fork_server as fork_server
from trainer.config import VerifierConfig
from trainer.verifiers.pool import VerifierPool
fork_server.SLOW_S = 1.0
VerifierPool(VerifierConfig(kind="hanging_rewards:judge"), lambda text: print(text, flush=True))
"""


def test_a_scorer_whose_import_hangs_is_named_and_ends_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "pid"
    (tmp_path / "hanging_rewards.py").write_text(
        f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    with subprocess.Popen([sys.executable, "-c", HANGING], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert "verifier.kind hanging_rewards:judge: its import takes more than 1 s" in run.stdout.readline()
        while not (pid.is_file() and pid.read_text()):  # the module is being imported
            time.sleep(0.05)
        run.terminate()
    assert ended(int(pid.read_text()))


def ended(pid: int, limit_s: float = 30.0) -> bool:
    """True once the process has ended."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":  # whoever adopts it may not reap it
            return True
        time.sleep(0.05)
    return False
