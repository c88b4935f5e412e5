"""Spawns the role processes, watches them, and keeps what they report: ledger, metrics, curve, view."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import socket
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType
from typing import Any

from trainer.cli import to_yaml
from trainer.config import Config, ConfigError
from trainer.jsonl import read_lines, write_atomic
from trainer.launcher.ledger import Compute, Ledger
from trainer.launcher.metrics import MetricsWriter
from trainer.launcher.placement import Devices, for_roles
from trainer.launcher.terminal import View
from trainer.messages import Event, Failed, Replacement, Spans, Stop
from trainer.roles import role_index, role_kind, role_name
from trainer.run_folder import sweep
from trainer.scaling import EvalPoint, Fit
from trainer.scaling.forecast import describe_recommendation, forecast

GRACE_S = 20.0  # what a role may take to end by itself once the run is over
LEDGER_EVERY_S = 5.0
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # each stops the run after the present step
RESPAWNS = 3  # deaths of one engine that are made good between two optimizer steps
ENGINES = {
    "torch": "trainer.engines.torch.process:engine_main",
    "vllm": "trainer.engines.vllm.engine:engine_main",
}
RENDEZVOUS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # of torch.distributed
REMOTE = "trainer.engines.vllm.remote:engine_main"
LEARNER = "trainer.learner.process:learner_main"
CONTROLLER = "trainer.controller.process:controller_main"


CONTEXT = multiprocessing.get_context("spawn")


class RoleDied(RuntimeError):
    """A role process ended before the run did."""


# For torch on CPUs. Engine and learner share the cores, so idle OpenMP threads must soon sleep; not at once,
# since waking one takes as long as a small operation. Huge pages: faults would cost a fifth of a gradient.
CPU = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000", "THP_MEM_ALLOC_ENABLE": "1"}


class Launcher:
    """One run, from spawn to the last event. `run` returns once the controller has said 'done'."""

    def __init__(
        self, config: Config, model_dir: str, view: View, resume: dict[str, Any] | None, devices: Devices
    ) -> None:
        self.config, self.model_dir, self.view, self.resume = config, model_dir, view, resume
        self.roles_config = for_roles(config, devices)  # the config as the roles get it
        self.run_dir = Path(config.run_dir)
        self.start = time.monotonic()
        carried = json.loads((self.run_dir / "ledger.json").read_text()) if resume else None
        self.devices = devices
        self.ledger = Ledger(devices.held(), devices.unit, self.start, carried)
        self.points: list[EvalPoint] = []
        self._made: dict[int, tuple[float, Compute]] = {}  # version -> when it was made, and C by then
        if resume:
            self._recall(resume["version"])
        self.forecast = forecast(self.points, 0.0, None) if self.points else None
        self.metrics = MetricsWriter(self.run_dir, config)
        self.done = False
        self.failure: Failed | None = None
        self._signals: list[int] = []
        self._ledger_written = self.start
        self._told: dict[str, tuple[float, float]] = {}  # engine -> tokens and busy seconds told last
        self._rates: dict[str, float] = {}  # engine -> tokens a second
        self._deaths: Counter[str] = Counter()  # of engines, since the last optimizer step
        self._ready = False
        self._roles: dict[str, tuple[SpawnProcess, Connection]] = {}

    def _spawn(self) -> None:
        os.environ |= {"TOKENIZERS_PARALLELISM": "false"} | CPU | os.environ
        (self.run_dir / "logs").mkdir(exist_ok=True)
        engines = [
            self._start_engine(i) for i in range(len(self.config.engine.urls) or len(self.devices.engines))
        ]
        learner = self._start_learner()
        args = (self.roles_config, self.model_dir, engines, learner, self.resume)
        self._start("controller", CONTROLLER, args, ())
        for end in (*engines, learner):
            end.close()  # so that a dead role closes its pipe for good
        self._write_pids()

    def _start_engine(self, index: int) -> Connection:
        """Start the engine of this number; returns the controller's end of its pipe."""
        engine, role = self.config.engine, role_name("engine", index)
        ours, theirs = CONTEXT.Pipe()
        where: str | int
        if engine.urls:
            gpus: tuple[str, ...] = ()
            target, where = REMOTE, engine.urls[index]
        else:
            gpus = self.devices.engines[index]
            target, where = (
                ENGINES[engine.kind],
                self.devices.threads(engine.threads, len(self.devices.engines)),
            )
        self._start(role, target, (self.roles_config, self.model_dir, theirs, where, role), gpus)
        theirs.close()
        return ours

    def _start_learner(self) -> Connection:
        """Start the learner's ranks that torchrun has not made; returns the controller's end of the pipe."""
        ranks, resume_path = len(self.devices.learner), self.resume["path"] if self.resume else None
        ours, theirs = CONTEXT.Pipe()
        threads = self.devices.threads(self.config.learner.threads, ranks)
        port = _free_port() if ranks > 1 else 0
        for rank, gpus in enumerate(self.devices.learner[: 1 if self.devices.world else ranks]):
            env = dict(zip(RENDEZVOUS, (rank, 0, ranks, "127.0.0.1", port), strict=True))
            conn = theirs if rank == 0 else None
            args = (self.roles_config, self.model_dir, conn, threads, resume_path)
            several = ranks > 1 and not self.devices.world  # else torchrun's own variables, or none, hold
            self._start(role_name("learner", rank), LEARNER, args, gpus, env if several else {})
        theirs.close()
        return ours

    def _start(
        self,
        role: str,
        target: str,
        args: tuple[Any, ...],
        gpus: tuple[str, ...],
        env: dict[str, Any] | None = None,
    ) -> None:
        ours, theirs = CONTEXT.Pipe()
        log = self.run_dir / "logs" / f"{role}.log"
        env = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} | (dict.fromkeys(RENDEZVOUS) if env is None else env)
        process = CONTEXT.Process(target=_role, args=(target, theirs, args, str(log), env), name=role)
        # A terminal's Ctrl-C reaches every process, but the launcher answers for all: see `_role`.
        resource_tracker.ensure_running()  # else `start` does it, and unblocks
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        theirs.close()
        self._roles[role] = (process, ours)

    def run(self) -> None:
        """Until the run is done. RoleDied or ConfigError if a role fails, KeyboardInterrupt: Ctrl-C twice."""
        nohup = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
        before = {stop: signal.signal(stop, self._count) for stop in set(STOPS) - nohup}
        try:
            self._spawn()
            self._watch()
        finally:
            self.close()
            for stop, handler in before.items():
                signal.signal(stop, handler)

    def _watch(self) -> None:
        pipes = {conn: role for role, (_, conn) in self._roles.items()}
        deadline, asked = float("inf"), False
        while pipes and time.monotonic() < deadline:
            ready = wait(list(pipes), timeout=0.25)
            for conn in [c for c in pipes if c in ready]:
                try:
                    self._handle(conn.recv(), pipes[conn])
                except (EOFError, OSError):
                    role = pipes.pop(conn)
                    self._hear("controller", 0)  # it says `done` before it asks the others to end
                    if not self.done:
                        self._make_good(role)
                        pipes[self._roles[role][1]] = role
            if self.done:  # a role that does not end is killed at the deadline
                deadline = min(deadline, time.monotonic() + GRACE_S)
            if self._signals.count(signal.SIGINT) > 1:
                raise KeyboardInterrupt
            if self._signals and not asked:
                asked = True
                self.view.log("stopping after this step and saving a checkpoint; Ctrl-C again ends at once")
                with suppress(OSError):  # a dead controller's pipe tells of it
                    self._roles["controller"][1].send(Stop())
            self._write_ledger()
        for process, _ in self._roles.values():
            process.join(max(0.0, deadline - time.monotonic()))

    def _make_good(self, role: str) -> None:
        """Start a dead engine again; whatever else dies ends the run, and an engine that is bound to the
        learner: a member of its NCCL group, or one that may start only while the learner is off the GPU."""
        death = self._death(role)
        self._deaths[role] += 1
        engine = self.roles_config.engine
        if (
            role_kind(role) != "engine"
            or engine.colocate
            or engine.direct_push
            or not self._ready
            or self._deaths[role] > RESPAWNS
            or isinstance(death, ConfigError)
        ):
            raise death
        self.failure = None
        self.view.log(f"{death}; it is started again")
        self._told.pop(role, None)
        conn = self._start_engine(role_index(role))
        with suppress(OSError):  # a dead controller's pipe tells of it
            self._roles["controller"][1].send(Replacement(role, conn))
        conn.close()
        self._write_pids()

    def _write_pids(self) -> None:
        pids = {role: process.pid for role, (process, _) in self._roles.items()}
        write_atomic(self.run_dir / "pids.json", json.dumps(pids))

    def close(self) -> None:
        """End every role that still runs, by force, and what it left in shared memory; close the books."""
        for process, conn in self._roles.values():
            if process.is_alive():
                process.kill()
                process.join()
            conn.close()
        sweep(self.run_dir)
        self.ledger.close(self.run_dir, time.monotonic())
        self.metrics.close()

    def _death(self, role: str) -> Exception:
        """What to tell of a role that ended too early: its own last words, or how it was killed."""
        if self.failure is None and not role.startswith("engine"):  # another role may have told the cause
            for other in self._roles.keys() - {role}:
                self._hear(other, 0.5)
        process = self._roles[role][0]
        process.join(5)
        code = process.exitcode
        if self.failure is not None and not (code is not None and code < 0):
            if self.failure.user_error:
                return ConfigError(self.failure.message)
            (self.run_dir / "failure.txt").write_text(self.failure.traceback)
            return RoleDied(
                f"{self.failure.role}: {self.failure.message} (traceback in {self.run_dir}/failure.txt)"
            )
        how = (
            f"was killed by signal {-code}"
            if code is not None and code < 0
            else f"ended with exit code {code}"
        )
        hint = "; the kernel may have run out of memory" if code == -signal.SIGKILL else ""
        return RoleDied(f"the {role}'s process {how}{hint}")

    def _hear(self, role: str, seconds: float) -> None:
        """Take in what a role has told and what it still tells, until it is silent for so long."""
        conn = self._roles[role][1]
        with suppress(EOFError, OSError):
            while not conn.closed and conn.poll(seconds):
                self._handle(conn.recv(), role)

    def _count(self, signum: int, frame: FrameType | None) -> None:
        self._signals.append(signum)  # no more: the loop may hold the view's lock

    def _handle(self, message: object, role: str = "") -> None:
        match message:
            case Spans():
                self.ledger.add(message)
            case Failed():
                self.failure = self.failure or message
            case Event(kind="phase"):
                self.view.phase(message.data["name"])
            case Event(kind="training_begins"):
                self.ledger.begin_training(message.time)
                write_atomic(self.run_dir / "config.yaml", to_yaml(self.config))  # it works: a resume's base
                self.view.phase("training")
            case Event(kind="step"):
                self._deaths.clear()
                self._made[message.data["step"]] = message.time, self.ledger.compute(message.time)
                self._record(message.data)
            case Event(kind="eval"):
                self._evaluated(message)
            case Event(kind="sample"):
                self.metrics.write_samples([message.data])
                self.view.sample(message.data)
            case Event(kind="engine"):
                told = (message.data["tokens"], message.data["busy_s"])
                before = self._told.get(role, (0.0, 0.0))
                tokens, seconds = (now - then for now, then in zip(told, before, strict=True))
                self._told[role] = told
                self._rates[role] = tokens / seconds if seconds else 0.0
            case Event(kind="ready"):
                self._ready = True
            case Event(kind="done"):
                self.done = True
            case Event():
                self.view.log(_in_words(message))

    @property
    def fit(self) -> Fit | None:
        """The curve so far."""
        return self.forecast.fit if self.forecast else None

    def _recall(self, version: int) -> None:
        """Take up curve and history of the run; what lies beyond the checkpoint is made again."""
        path = self.run_dir / "metrics.jsonl"
        rows = [row for row in read_lines(path) if row["step"] <= version > 0]  # version 0 is evaluated again
        write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))
        for row in rows:
            if "eval/pass_rate" in row:
                rate, error = row["eval/pass_rate"], row["eval/pass_rate_se"]
                self.points.append(EvalPoint(row["step"], row["compute/total"], rate, error))
            self.view.recall(row)

    def _record(self, data: dict[str, Any]) -> None:
        """One line of metrics.jsonl: the event's own numbers and the compute when its version was made."""
        at, compute = self._made[data["step"]]
        line = data | {
            "time": at - self.start,
            "compute/total": compute.total,
            "compute/evaluation": compute.evaluation,
            "compute/startup": compute.startup,
            "engine/tokens_per_s": sum(self._rates.values()),
        }
        idle = self.ledger.idle_shares()
        for kind in ("learner", "engine"):
            shares = [share for role, share in idle.items() if role_kind(role) == kind]
            line[f"idle/{kind}"] = sum(shares) / len(shares)
        self.metrics.write(line)
        self.view.update(line)

    def _evaluated(self, event: Event) -> None:
        """An evaluation is a point of the curve: fit again, forecast."""
        data = {k: v for k, v in event.data.items() if k != "step"}
        step = event.data["step"]
        if step == 0:
            self._made[0] = event.time, replace(self.ledger.compute(event.time), total=0.0)
        compute = self._made[step][1].total
        self.points.append(EvalPoint(step, compute, data["pass_rate"], data["pass_rate_se"]))
        line = {"step": step} | {f"eval/{k}": v for k, v in data.items()}
        end = compute / step * self.config.pipeline.steps if step else 0.0
        before, self.forecast = self.forecast, forecast(self.points, end, self.forecast)
        self._record(line | self.forecast.metrics())
        advice = describe_recommendation(self.forecast, self.ledger.unit, end - compute)
        if advice and self.forecast.recommendation != (before.recommendation if before else "none"):
            self.view.log(advice)

    def _write_ledger(self) -> None:
        if time.monotonic() - self._ledger_written >= LEDGER_EVERY_S:
            self._ledger_written = time.monotonic()
            self.ledger.write(self.run_dir)


def _free_port() -> int:
    """A port for the ranks to meet at; they take it within the second."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _role(target: str, telemetry: Connection, args: tuple[Any, ...], log: str, env: dict[str, Any]) -> None:
    """Entry of every spawned process; what libraries print goes to its log, not into the live view.

    The target is named, not passed, so that the launcher itself never imports torch.
    """
    for stop in STOPS:
        signal.signal(stop, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)  # they were blocked until they are ignored
    for name, value in env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = str(value)
    with open(log, "a", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    module, name = target.split(":")
    getattr(importlib.import_module(module), name)(*args, telemetry=telemetry)


def _in_words(event: Event) -> str:
    data = event.data
    match event.kind:
        case "data":
            return f"{data['train']} training prompts, {data['held_out']} held out"
        case "parity":
            gap = f"{data['mean']:.1e} nats (max {data['max']:.1e})"
            return f"learner and engine agree on {data['tokens']} tokens to {gap}"
        case "checkpoint":
            return f"checkpoint {data['path']}"
        case "note":
            return str(data["text"])
        case _:
            return f"{event.kind}: {data}"
