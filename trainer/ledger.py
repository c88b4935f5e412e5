"""The run's books: device-seconds by role and state, and from them C, the compute of the scaling curve.

    wall time   |--- start-up ---|-- R0's evaluation --|--- training ------------------|
    engine      | start-up       | evaluate            | generate  evaluate  generate  |
    learner     | start-up       | idle                | forward_backward  idle  ...   |
    booked as     startup          evaluation, startup   total     (engine: evaluation)

`compute/total` (C) is the sum, over the roles that hold devices (learner and engine), of devices × wall
time held since training began, without the states `evaluate` and `start-up`: idle time, weight pushes
and checkpoints are in it. `evaluation` is all time in `evaluate`; `startup` is all that is left. The
three add up to everything held. On GPUs the unit is GPU-hours. On a CPU learner and engine share the
cores in time, so each holds half of them, and the unit is core-hours.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trainer.messages import Spans
from trainer.run_folder import write_atomic

RECENT = 20_000  # spans a role keeps in memory; `compute(at)` can look back over these


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

    Compute that a crash made worthless stays booked: it was spent.
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
        self._recent: dict[str, deque[Span]] = {}  # role -> its last spans, adjacent equal ones merged
        self._unwritten: list[Span] = []
        self._ended = False
        self._began: float | None = None
        self._before: dict[str, dict[str, float]] | None = None

    def add(self, spans: Spans) -> None:
        """Book what a role did. Time it has not told of (its process was being started) is start-up."""
        seconds = self._seconds.setdefault(spans.role, defaultdict(float))
        recent = self._recent.setdefault(spans.role, deque(maxlen=RECENT))
        for state, start, end in spans.spans:
            booked = recent[-1].end if recent else 0.0
            start, end = start - self._start, end - self._start
            if start > booked + 1e-6:
                self._book(recent, seconds, Span(spans.role, "start-up", booked, start))
                booked = start
            if end > booked:
                self._book(recent, seconds, Span(spans.role, state, booked, end))
        if self._began is not None and self._before is None and self._reported() >= self._began:
            self._before = self._as_of(self._began)

    def begin_training(self, at: float) -> None:
        """Compute counts from here on."""
        self._began = at - self._start

    def compute(self, at: float | None = None) -> Compute:
        """Compute up to `at` (monotonic clock), or all that is booked.

        A role that has not yet told of the time just before `at` is taken to have stayed in its last state.
        """
        now = self._as_of(None if at is None else at - self._start)
        before = now
        if self._began is not None and (at is None or at - self._start >= self._began):
            before = self._before or self._as_of(self._began)
        total = evaluation = startup = 0.0
        for role, states in now.items():
            devices = self.devices.get(role, 0.0)
            for state, seconds in states.items():
                if state == "evaluate":
                    evaluation += devices * seconds
                    continue
                untrained = seconds if state == "start-up" else before.get(role, {}).get(state, 0.0)
                startup += devices * untrained
                total += devices * (seconds - untrained)
        past = self._past
        hours = (total / 3600, evaluation / 3600, startup / 3600)
        return Compute(past.total + hours[0], past.evaluation + hours[1], past.startup + hours[2])

    def idle_shares(self, since: float | None = None) -> dict[str, float]:
        """Idle share of each device-holding role's training time, since `since` or since training began."""
        if since is not None:
            before = self._as_of(since - self._start)
        else:
            before = self._before or self._as_of(self._began or 0.0)
        shares = {}
        for role in self.devices:
            past = before.get(role, {})
            spent = {k: s - past.get(k, 0.0) for k, s in self._seconds.get(role, {}).items()}
            held = sum(s for state, s in spent.items() if state not in ("evaluate", "start-up"))
            shares[role] = max(0.0, spent.get("idle", 0.0)) / held if held > 0 else 0.0
        return shares

    def to_json(self) -> dict[str, Any]:
        """The ledger as written to ledger.json: `states` in device-seconds, `seconds` in wall seconds."""
        roles = {}
        for role in dict.fromkeys([*self._past_roles, *self._seconds]):
            past = self._past_roles.get(role, {"wall_s": 0.0, "states": {}, "seconds": {}})
            seconds = self._seconds.get(role, {})
            devices = self.devices.get(role, 0.0)
            held = {state: s * devices for state, s in seconds.items()}
            roles[role] = {
                "devices": devices,
                "wall_s": past["wall_s"] + (self._recent[role][-1].end if role in self._recent else 0.0),
                "states": _sum(past["states"], held),
                "seconds": _sum(past["seconds"], seconds),
            }
        return {
            "unit": self.unit,
            "devices_total": sum(self.devices.values()),
            "wall_s": self._past_wall + max((r[-1].end for r in self._recent.values()), default=0.0),
            "roles": roles,
            "compute": asdict(self.compute()),
        }

    def write(self, run_dir: Path, last: bool = False) -> None:
        """Rewrite ledger.json and append to timeline.jsonl; a role's open span is written when it ends."""
        write_atomic(run_dir / "ledger.json", json.dumps(self.to_json(), indent=1))
        if last and not self._ended:
            self._ended = True
            self._unwritten += [recent[-1] for recent in self._recent.values()]
        with (run_dir / "timeline.jsonl").open("a") as file:
            for span in self._unwritten:
                start, end = (round(self._past_wall + t, 4) for t in span[2:])
                row = {"role": span.role, "state": span.state, "start": start, "end": end}
                file.write(json.dumps(row) + "\n")
        self._unwritten.clear()

    def _book(self, recent: deque[Span], seconds: dict[str, float], span: Span) -> None:
        seconds[span.state] += span.end - span.start
        if recent and recent[-1].state == span.state:
            recent[-1] = recent[-1]._replace(end=span.end)
            return
        if recent:
            self._unwritten.append(recent[-1])
        recent.append(span)

    def _as_of(self, at: float | None) -> dict[str, dict[str, float]]:
        """Seconds by role and state up to `at`; the last state goes on where nothing was reported yet."""
        sums = {role: dict(states) for role, states in self._seconds.items()}
        if at is None:
            return sums
        for role, recent in self._recent.items():
            sums[role][recent[-1].state] += max(0.0, at - recent[-1].end)
            for span in reversed(recent):
                if span.end <= at:
                    break
                sums[role][span.state] -= span.end - max(at, span.start)
        return sums

    def _reported(self) -> float:
        """The moment up to which every device-holding role has told what it did."""
        return min((self._recent[r][-1].end if r in self._recent else 0.0) for r in self.devices)


def read_timeline(path: Path) -> list[Span]:
    """The spans of timeline.jsonl."""
    rows = (json.loads(line) for line in path.read_text().splitlines())
    return [Span(r["role"], r["state"], r["start"], r["end"]) for r in rows]


def overlap(
    timeline: Iterable[Span],
    a: tuple[str, str] = ("engine", "generate"),
    b: tuple[str, str] = ("learner", "forward_backward"),
) -> float:
    """Seconds during which role a[0] was in state a[1] while role b[0] was in state b[1]."""
    spans = list(timeline)
    first = sorted((s.start, s.end) for s in spans if (s.role, s.state) == a)
    second = sorted((s.start, s.end) for s in spans if (s.role, s.state) == b)
    both, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        both += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return both


def _sum(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    return {k: a.get(k, 0.0) + b.get(k, 0.0) for k in dict.fromkeys([*a, *b])}
