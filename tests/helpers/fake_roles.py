"""Roles without models, for tests of the launcher; `model_dir` says how they misbehave."""

import fcntl
import multiprocessing
import os
import signal
import struct
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

from trainer import run_folder
from trainer.config import Config
from trainer.messages import Event, Failed
from trainer.roles import run_role, started
from trainer.telemetry import Clock

time.sleep(0.3)  # as imports take


def engine(
    config: Config, model_dir: str, conn: Connection, threads: int, role: str, telemetry: Connection
) -> None:
    clock = Clock(role, telemetry.send)
    clock.enter("generate")
    clock.flush()
    if "semaphores" in model_dir:
        lock = multiprocessing.RLock()  # as tqdm makes one
        conn.send(lock.acquire())
    if model_dir in ("still starting", "stuck", "leaves semaphores and fails"):
        signal.pause()
    _until_closed(conn)
    clock.flush()


def learner(
    config: Config, model_dir: str, conn: Connection, threads: int, resume: str | None, telemetry: Connection
) -> None:
    if "learner fails" in model_dir:
        Thread(target=time.sleep, args=(600,)).start()  # as vLLM's in a call that an engine never answers
    if "lives on" in model_dir:
        telemetry.send(Failed("learner", "the push failed", "", user_error=False))
    if "and ends" in model_dir:
        run_role("learner", telemetry, lambda: int("the push failed"))
    folder = Path(tempfile.mkdtemp(prefix=run_folder.PREFIX, dir=config.run_dir))
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _until_closed(conn)


def controller(
    config: Config, model_dir: str, engines: list[Connection], learner: Connection, resume: Any,
    telemetry: Connection,
) -> None:  # fmt: skip
    def report(kind: str, **data: Any) -> None:
        telemetry.send(Event(kind, time.monotonic(), data))

    report("training_begins")
    match model_dir:
        case "still starting" | "deaf" | "learner fails, lives on" | "learner fails and ends":
            signal.pause()
        case "at work":
            started()
            with suppress(EOFError):
                telemetry.recv()  # until the launcher is dead
            time.sleep(1)  # the rest of the step
            Path(config.run_dir, "saved").touch()
            return
        case "freezes":
            report("ready", learner={"parameters": 1})
            for _ in range(4):  # it lives for twice the deadline of the test
                report("alive")
                time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGSTOP)
        case "waits":
            telemetry.recv()
        case "stutters" | "hesitates":
            os.write(telemetry.fileno(), struct.pack("!i", 1000) + b"the first bytes of a message")
            os.kill(os.getpid(), signal.SIGKILL if model_dir == "stutters" else signal.SIGSTOP)
        case "leaves semaphores and fails":
            engines[0].recv()
            telemetry.send(Failed("controller", "the data are wrong", "", user_error=True))
            raise SystemExit(1)
        case "fails once the others have ended" | "fails, and the others end":
            report("ready", learner={"parameters": 1})
            failed = Failed("controller", "the teacher is away", "", user_error=False)
            if "fails," in model_dir:
                telemetry.send(failed)
            for conn in (*engines, learner):
                conn.close()
                time.sleep(2)  # as closing takes on busy cores
            if "once" in model_dir:
                telemetry.send(failed)
            raise SystemExit(1)
        case "is killed, and the learner ends first":
            report("ready", learner={"parameters": 1})
            learner.close()
            time.sleep(2)
            os.kill(os.getpid(), signal.SIGKILL)
        case "talks":
            for i in range(200):
                report("note", text=str(i))
    report("done", ended_by="steps")


def _until_closed(conn: Connection) -> None:
    started()
    with suppress(EOFError):
        conn.recv()
