"""The run's ledger: device-seconds by role and state, and from them C, the compute of the scaling curve.

    wall time   |--- start-up ---|-- R0's evaluation --|--- training ------------------| end       |
    engine      | start-up       | evaluate            | generate  evaluate  generate  | shut-down |
    learner     | start-up       | idle                | forward_backward  idle  ...   | shut-down |
    booked as     startup          evaluation            total     evaluation  total     startup

`compute/total` (C) is the sum, over the roles that hold devices (learner and engine), of devices × wall
time held from training's beginning to its end, without evaluation; it includes idle time, weight pushes,
checkpoints, and `tools`: an engine has no request while episodes wait for their environments (for those of
an evaluation alone that is `evaluate`), or `teacher`, while groups wait for a teacher's scores.
`evaluation` is all time in `evaluate`, and a role's idle time while another evaluates; `startup` is the
rest: until training begins, and the seconds in which the processes end. The three add up to all the time
held. On GPUs the unit is GPU-hours. On a CPU learner and engine share the cores in time, so each holds half
of them, and the unit is core-hours.
"""

import json
import math
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from trainer.jsonl import write_atomic
from trainer.messages import Spans

K = TypeVar("K")


class Span(NamedTuple):
    """A role was in one state from start to end, in seconds since the run began."""

    role: str
    state: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Compute:
    """Device-hours, in the ledger's unit."""

    total: float  # C
    evaluation: float
    startup: float


