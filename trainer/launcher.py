"""Spawns the role processes, watches them, and keeps what they report: ledger, metrics, curve, view."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType
from typing import Any

from trainer.config import Config, ConfigError
from trainer.ledger import Ledger
from trainer.messages import Event, Failed, Spans
from trainer.metrics import MetricsWriter, read
from trainer.run_folder import write_atomic
from trainer.scaling import EvalPoint, Fit, fit_run
from trainer.ui import View

GRACE_S = 20.0  # what a role may take to end by itself once the run is over
LEDGER_EVERY_S = 5.0
ENGINES = {"torch": "trainer.engines.serve:engine_main"}


class RoleDied(RuntimeError):
    """A role process ended before the run did."""


class Launcher:
    """One run, from spawn to the last event. `run` returns when the controller says 'done'."""

    def __init__(self, config: Config, model_dir: str, view: View, resume: dict[str, Any] | None) -> None:
        self.config, self.view, self.resume = config, view, resume
        self.run_dir = Path(config.run_dir)
        self.start = time.monotonic()
        carried = json.loads((self.run_dir / "ledger.json").read_text()) if resume else None
        cores = len(os.sched_getaffinity(0))
        self.ledger = Ledger({"learner": cores / 2, "engine": cores / 2}, "core-hours", self.start, carried)
        self.metrics = MetricsWriter(self.run_dir, config)
        self.points: list[EvalPoint] = []
        self.fit: Fit | None = None
        self.done = False
        self.failure: Failed | None = None
        self._interrupts = 0
        self._ledger_written = self.start
        self._engine_before = (0.0, 0.0)  # tokens and busy seconds told last
        self._engine_rate = 0.0
        if resume:
            self._recall()
        self._roles: dict[str, tuple[SpawnProcess, Connection]] = {}
        self._spawn(model_dir, cores)

    def _spawn(self, model_dir: str, cores: int) -> None:
        # Idle OpenMP threads must sleep, not spin: engine and learner share the cores.
        os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "TOKENIZERS_PARALLELISM": "false"}
        os.environ["THP_MEM_ALLOC_ENABLE"] = "1"  # torch in huge pages: a gradient's page faults cost a fifth
        context = multiprocessing.get_context("spawn")
        (self.run_dir / "logs").mkdir(exist_ok=True)
        engine_conn, engine_end = context.Pipe()
        learner_conn, learner_end = context.Pipe()
        config = self.config
        resume_path = self.resume["path"] if self.resume else None
        work: dict[str, tuple[str, tuple[Any, ...]]] = {
            "engine": (
                ENGINES[config.engine.kind],
                (config, model_dir, engine_end, config.engine.threads or cores),
            ),
            "learner": (
                "trainer.learner:learner_main",
                (config, model_dir, learner_end, config.learner.threads or cores, resume_path),
            ),
            "controller": (
                "trainer.controller_main:controller_main",
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
        """Until the run is done; RoleDied or ConfigError if a role fails. Ctrl-C: after the present step."""
        before = signal.signal(signal.SIGINT, self._interrupt)
        try:
            open_pipes = {conn: role for role, (_, conn) in self._roles.items()}
            while open_pipes:
                ready = wait(list(open_pipes), timeout=0.25)
                for conn in [c for c in open_pipes if c in ready]:
                    try:
                        self._handle(conn.recv())
                    except (EOFError, ConnectionError):
                        role = open_pipes.pop(conn)
                        if not self.done:
                            raise self._death(role) from None
                self._write_ledger(LEDGER_EVERY_S)
            self._join()
        finally:
            signal.signal(signal.SIGINT, before)
            self.close()

    def close(self) -> None:
        """End every role that still runs, by force, and write the ledger."""
        for process, conn in self._roles.values():
            if process.is_alive():
                process.kill()
                process.join()
            conn.close()
        self._roles.clear()
        self._write_ledger(0, last=True)
        self.metrics.close()

    def _join(self) -> None:
        deadline = time.monotonic() + GRACE_S
        for process, _ in self._roles.values():
            process.join(max(0.1, deadline - time.monotonic()))

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

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        self._interrupts += 1
        if self._interrupts > 1:
            raise KeyboardInterrupt
        self.view.log("stopping after this step and saving a checkpoint; Ctrl-C again ends at once")
        self._roles["controller"][1].send("stop")

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
                self.view.phase("training")
            case Event(kind="step"):
                self._record(message.time, message.data)
            case Event(kind="eval"):
                self._evaluated(message.data)
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

    def _recall(self) -> None:
        """Take the curve and the view's history from the metrics of the run that goes on."""
        for line in read(self.run_dir / "metrics.jsonl"):
            if "eval/pass_rate" in line:
                self.points.append(
                    EvalPoint(
                        line["step"], line["compute/total"], line["eval/pass_rate"], line["eval/pass_rate_se"]
                    )
                )
            self.view.update(line)

    def _record(self, at: float, data: dict[str, Any]) -> None:
        """One line of metrics.jsonl: the event's own numbers and the compute at its moment."""
        compute = self.ledger.compute(at)
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

    def _evaluated(self, data: dict[str, Any]) -> None:
        """An evaluation is a point of the curve: fit again, forecast."""
        at, step = data.pop("at"), data.pop("step")
        compute = 0.0 if step == 0 else self.ledger.compute(at).total
        self.points.append(EvalPoint(step, compute, data["pass_rate"], data["pass_rate_se"]))
        line = {"step": step} | {f"eval/{k}": v for k, v in data.items()}
        self.fit = fit_run(self.points)
        if self.fit.identified:
            line |= {
                "forecast/ceiling": self.fit.A.value,
                "forecast/ceiling_low": self.fit.A.low,
                "forecast/ceiling_high": self.fit.A.high,
            }
        self._record(at, line)

    def _write_ledger(self, every: float, last: bool = False) -> None:
        if time.monotonic() - self._ledger_written >= every:
            self._ledger_written = time.monotonic()
            self.ledger.write(self.run_dir, last)


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
        case _:
            return f"{event.kind}: {data}"
