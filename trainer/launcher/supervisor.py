"""Starts the role processes, watches them, starts a dead engine again, and stops them. It knows processes and
pipes only: what the roles report goes to `on_event`."""

import importlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from trainer.config import Config, ConfigError
from trainer.jsonl import write_atomic
from trainer.launcher.placement import Devices, for_roles
from trainer.messages import Event, Failed, Replacement, Shutdown
from trainer.pipes import half_sent, limit_waits
from trainer.roles import STOPS, end_with_launcher, role_index, role_kind, role_name, stop_signals
from trainer.run_folder import latest, sweep

GRACE_S = 20.0  # for a role to end by itself once the run is over; then it is killed
FAILED_GRACE_S = 5.0  # the same, once it has reported the error that ends it
MAX_RESPAWNS = 3  # of one engine between two optimizer steps
ENGINES = {
    "torch": "trainer.engines.torch.process:engine_main",
    "vllm": "trainer.engines.vllm.engine:engine_main",
}
REMOTE = "trainer.engines.vllm.remote:engine_main"
LEARNER = "trainer.learner.process:learner_main"
CONTROLLER = "trainer.controller.process:controller_main"
REPLAY = "trainer.controller.replay:replay_main"
EVALUATION = "trainer.controller.evaluation:evaluation_main"
NUMERICS = "trainer.controller.numerics:numerics_main"
SERVER = "trainer.serve.server:serve_main"
RENDEZVOUS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # of torch.distributed
CONTEXT = multiprocessing.get_context("spawn")
ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    # A killed role's semaphores are removed; a warning about that would follow the launcher's error line.
    "PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker",
}
# For torch on CPUs. Engine and learner share the cores, so idle OpenMP threads must soon sleep, but not at
# once: waking one takes as long as a small operation. Without huge pages, page faults take a fifth of a
# gradient's time.
CPU_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000", "THP_MEM_ALLOC_ENABLE": "1"}


class RoleDied(RuntimeError):
    """A role process ended before the run did."""


