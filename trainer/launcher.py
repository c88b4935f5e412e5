"""Spawns the role processes, watches them, and keeps what they report: ledger, metrics, curve, view."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType
from typing import Any

from trainer.cli import to_yaml
from trainer.config import Config, ConfigError
from trainer.ledger import Compute, Ledger
from trainer.messages import Event, Failed, Spans
from trainer.metrics import MetricsWriter, read
from trainer.run_folder import sweep, write_atomic
from trainer.scaling import EvalPoint, Fit, fit_run
from trainer.ui import View

GRACE_S = 20.0  # what a role may take to end by itself once the run is over
LEDGER_EVERY_S = 5.0
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # each stops the run after the present step
ENGINES = {"torch": "trainer.engines.serve:engine_main"}
LEARNER = "trainer.learner:learner_main"
CONTROLLER = "trainer.controller_main:controller_main"


class RoleDied(RuntimeError):
    """A role process ended before the run did."""


class Launcher:
    """One run, from spawn to the last event. `run` returns once the controller has said 'done'."""

    def __init__(self, config: Config, model_dir: str, view: View, resume: dict[str, Any] | None) -> None:
        self.config, self.model_dir, self.view, self.resume = config, model_dir, view, resume
        self.run_dir = Path(config.run_dir)
        self.start = time.monotonic()
        carried = json.loads((self.run_dir / "ledger.json").read_text()) if resume else None
        self.cores = len(os.sched_getaffinity(0))
        devices = {"learner": self.cores / 2, "engine": self.cores / 2}
        self.ledger = Ledger(devices, "core-hours", self.start, carried)
        self.points: list[EvalPoint] = []
        self._made: dict[int, tuple[float, Compute]] = {}  # version -> when it was made, and C by then
        if resume:
            self._recall(resume["version"])
        self.metrics = MetricsWriter(self.run_dir, config)
        self.fit: Fit | None = None
        self.done = False
        self.failure: Failed | None = None
        self._signals: list[int] = []
        self._ledger_written = self.start
        self._engine_before = (0.0, 0.0)  # tokens and busy seconds told last
        self._engine_rate = 0.0
        self._roles: dict[str, tuple[SpawnProcess, Connection]] = {}

    def _spawn(self) -> None:
        # Idle OpenMP threads must sleep, not spin: engine and learner share the cores.
        os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "TOKENIZERS_PARALLELISM": "false"}
        os.environ["THP_MEM_ALLOC_ENABLE"] = "1"  # torch in huge pages: a gradient's page faults cost a fifth
        context = multiprocessing.get_context("spawn")
        (self.run_dir / "logs").mkdir(exist_ok=True)
        engine_conn, engine_end = context.Pipe()
        learner_conn, learner_end = context.Pipe()
        config, model_dir, cores = self.config, self.model_dir, self.cores
        resume_path = self.resume["path"] if self.resume else None
        work: dict[str, tuple[str, tuple[Any, ...]]] = {
            "engine": (
                ENGINES[config.engine.kind],
                (config, model_dir, engine_end, config.engine.threads or cores, "engine"),
            ),
            "learner": (
                LEARNER,
                (config, model_dir, learner_end, config.learner.threads or cores, resume_path),
            ),
            "controller": (
                CONTROLLER,
                (config, model_dir, [engine_conn], learner_conn, self.resume),
            ),
        }
        for role, (target, args) in work.items():
            ours, theirs = context.Pipe()
            log = self.run_dir / "logs" / f"{role}.log"
            process = context.Process(target=_role, args=(target, theirs, args, str(log)), name=role)
            process.start()
            theirs.close()
            self._roles[role] = (process, ours)
        pids = {role: process.pid for role, (process, _) in self._roles.items()}
        write_atomic(self.run_dir / "pids.json", json.dumps(pids))
        for end in (engine_conn, engine_end, learner_conn, learner_end):
            end.close()  # so that a dead role closes its pipe for good

    def run(self) -> None:
        """Until the run is done. RoleDied or ConfigError if a role fails, KeyboardInterrupt: Ctrl-C twice."""
        before = {s: signal.signal(s, signal.SIG_IGN) for s in STOPS}
        try:
            self._spawn()  # the roles inherit that signals are ignored: the launcher answers for all
            for stop in STOPS:
                if not (stop == signal.SIGHUP and before[stop] == signal.SIG_IGN):  # nohup means it
                    signal.signal(stop, self._count)
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
                    self._handle(conn.recv())
                except (EOFError, ConnectionError):
                    role = pipes.pop(conn)
                    if not self.done:
                        raise self._death(role) from None
            if self.done:  # a role that does not end is killed at the deadline
                deadline = min(deadline, time.monotonic() + GRACE_S)
            if self._signals.count(signal.SIGINT) > 1:
                raise KeyboardInterrupt
            if self._signals and not asked:
                asked = True
                self.view.log("stopping after this step and saving a checkpoint; Ctrl-C again ends at once")
                with suppress(OSError):  # a dead controller's pipe tells of it
                    self._roles["controller"][1].send("stop")
            self._write_ledger()
        for process, _ in self._roles.values():
            process.join(max(0.0, deadline - time.monotonic()))

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
        if self.failure is None:  # another role may have told the cause
            for conn in (c for r, (_, c) in self._roles.items() if r != role):
                while not conn.closed and conn.poll(0.5):
                    try:
                        self._handle(conn.recv())
                    except (EOFError, ConnectionError):
                        break
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

    def _count(self, signum: int, frame: FrameType | None) -> None:
        self._signals.append(signum)  # no more: the loop may hold the view's lock

    def _handle(self, message: object) -> None:
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
                self._made[message.data["step"]] = message.time, self.ledger.compute(message.time)
                self._record(message.data)
            case Event(kind="eval"):
                self._evaluated(message)
            case Event(kind="sample"):
                self.metrics.write_samples([message.data])
                self.view.sample(message.data)
            case Event(kind="engine"):
                told = (message.data["tokens"], message.data["busy_s"])
                tokens, seconds = (
                    now - before for now, before in zip(told, self._engine_before, strict=True)
                )
                self._engine_before = told
                self._engine_rate = tokens / seconds if seconds else 0.0
            case Event(kind="done"):
                self.done = True
            case Event():
                self.view.log(_in_words(message))

    def _recall(self, version: int) -> None:
        """Take up curve and history of the run; what lies beyond the checkpoint is made again."""
        path = self.run_dir / "metrics.jsonl"
        rows = [row for row in read(path) if row["step"] <= version > 0]  # version 0 is evaluated again
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
            "engine/tokens_per_s": self._engine_rate,
        }
        line |= {f"idle/{role}": share for role, share in self.ledger.idle_shares().items()}
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
        self.fit = fit_run(self.points)
        if self.fit.identified:
            line |= {
                "forecast/ceiling": self.fit.A.value,
                "forecast/ceiling_low": self.fit.A.low,
                "forecast/ceiling_high": self.fit.A.high,
                "forecast/end": float(self.fit.law.reward(compute / step * self.config.pipeline.steps)),
            }
        self._record(line)

    def _write_ledger(self) -> None:
        if time.monotonic() - self._ledger_written >= LEDGER_EVERY_S:
            self._ledger_written = time.monotonic()
            self.ledger.write(self.run_dir)


def _role(target: str, telemetry: Connection, args: tuple[Any, ...], log: str) -> None:
    """Entry of every spawned process; what libraries print goes to its log, not into the live view.

    The target is named, not passed, so that the launcher itself never imports torch.
    """
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
