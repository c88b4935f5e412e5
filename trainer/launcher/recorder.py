"""Turns what the roles report into the run's record: ledger, metrics, curve, forecast and terminal view."""

import json
import math
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from trainer.accounting.flops import step_flops
from trainer.accounting.ledger import Compute, Ledger
from trainer.cli import to_yaml
from trainer.config import Config, ConfigError
from trainer.jsonl import read_lines, write_atomic
from trainer.launcher.metrics import MetricsWriter
from trainer.launcher.placement import Devices
from trainer.launcher.terminal import View
from trainer.launcher.warning_signs import SIGNS, Guards
from trainer.messages import Event, Keep, Pace, Spans
from trainer.roles import role_kind
from trainer.run_folder import EVENTS, checkpoints, devices_by_role, kept_at, origin, record_end
from trainer.scaling import EvalPoint, Fit, curve_of
from trainer.scaling.earlier import learn
from trainer.scaling.forecast import backtest, describe_recommendation, error_at_2x, forecast, reason_to_stop
from trainer.scaling.reading.read import curves_of, read_groups

LEDGER_EVERY_S = 5.0
BEHIND_S = 2.0  # an evaluation that has waited for longer is not fitted


class Recorder:
    """The record of one run, from the messages of its roles alone: it knows no process.

    `resume` is the controller's state in the checkpoint that a resumed run continues from, and `estimated_gb`
    what a learner rank was expected to hold at most.
    """

    def __init__(
        self,
        config: Config,
        devices: Devices,
        view: View,
        resume: Mapping[str, Any] | None,
        estimated_gb: float = 0,
    ) -> None:
        self.config, self.view, self.run_dir = config, view, Path(config.run_dir)
        self.estimated_gb, self.peak_gb = estimated_gb, 0.0  # peak: measured by the learner's first rank
        self.start = self._began = time.monotonic()
        books = self.run_dir / "ledger.json"  # a branch begins without
        carried = json.loads(books.read_text()) if resume and books.exists() else None
        self.ledger = Ledger(devices.by_role(), devices.unit, self.start, carried)
        self._ledger_written = -math.inf  # at the first message: without it a resume recovers no line
        self.points: list[EvalPoint] = []
        self.ask: Callable[[object], None] = lambda message: None  # sends the controller a message
        done = map(kept_at, checkpoints(self.run_dir)) if resume else ()
        # Points of `logging.keep_at` up to here are done with.
        began = origin(self.run_dir)
        self._kept = max((began.get("compute", 0.0), *done))
        self._flops = 0.0
        self._guards = Guards()
        self._like = learn(curves_of(read_groups(config.forecast.like))) if config.forecast.like else None
        if self._like and self._like.unit != self.ledger.unit:
            units = f"those runs' compute is in {self._like.unit}, this run's in {self.ledger.unit}"
            raise ConfigError(f"forecast.like: {units}; expected runs on the same kind of device")
        self._forecast_due = False  # points have come since
        replayed = "replay" in began  # it ends with the recorded steps, whatever it takes to train on them
        self._limit = (not replayed and config.pipeline.max_compute) or math.inf
        self._why_stopped = ""  # by `forecast.stop` or `guard.stop`
        self._parameters = 0, 0, 0  # of policy, reference and adapters, once the learner is ready
        self._spent = 0.0  # C of the last version
        self._versions: dict[int, tuple[float, Compute, float]] = {}  # when made; compute, FLOPs until then
        self._counts: dict[str, Mapping[str, float]] = {}  # by engine, as it last reported them
        self._tokens_per_s: dict[str, float] = {}  # by engine
        self._kv_use: list[float] = []  # shares of engines' KV caches in use, since the last line
        if carried is None:
            self._write_config()
        if resume:
            self._resume(resume["version"], carried)
        else:
            self.metrics = MetricsWriter(self.run_dir, config)
        self._forecast = forecast(self.points, 0.0, None, self._like) if self.points else None

    @property
    def fit(self) -> Fit | None:
        """The curve so far."""
        if self._forecast_due:
            self._forecast, self._forecast_due = forecast(self.points, 0.0, self._forecast, self._like), False
        return self._forecast.fit if self._forecast else None

    def handle(self, role: str, message: object) -> str:
        """Record one message that a role has sent; returns why the run is complete now, or nothing."""
        ended_by = ""
        match message:
            case Spans():
                self.ledger.add(message)
            case Event(kind="phase"):
                self.view.phase(message.data["name"])
            case Event(kind="ready", data={"learner": learner}):
                self._parameters = _sizes(learner)
                if kernels := learner.get("kernels"):
                    self.view.log(f"learner: {kernels}")
            case Event(kind="training_begins"):
                self.ledger.begin_training(message.time)
                self._write_config()  # in a resume only now: settings that do not start must not stay
                self.view.phase("training")
            case Event(kind="step"):
                ended_by = self._on_step(message)
            case Event(kind="eval"):
                ended_by = self._on_eval(message)
            case Event(kind="sample"):
                self.metrics.write_sample(message.data)
                self.view.sample(message.data)
            case Event(kind="engine"):
                self._on_engine(role, message.data)
            case Event(kind="done", data={"ended_by": by}):
                self.ledger.end_training(message.time)
                why = self._why_stopped if by in ("forecast", "guard") else ""
                if by:
                    record_end(self.run_dir, by, self.config.pipeline.max_compute, why)
            case Event():
                self.view.log(_sentence(message))
        if time.monotonic() - self._ledger_written >= LEDGER_EVERY_S:
            self._ledger_written = time.monotonic()
            self.ledger.write(self.run_dir)
        return ended_by

    def _on_step(self, event: Event) -> str:
        compute, warnings = self._record_step(event)
        if compute >= self.config.logging.next_kept(self._kept):
            self._kept = compute
            self.ask(Keep(compute))
        if self.config.pipeline.max_compute:
            self.ask(Pace(compute / event.data["step"]))
        for text in warnings.values():
            self.view.log(f"warning: {text}")
        lasting = [text for name, text in warnings.items() if SIGNS[name].in_a_row > 1]
        if compute >= self._limit:
            return "compute"
        if not lasting or not self.config.guard.stop or self._why_stopped:
            return ""
        self._why_stopped = lasting[0]
        self.view.log("stopping, as guard.stop asks")
        return "guard"

    def _on_engine(self, role: str, counts: Mapping[str, float]) -> None:
        """Compute an engine's tokens per second since its last report; a new process counts from 0."""
        last = self._counts.get(role, {})
        if counts["tokens"] < last.get("tokens", 0.0):
            last = {}
        tokens, seconds = (counts[key] - last.get(key, 0.0) for key in ("tokens", "busy_s"))
        self._counts[role], self._tokens_per_s[role] = counts, tokens / seconds if seconds else 0.0
        if "kv_use" in counts:
            self._kv_use.append(counts["kv_use"])

    def close(self) -> None:
        """Close the ledger and the files, once every role has ended."""
        self.ledger.close(self.run_dir, time.monotonic())
        self.metrics.close()

    def _write_config(self) -> None:
        write_atomic(self.run_dir / "config.yaml", to_yaml(self.config))

    def _resume(self, version: int, books: Mapping[str, Any] | None) -> None:
        """Read back curve and history up to the checkpoint's version; later steps will be made again.

        Compute that metrics.jsonl states and no report accounts for is booked as `unrecorded`; in a branch,
        which has no books yet, it is that before it began.
        """
        path = self.run_dir / "metrics.jsonl"
        recorded = list(read_lines(path))
        rows = [row for row in recorded if row["step"] <= version > 0]  # version 0 is evaluated again
        write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))
        self.start = books["clock"]["start"] if books else self._began
        for row in rows:
            self._reload(row)
        self.metrics = MetricsWriter(self.run_dir, self.config)
        if books:
            self._catch_up(books, version, {(row["step"], "eval/pass_rate" in row) for row in rows})
        self.start = self._began
        spent = max((row.get("compute/total", 0.0) for row in recorded), default=0.0)
        self.ledger.carry(spent, "unrecorded" if books else "before branch")

    def _catch_up(self, books: Mapping[str, Any], version: int, lines: Set[tuple[int, bool]]) -> None:
        """Record what the controller has logged and a killed launcher did not record; then delete the log."""
        log, last, new = self.run_dir / EVENTS, books["clock"]["end"], self.ledger
        devices = devices_by_role(str(self.run_dir)) or new.devices  # those of the killed process
        ledger = self.ledger = Ledger(devices, books["unit"], last, books)
        for record in read_lines(log) if log.exists() else ():
            event = Event(**record)
            step, began = event.data.get("step", 0), event.time - event.data.get("seconds", 0.0)
            for role in ledger.devices:
                ledger.add(Spans(role, (("unrecorded", last, began), ("evaluate", began, event.time))))
            last = max(last, event.time)
            if event.kind == "ready":
                self._parameters = _sizes(event.data["learner"])
            elif event.kind == "training_begins":
                ledger.begin_training(event.time)
            elif step <= version and (step, event.kind == "eval") not in lines:
                if event.kind == "step":
                    self._record_step(event)
                else:
                    self._write_line(self._add_point(event))
        ledger.write(self.run_dir)
        log.unlink(missing_ok=True)
        self.ledger = Ledger(new.devices, new.unit, self._began, ledger.to_json())

    def _reload(self, row: Mapping[str, Any]) -> None:
        """Take in a line that an earlier process has written."""
        self._flops = max(self._flops, row.get("compute/flops", 0.0))
        if "eval/pass_rate" in row:
            rate, error = row["eval/pass_rate"], row["eval/pass_rate_se"]
            flops = row.get("compute/flops", 0.0)
            self.points.append(EvalPoint(row["step"], row["compute/total"], rate, error, flops))
        elif "compute/total" in row:
            self._guards.check(row)
            compute = Compute(*(row.get(f"compute/{f.name}", 0.0) for f in fields(Compute)))
            self._versions[row["step"]] = self.start + row["time"], compute, self._flops
        self.view.update(row, resumed=True)

    def _write_line(self, data: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl: the event's numbers, and the compute when its version was made."""
        made_at, compute, flops = self._versions[data["step"]]
        line = dict(data) | {
            "time": made_at - self.start,
            **{f"compute/{kind}": hours for kind, hours in asdict(compute).items()},
            "compute/flops": flops,
            "engine/tokens_per_s": sum(self._tokens_per_s.values()),
        }
        if self._kv_use:
            preemptions = sum(counts.get("preemptions", 0.0) for counts in self._counts.values())
            line |= {"engine/kv_use": max(self._kv_use), "engine/preemptions": preemptions}
            self._kv_use = []
        idle = self.ledger.idle_shares()
        for kind in ("learner", "engine"):
            shares = [share for role, share in idle.items() if role_kind(role) == kind]
            line[f"idle/{kind}"] = sum(shares) / max(1, len(shares))  # a replay has no engine
        self.metrics.write(line)
        self.view.update(line, resumed=made_at < self._began)

    def _record_step(self, event: Event) -> tuple[float, dict[str, str]]:
        """Write the line of a step; returns the compute when it was made, and what is wrong, by sign."""
        compute = self.ledger.compute(event.time)
        # A role that reported late may have evaluated before the last version, where training was assumed.
        self._spent = max(self._spent, compute.total)
        compute = replace(compute, total=self._spent)
        parameters, *others = self._parameters
        self._flops += step_flops(parameters, self.config.objective, event.data, *others)
        self._versions[event.data["step"]] = event.time, compute, self._flops
        self.peak_gb = max(self.peak_gb, event.data.get("learner/peak_memory_gb", 0.0))
        warnings = self._guards.check(event.data)
        line = event.data | {"learner/estimated_memory_gb": self.estimated_gb}
        self._write_line(line | {f"warning/{name}": text for name, text in warnings.items()})
        return compute.total, warnings

    def _on_eval(self, event: Event) -> str:
        """Fit and forecast again with a new point of the curve; "forecast" if that ends the run.

        A launcher that is behind, since evaluations come faster than fits, only writes it down.
        """
        line = self._add_point(event)
        self._forecast_due = time.monotonic() - event.time > BEHIND_S
        if self._forecast_due:
            self._write_line(line)
            return ""
        step, compute, unit = event.data["step"], self.points[-1].compute, self.ledger.unit
        planned = compute / step * self.config.pipeline.steps if step else 0.0
        if self._forecast and (axis := self._forecast.fit.axis):  # the rest is made at the rate ahead
            planned = compute + (planned - compute) / float(np.median(axis.ahead))
        end = min(planned, self._limit)
        last = self._forecast.recommendation if self._forecast else "none"
        self._forecast = forecast(self.points, end, self._forecast, self._like)
        if (error := error_at_2x(backtest(curve_of("", unit, self.points)))) is not None:
            line["forecast/error_at_2x"] = error
        self._write_line(line | self._forecast.metrics())
        advice = describe_recommendation(self._forecast, unit, end - compute)
        if advice and self._forecast.recommendation != last:
            self.view.log(advice)
        rule, patience = self.config.forecast.rule, self.config.forecast.patience
        if rule is None or self._why_stopped:
            return ""
        self._why_stopped = reason_to_stop(self.points, self._forecast, end, unit, rule, patience, self._like)
        if self._why_stopped:
            self.view.log(f"stopping: {self._why_stopped}")
        return "forecast" if self._why_stopped else ""

    def _add_point(self, event: Event) -> dict[str, Any]:
        """Add an evaluation to the curve; returns its line of metrics.jsonl."""
        step, rate = event.data["step"], event.data["pass_rate"]
        if step == 0:
            self._versions[0] = event.time, replace(self.ledger.compute(event.time), total=0.0), 0.0
        _, books, flops = self._versions[step]
        compute = books.total
        self.points.append(EvalPoint(step, compute, rate, event.data["pass_rate_se"], flops))
        self.metrics.write_held_out(step, event.data.get("by_prompt", {}))
        line = {"step": step}
        line |= {f"eval/{k}": v for k, v in event.data.items() if k not in ("step", "by_prompt")}
        gain = {"eval/gain_per_hour": (rate - self.points[0].pass_rate) / compute} if compute else {}
        return line | gain


def _sizes(learner: Mapping[str, Any]) -> tuple[int, int, int]:
    """Parameters of policy, reference and adapters, from what a learner says when it is ready."""
    return learner["parameters"], learner.get("reference_parameters", 0), learner.get("adapters", 0)


def _sentence(event: Event) -> str:
    """An event as a line for a person."""
    data = event.data
    match event.kind:
        case "data":
            return f"{data['train']} training prompts, {data['held_out']} held out"
        case "parity":
            gap = f"{data['mean']:.1e} nats (max {data['max']:.1e})"
            means = ", ".join(f"{name} {mean:.1e}" for name, mean in data["by_position"].items())
            return f"learner and engine agree on {data['tokens']} tokens to {gap}; by position {means}"
        case "checkpoint":
            return f"checkpoint {data['path']}"
        case "note":
            return str(data["text"])
        case _:
            return f"{event.kind}: {data}"