class Supervisor:
    """The processes of one run. `run` returns once the controller has reported `done` and all have ended.

    `on_event(role, message)` gets every message of a role's telemetry, in order, on the calling thread; it
    returns why the run is complete from now on, such as "compute"; empty: it goes on. `controller`: another
    entry of its process than the usual one. `start`: what the controller begins with, a checkpoint at 'path'.
    Devices without a learner start none.
    """

    def __init__(
        self, config: Config, model_dir: str, devices: Devices, start: dict[str, Any] | None,
        on_event: Callable[[str, object], str | None], controller: str = "",
    ) -> None:  # fmt: skip
        self._controller = controller or CONTROLLER
        self.config = for_roles(config, devices)
        self.model_dir, self.devices, self.start, self.on_event = model_dir, devices, start, on_event
        self.run_dir = Path(config.run_dir)
        self._roles: dict[str, tuple[SpawnProcess, Connection]] = {}
        self._signals: list[int] = []
        self._failure: Failed | None = None
        self._failed: dict[str, float] = {}  # roles that have reported an error -> when
        self._deaths: Counter[str] = Counter()  # of engines, since the last optimizer step
        self._ready = self._done = self._complete = False
        self._silent_s = 0.0  # since the controller's last message, while this process was not stopped

    def run(self) -> None:
        """Run to the end. RoleDied or ConfigError if a role fails, KeyboardInterrupt on a second Ctrl-C."""
        with stop_signals() as self._signals:
            try:
                self._spawn()
                self._watch()
            finally:
                self._kill()

    def _spawn(self) -> None:
        os.environ |= ENVIRONMENT | CPU_ENVIRONMENT | os.environ
        (self.run_dir / "logs").mkdir(exist_ok=True)
        count = len(self.config.engine.urls) or len(self.devices.engines)
        engines = [self._start_engine(i) for i in range(count)]
        learner = self._start_learner() if self.devices.learner else None
        args = (self.config, self.model_dir, engines, learner, self.start)
        self._start("controller", self._controller, args)
        for conn in filter(None, (*engines, learner)):
            conn.close()  # only the role holds its end now, so its death closes the pipe
        self._write_pids()

    def _start_engine(self, index: int) -> Connection:
        """Start the engine with this index; returns the controller's end of its pipe."""
        engine, role = self.config.engine, role_name("engine", index)
        ours, role_end = self._pipe()
        if engine.urls:
            self._start(role, REMOTE, (self.config, self._loadable(), role_end, engine.urls[index], role))
        else:
            threads = self.devices.threads(engine.threads, len(self.devices.engines))
            args = (self.config, self._loadable(), role_end, threads, role)
            self._start(role, ENGINES[engine.kind], args, self.devices.engines[index])
        role_end.close()
        return ours

    def _pipe(self) -> tuple[Connection, Connection]:
        """Two ends of a pipe: ours or the controller's, which never waits without end, and a role's."""
        ours, role_end = CONTEXT.Pipe()
        limit_waits(ours, self.config.pipeline.deadline_s)
        return ours, role_end

    def _loadable(self) -> str:
        """The folder from which an engine loads the model. That of a run which is resumed, or served, is a
        checkpoint, which newer ones replace in time; then the newest will do: its weights give way to those
        of the other engines."""
        run = (self.start or {}).get("served_run", self.run_dir)
        newest = latest(run) if self.start and not Path(self.model_dir).exists() else None
        return str(newest or self.model_dir)

    def _start_learner(self) -> Connection:
        """Start the learner's ranks that torchrun has not made; returns the controller's end of the pipe."""
        ranks, resume_path = len(self.devices.learner), self.start["path"] if self.start else None
        ours, role_end = self._pipe()
        threads = self.devices.threads(self.config.learner.threads, ranks)
        port = _free_port() if ranks > 1 else 0
        for rank, gpus in enumerate(self.devices.learner[: 1 if self.devices.world else ranks]):
            env = dict(zip(RENDEZVOUS, (rank, 0, ranks, "127.0.0.1", port), strict=True))
            conn = role_end if rank == 0 else None
            args = (self.config, self.model_dir, conn, threads, resume_path)
            several = ranks > 1 and not self.devices.world  # else torchrun's variables hold, or none
            env = (env if several else {}) | learner_environment(self.config)
            self._start(role_name("learner", rank), LEARNER, args, gpus, env)
        role_end.close()
        return ours

    def _start(
        self, role: str, target: str, args: tuple[Any, ...], gpus: tuple[str, ...] = (),
        env: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        ours, role_end = self._pipe()
        log = str(self.run_dir / "logs" / f"{role}.log")
        env = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} | (dict.fromkeys(RENDEZVOUS) if env is None else env)
        entry = os.getpid(), target, role_end, args, log, env
        process = CONTEXT.Process(target=_role_entry, args=entry, name=role)
        resource_tracker.ensure_running()  # else `start` does it, and unblocks STOPS
        # A terminal's Ctrl-C reaches every process, but only the launcher answers it: see `_role_entry`.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        role_end.close()
        self._roles[role] = (process, ours)

    def _watch(self) -> None:
        """Pass messages on until every pipe is closed; GRACE_S after `done` at the latest."""
        pipes = {conn: role for role, (_, conn) in self._roles.items()}
        deadline, stop_sent, looked = float("inf"), False, time.monotonic()
        while pipes and time.monotonic() < deadline:
            ready = wait(list(pipes), timeout=0.25)
            last, looked = looked, time.monotonic()
            self._silent_s += min(looked - last, 1.0)
            for conn in [c for c in pipes if c in ready]:
                if not conn.poll():
                    continue  # it was drained meanwhile
                try:
                    message = conn.recv()
                except BlockingIOError as e:
                    raise RoleDied(str(half_sent(pipes[conn]))) from e
                except (EOFError, OSError):
                    role = pipes.pop(conn)
                    self._drain("controller", 0)  # it reports `done` before it asks the others to end
                    if not self._done:
                        self._respawn(role)
                        pipes[self._roles[role][1]] = role
                else:
                    self._handle(pipes[conn], message)
            self._kill_failed()
            self._check_controller()
            if self._done:
                deadline = min(deadline, time.monotonic() + GRACE_S)
            if self._signals.count(signal.SIGINT) > 1:
                raise KeyboardInterrupt
            if self._signals and not stop_sent:
                stop_sent = True
                saving = " after this step and saving a checkpoint" if self.devices.learner else ""
                self._note(f"stopping{saving}; Ctrl-C again ends at once")
                self.send_controller(Shutdown())
        for process, _ in self._roles.values():
            process.join(max(0.0, deadline - time.monotonic()))

    def _kill_failed(self) -> None:
        """Kill roles that reported an error and did not end: a library's thread can keep a process alive."""
        for role, when in self._failed.items():
            if time.monotonic() > when + FAILED_GRACE_S:
                self._roles[role][0].kill()

    def _check_controller(self) -> None:
        """RoleDied if it is frozen: every other role is watched by it."""
        pipeline = self.config.pipeline
        limit = pipeline.deadline_s if self._ready else pipeline.start_deadline_s
        if self._silent_s > limit and not self._done:
            key = "pipeline.deadline_s" if self._ready else "pipeline.start_deadline_s"
            raise RoleDied(f"the controller has given no sign of life for {key} = {limit:g} s")

    def _handle(self, role: str, message: object) -> None:
        """Take from a message what matters for the processes, and pass it on."""
        if role == "controller":
            self._silent_s = 0.0
        match message:
            case Event(kind="alive"):
                return
            case Failed():
                self._failure = self._failure or message
                self._failed[role] = time.monotonic()
            case Event(kind="ready"):
                self._ready = True
            case Event(kind="step"):
                self._deaths.clear()
            case Event(kind="done"):
                self._done = True
        if (ended_by := self.on_event(role, message)) and not self._complete:
            self._complete = True
            self.send_controller(Shutdown(ended_by))

    def _respawn(self, role: str) -> None:
        """Start a dead engine again. The death of another role ends the run, and so does that of an engine
        tied to the learner: by an NCCL group, or because both use the same GPUs in turns."""
        cause = self._cause_of_death(role)
        self._deaths[role] += 1
        final = not self._ready or self._deaths[role] > MAX_RESPAWNS or isinstance(cause, ConfigError)
        final |= "controller" in self._failed  # the engine ends with it
        tied = self.config.engine.colocate or self.config.engine.direct_push
        if final or tied or role_kind(role) != "engine":
            raise cause
        self._failure = None
        self._failed.pop(role, None)
        self._note(f"{cause}; it is started again")
        conn = self._start_engine(role_index(role))
        self.send_controller(Replacement(role, conn))
        conn.close()
        self._write_pids()

    def _cause_of_death(self, role: str) -> Exception:
        """The reason why a role ended too early: the error it reported, or how its process ended."""
        if self._failure is None and not role.startswith("engine"):  # another role may report the cause
            for other in self._roles.keys() - {role}:
                self._drain(other, 0.5)
        process = self._roles[role][0]
        process.join(5)
        if self._failure is None and process.exitcode == 0 and not role.startswith("engine"):
            controller = self._roles["controller"][0]
            controller.join(FAILED_GRACE_S)  # with which the role has ended
            self._drain("controller", 0)
            if controller.exitcode:
                process, role = controller, "controller"
        code, failure = process.exitcode, self._failure
        if code is not None and code < 0 and role not in self._failed:
            hint = "; the kernel may have run out of memory" if code == -signal.SIGKILL else ""
            return RoleDied(f"the {role}'s process was killed by signal {-code}{hint}")
        if failure is None:
            return RoleDied(f"the {role}'s process ended with exit code {code}")
        if failure.user_error:
            return ConfigError(failure.message)
        (self.run_dir / "failure.txt").write_text(failure.traceback)
        return RoleDied(f"{failure.role}: {failure.message} (traceback in {self.run_dir}/failure.txt)")

    def _drain(self, role: str, seconds: float) -> None:
        """Handle a role's messages until none has come for so long."""
        conn = self._roles[role][1]
        while not conn.closed and conn.poll(seconds):
            try:
                message = conn.recv()
            except (EOFError, OSError):
                return
            self._handle(role, message)

    def _note(self, text: str) -> None:
        self.on_event("launcher", Event("note", time.monotonic(), {"text": text}))

    def send_controller(self, message: object) -> None:
        """Send the controller a message; nothing happens if it is dead."""
        with suppress(OSError):  # if it is dead, its closed pipe will be noticed
            self._roles["controller"][1].send(message)

    def _write_pids(self) -> None:
        pids = {role: process.pid for role, (process, _) in self._roles.items()}
        write_atomic(self.run_dir / "pids.json", json.dumps(pids))

    def _kill(self) -> None:
        """Kill every role that still runs, and remove what it left in shared memory."""
        for process, conn in self._roles.values():
            if process.is_alive():
                process.kill()
                process.join()
            conn.close()
        sweep(self.run_dir)


