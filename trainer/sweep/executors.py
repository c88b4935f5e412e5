"""Executors train runs: as processes on this machine, or as jobs that submitit hands to a cluster."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from trainer.config import ConfigError
from trainer.gpus import cpu_cores, usable_gpus
from trainer.run_folder import complete, latest
from trainer.sweep.spec import Run

POLL_S = 2.0  # of a job, whether it is to stop


@dataclass(frozen=True, slots=True)
class Handle:
    """A run that trains somewhere."""

    slot: int  # -1: unknown
    done: Callable[[], bool]
    stop: Callable[[], None]  # after its step, with a checkpoint; asked again: at once


class LocalExecutor:
    """Processes on this machine, each with its own GPUs, or its share of the cores. They outlive a sweep that
    is killed, and its next start finds them."""

    def __init__(self, folder: Path, jobs: int, gpus_per_run: int) -> None:
        gpus, cores = usable_gpus(), cpu_cores()
        width = gpus_per_run or len(gpus) // (jobs or 1)
        self.folder, self.jobs = folder, jobs or (len(gpus) // max(1, width) if gpus else 1)
        if self.jobs * width > len(gpus) or not (width if gpus else self.jobs <= len(cores)):
            raise ConfigError(
                f"--jobs {jobs}, --gpus-per-run {gpus_per_run}: this machine has {len(gpus)} GPUs and "
                f"{len(cores)} cores; expected at most as many"
            )
        per_run = len(cores) // self.jobs
        self.gpus = [gpus[i * width : (i + 1) * width] for i in range(self.jobs)]
        self.cores = [cores if gpus else cores[i * per_run : (i + 1) * per_run] for i in range(self.jobs)]

    def find(self, run: Run) -> Handle | None:
        if not _locked(run.lock):
            return None
        content = json.loads(run.lock.read_text() or '{"pid": 0, "slot": -1}')  # if killed in between
        return _process(**content, done=lambda: not _locked(run.lock))

    def start(self, run: Run, compute: float, slot: int) -> Handle:
        gpus, cores = self.gpus[slot], cpu_cores()
        with run.lock.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _pin(self.cores[slot])  # the child has it from us
            try:
                child = spawn(run, compute, lock, {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
            finally:
                _pin(cores)
            json.dump({"pid": child.pid, "slot": slot}, lock)
        return _process(child.pid, slot, lambda: child.poll() is not None)


def _pin(cores: list[int]) -> None:
    if hasattr(os, "sched_setaffinity"):  # not on macOS
        os.sched_setaffinity(0, cores)


class Job:
    """A job on a node of the cluster: it trains a run, and stops it when the sweep's folder says so."""

    def __init__(self, run: Run, compute: float) -> None:
        self.run, self.compute = run, compute
        self.child: subprocess.Popen[bytes] | None = None

    def __call__(self) -> None:
        with self.run.lock.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a job that was given up as lost may still train
            if complete(self.run.folder, self.compute):
                return
            self.child = spawn(self.run, self.compute, lock)
            print(self.child.pid, file=lock, flush=True)
            asked = False
            while self.child.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    self.child.wait(POLL_S)
                if not asked and stop_file(self.run.folder.parent).exists():
                    asked = True
                    self.child.send_signal(signal.SIGINT)

    def checkpoint(self) -> Any:
        """Called by submitit when the job is preempted or out of time: it is submitted again and goes on."""
        from submitit.helpers import DelayedSubmission

        if self.child is not None:
            self.child.send_signal(signal.SIGTERM)
            self.child.wait()
        return DelayedSubmission(Job(self.run, self.compute))


class Cluster:
    """Jobs of submitit's executor for `kind`: "slurm", or "local", by which its use is tested."""

    def __init__(self, folder: Path, kind: str, jobs: int, parameters: Mapping[str, Any]) -> None:
        self.folder, self.kind, self.jobs, self.parameters = folder, kind, jobs, parameters
        if find_spec("submitit") is None:
            raise ConfigError(f"--executor {kind} needs submitit; `pip install '.[sweep]'`")

    @cached_property
    def _executor(self) -> Any:
        """The cluster, found when the folder is the sweep's, with its parameters checked."""
        import submitit

        stop_file(self.folder).unlink(missing_ok=True)
        try:
            executor = submitit.AutoExecutor(self.folder / "jobs" / "submitit", cluster=self.kind)
            executor.update_parameters(**self.parameters)
        except (RuntimeError, NameError, TypeError, ValueError, AssertionError) as e:
            raise ConfigError(f"--executor {self.kind}: {' '.join(str(e).split())}") from e
        return executor

    def find(self, run: Run) -> Handle | None:
        path = self._path(run)
        if not path.is_file():
            return None
        inner = self._executor._executor
        job = inner.job_class(inner.folder, path.read_text())
        return None if job.done() else self._handle(job, -1)

    def start(self, run: Run, compute: float, slot: int) -> Handle:
        job = self._executor.submit(Job(run, compute))
        self._path(run).write_text(job.job_id)
        return self._handle(job, slot)

    def _handle(self, job: Any, slot: int) -> Handle:
        asked = stop_file(self.folder)
        return Handle(
            slot, lambda: bool(job.done()), lambda: job.cancel() if asked.exists() else asked.touch()
        )

    def _path(self, run: Run) -> Path:
        return self.folder / "jobs" / f"{run.name}.id"


def _process(pid: int, slot: int, done: Callable[[], bool]) -> Handle:
    """A run on this machine. Its lock file is open in its process alone: it is locked while that lives."""

    def stop() -> None:
        if pid and not done():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)

    return Handle(slot, done, stop)


def spawn(
    run: Run, compute: float, lock: IO[str], more: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """The trainer's process, in a session of its own: only the sweep answers Ctrl-C. It keeps `lock`.

    A run that was killed before its first checkpoint begins again. `more`: of the environment.
    """
    if latest(run.folder) is None and (run.folder / ".lock").exists():
        shutil.rmtree(run.folder)
    command = run.command(compute)
    with run.log.open("a") as log:
        print("$", *command, file=log, flush=True)
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            env=os.environ | (more or {}), start_new_session=True, pass_fds=(lock.fileno(),),
        )  # fmt: skip


def stop_file(folder: Path) -> Path:
    """It exists once the sweep's jobs are to end."""
    return folder / "jobs" / "stop"


def _locked(path: Path) -> bool:
    with suppress(FileNotFoundError), path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