class Ledger:
    """Books every role's spans. A process that resumes a run passes the last `to_json()` as `carried`.

    Compute whose results a crash lost stays booked: it was spent.
    """

    def __init__(
        self, devices: Mapping[str, float], unit: str, clock_start: float, carried: Mapping[str, Any] | None
    ) -> None:
        self.devices, self.unit, self._start = dict(devices), unit, clock_start
        carried = carried or {"wall_s": 0.0, "compute": {}, "roles": {}}
        self._past_wall: float = carried["wall_s"]
        self._past_roles: dict[str, Any] = carried["roles"]
        self._past = Compute(*(carried["compute"].get(k, 0.0) for k in ("total", "evaluation", "startup")))
        self._seconds: dict[str, dict[str, float]] = {}  # role -> state -> wall seconds of this process
        self._last: dict[str, Span] = {}  # role -> its last span, still growing
        self._open: dict[str, list[Span]] = {role: [] for role in devices}  # not yet reported by every role
        self._settled_until = 0.0  # every role has reported until here
        self._settled: dict[tuple[str, str], float] = {}  # (role, kind) -> seconds until then
        self._unwritten: list[Span] = []
        self._training_began: float | None = None
        self._training_ended = math.inf

    def add(self, spans: Spans) -> None:
        """Book what a role did. Time before its first report, while its process started, is start-up."""
        for state, start, end in spans.spans:
            booked = self._reported_until(spans.role)
            start, end = start - self._start, end - self._start
            if start > booked + 1e-6:
                self._book(Span(spans.role, "start-up", booked, start))
                booked = start
            cut = min(end, max(booked, self._training_ended))
            if cut > booked:
                self._book(Span(spans.role, state, booked, cut))
            if end > cut:
                self._book(Span(spans.role, "shut-down", cut, end))
        settled = min(map(self._reported_until, self.devices))
        if self._training_began is None or settled == self._settled_until:
            return  # spans can arrive before the training_begins event
        self._settled = _sum(self._settled, self._kinds(settled))
        for role, open_ in self._open.items():
            self._open[role] = [s._replace(start=max(s.start, settled)) for s in open_ if s.end > settled]
        self._settled_until = settled

    def carry(self, total: float, state: str = "unrecorded") -> None:
        """Book in this state what a killed launcher did not write, if C had reached `total` before."""
        missing = total - self._past.total
        if missing <= 0:
            return
        self._past = replace(self._past, total=total)
        seconds = missing * 3600 / sum(self.devices.values())
        self._past_wall += seconds
        for role, devices in self.devices.items():
            past = self._past_roles.setdefault(role, {"wall_s": 0.0, "states": {}, "seconds": {}})
            past["wall_s"] += seconds
            past["states"] = _sum(past["states"], {state: seconds * devices})
            past["seconds"] = _sum(past["seconds"], {state: seconds})

    def begin_training(self, moment: float) -> None:
        """Compute counts from this moment (monotonic clock) on."""
        self._training_began = moment - self._start

    def end_training(self, moment: float) -> None:
        """Compute counts up to this moment (monotonic clock); all that roles do later is `shut-down`."""
        self._training_ended = moment - self._start

    def compute(self, moment: float | None = None) -> Compute:
        """Compute up to `moment` (monotonic clock), by default until the latest report of any role.

        A role whose reports end before is taken to have stayed in its last state. But start-up and the first
        evaluation are over when training begins, so time after a state from before that counts as training.
        """
        now = self._latest() if moment is None else moment - self._start
        hours: dict[str, float] = defaultdict(float)
        for (role, kind), seconds in _sum(self._settled, self._kinds(now)).items():
            hours[kind] += self.devices[role] * seconds / 3600
        kinds = ("total", "evaluation", "startup")
        return Compute(*(getattr(self._past, kind) + hours[kind] for kind in kinds))

    def idle_shares(self) -> dict[str, float]:
        """Idle share of each device-holding role's training time."""
        booked = self._settled
        return {r: booked.get((r, "idle"), 0.0) / booked.get((r, "total"), 1.0) for r in self.devices}

    def to_json(self) -> dict[str, Any]:
        """The ledger as written to ledger.json: `states` in device-seconds, `seconds` in wall seconds, of all
        processes; `devices` are those of the newest, whose number may be another."""
        roles = {}
        for role in dict.fromkeys([*self._past_roles, *self._seconds]):
            past = self._past_roles.get(role, {"wall_s": 0.0, "states": {}, "seconds": {}})
            seconds = self._seconds.get(role, {})
            devices = self.devices.get(role, 0.0)
            device_seconds = {state: s * devices for state, s in seconds.items()}
            roles[role] = {
                "devices": devices,
                "wall_s": past["wall_s"] + self._reported_until(role),
                "states": _sum(past["states"], device_seconds),
                "seconds": _sum(past["seconds"], seconds),
            }
        return {
            "unit": self.unit,
            "devices_total": sum(self.devices.values()),
            "wall_s": self._past_wall + self._latest(),
            "roles": roles,
            "compute": asdict(self.compute()),
            "clock": {"start": self._start, "end": self._start + self._latest()},
        }

    def write(self, run_dir: Path) -> None:
        """Rewrite ledger.json and append to timeline.jsonl; a role's open span is written when it ends."""
        write_atomic(run_dir / "ledger.json", json.dumps(self.to_json(), indent=1))
        with (run_dir / "timeline.jsonl").open("a") as file:
            for span in self._unwritten:
                start, end = (round(self._past_wall + t, 4) for t in span[2:])
                file.write(json.dumps(span._replace(start=start, end=end)._asdict()) + "\n")
        self._unwritten.clear()

    def close(self, run_dir: Path, now: float) -> None:
        """Write for the last time. Every role has held its devices until `now`, in its last state."""
        for role in self.devices:
            state = self._last[role].state if role in self._last else "start-up"
            self.add(Spans(role, ((state, self._start + self._reported_until(role), now),)))
        self._unwritten += self._last.values()
        self.write(run_dir)

    def _reported_until(self, role: str) -> float:
        """The end of a role's last span."""
        return self._last[role].end if role in self._last else 0.0

    def _latest(self) -> float:
        """The latest report of a role that holds devices."""
        return max(map(self._reported_until, self.devices))

    def _book(self, span: Span) -> None:
        self._seconds.setdefault(span.role, defaultdict(float))[span.state] += span.end - span.start
        if span.role in self.devices:
            self._open[span.role].append(span)
        last = self._last.get(span.role)
        if last and last.state == span.state:
            span = span._replace(start=last.start)
        elif last:
            self._unwritten.append(last)
        self._last[span.role] = span

    def _kinds(self, until: float) -> dict[tuple[str, str], float]:
        """Unsettled wall seconds by (role, kind). Idle time in "total" is counted under "idle" as well."""
        began, ended = self._training_began, self._training_ended
        queues = {role: deque(spans) for role, spans in self._open.items()}
        for role in queues:
            last = self._last.get(role, Span(role, "start-up", 0.0, 0.0))
            if last.end < until:
                known = until if began is None or last.start > began else max(last.end, min(began, until))
                queues[role].append(last._replace(start=last.end, end=known))
                queues[role].append(Span(role, "unknown", known, until))
        cuts = {t for spans in queues.values() for s in spans for t in s[2:]}
        cuts |= {until, began or 0.0, ended}
        booked: dict[tuple[str, str], float] = defaultdict(float)
        for start, end in pairwise(sorted(t for t in cuts if self._settled_until <= t <= until)):
            states = {}
            for role, spans in queues.items():
                while spans and spans[0].end <= start:
                    spans.popleft()
                if spans and spans[0].start <= start:
                    states[role] = spans[0].state
            for role, state in states.items():
                kind = "total"
                if state == "evaluate" or (state == "idle" and "evaluate" in states.values()):
                    kind = "evaluation"
                elif state in ("start-up", "shut-down") or began is None or not began <= start < ended:
                    kind = "startup"
                elif state == "idle":
                    booked[role, "idle"] += end - start
                booked[role, kind] += end - start
        return booked


def _sum(a: Mapping[K, float], b: Mapping[K, float]) -> dict[K, float]:
    return {k: a.get(k, 0.0) + b.get(k, 0.0) for k in dict.fromkeys([*a, *b])}