def learner_environment(config: Config) -> dict[str, Any]:
    """Environment variables that torch reads in learner ranks; the user's own settings hold.

    If a collective overruns its deadline, every rank writes its last NCCL calls to logs/. Segments that grow
    waste less memory where packs differ in size, but cannot be shared with vLLM by CUDA IPC.
    """
    env = {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": 1,
        "TORCH_FR_BUFFER_SIZE": 2000,  # calls that are kept
        "TORCH_FR_DUMP_TEMP_FILE": Path(config.run_dir).absolute() / "logs" / "nccl_trace_rank_",
    }
    if config.engine.weight_push != "ipc" and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        env["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return {name: value for name, value in env.items() if name not in os.environ}


def _free_port() -> int:
    """A port where the ranks can meet; they bind it within seconds."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _role_entry(
    launcher: int, target: str, telemetry: Connection, args: tuple[Any, ...], log: str, env: dict[str, Any]
) -> None:
    """Entry of every spawned process; what libraries print goes to its log, not into the live view.

    The target is passed by name, so that the launcher itself never imports torch.
    """
    end_with_launcher(launcher)
    for stop in STOPS:
        signal.signal(stop, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)  # `_start` blocked them until they are ignored
    for name, value in env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = str(value)
    with open(log, "a", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    module, name = target.split(":")
    try:
        getattr(importlib.import_module(module), name)(*args, telemetry=telemetry)
    except SystemExit as e:  # it has reported its error, and Python would wait for every thread
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(e.code if isinstance(e.code, int) else 1)
