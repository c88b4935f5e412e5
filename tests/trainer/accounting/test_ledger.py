"""The ledger's books, worked by hand: two roles on one core each, so that core-hours × 3600 are seconds."""

import json
import time
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from trainer.accounting.ledger import Ledger, Span
from trainer.jsonl import read_lines
from trainer.messages import Spans
from trainer.telemetry import Clock

START = 1000.0  # the monotonic clock at the run's start

ENGINE = (
    ("start-up", 1002.0, 1010.0),
    ("evaluate", 1010.0, 1020.0),  # R0
    ("generate", 1020.0, 1030.0),
    ("weight_push", 1030.0, 1031.0),
    ("evaluate", 1031.0, 1035.0),
    ("generate", 1035.0, 1040.0),
)
LEARNER = (
    ("start-up", 1001.0, 1012.0),
    ("idle", 1012.0, 1024.0),
    ("forward_backward", 1024.0, 1033.0),
    ("optimizer", 1033.0, 1034.0),
    ("idle", 1034.0, 1040.0),
)


def book(ledger: Ledger) -> None:
    """The spans above, in several messages."""
    ledger.add(Spans("engine", ENGINE[:3]))
    ledger.add(Spans("learner", LEARNER[:2]))
    ledger.begin_training(1020.0)
    ledger.add(Spans("engine", ENGINE[3:]))
    ledger.add(Spans("learner", LEARNER[2:]))
    ledger.add(Spans("controller", (("idle", 1000.0, 1040.0),)))


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger({"learner": 1.0, "engine": 1.0}, "core-hours", START, None)
    book(ledger)
    return ledger


def seconds(compute: object) -> list[float]:
    return [round(getattr(compute, k) * 3600, 6) for k in ("total", "evaluation", "startup")]


def test_compute_is_time_held_since_training_began_without_evaluation(ledger: Ledger) -> None:
    # engine since 1020: 10 generate + 1 push + 5 generate; learner since 1020: 20 s less the 1 s idle beside
    # the evaluation of 1031-1035. evaluation: 10 + 4, and of the learner's idle time 8 + 1.
    # start-up: the engine's 10, the learner's 12.
    assert seconds(ledger.compute()) == [16 + 19, 14 + 9, 10 + 12]


def test_time_that_an_engine_waits_for_tools_is_training_time_and_no_idleness() -> None:
    # Training begins at 1004. The engine: 4 s start-up, 3 generate, 6 tools, 1 generate, 2 idle (its slots
    # are used up), 4 evaluate, tools included. The learner: 4 s start-up, 9 idle, 3 training, 4 idle beside
    # the evaluation.
    engine = ("start-up", 4), ("generate", 3), ("tools", 6), ("generate", 1), ("idle", 2), ("evaluate", 4)
    learner = ("start-up", 4), ("idle", 9), ("optimizer", 3), ("idle", 4)
    ledger = Ledger({"learner": 1.0, "engine": 1.0}, "core-hours", START, None)
    ledger.begin_training(START + 4)
    for role, states in {"engine": engine, "learner": learner}.items():
        ends = [START, *(START + end for end in accumulate(seconds for _, seconds in states))]
        ledger.add(
            Spans(role, tuple((s, *span) for (s, _), span in zip(states, pairwise(ends), strict=True)))
        )
    assert seconds(ledger.compute()) == [(3 + 6 + 1 + 2) + (9 + 3), 4 + 4, 4 + 4]
    assert ledger.to_json()["roles"]["engine"]["states"]["tools"] == 6.0
    assert ledger.idle_shares() == {"learner": 9 / 12, "engine": 2 / 12}


def test_everything_held_is_booked_once(ledger: Ledger) -> None:
    assert sum(seconds(ledger.compute())) == 2 * 40


def test_a_role_that_has_not_reported_yet_stays_in_its_last_state(ledger: Ledger) -> None:
    # two seconds after the last report: 2 s generate, 2 s learner idle.
    assert seconds(ledger.compute(1042.0)) == [35 + 4, 23, 22]
    assert seconds(ledger.compute()) == [35, 23, 22]  # asking does not change the books


def test_time_since_training_began_counts_before_any_role_has_reported_it() -> None:
    # The first steps can be faster than the roles report: their last states are those of the evaluation.
    ledger = Ledger({"learner": 1.0, "engine": 1.0}, "core-hours", START, None)
    ledger.begin_training(1021.0)
    assert seconds(ledger.compute(1021.4)) == pytest.approx([0.8, 0, 42])  # a whole run can be as fast
    ledger = Ledger({"learner": 1.0, "engine": 1.0}, "core-hours", START, None)
    ledger.add(Spans("engine", (("start-up", 1000.0, 1010.0), ("evaluate", 1010.0, 1020.0))))
    ledger.add(Spans("learner", (("start-up", 1000.0, 1012.0),)))
    ledger.begin_training(1021.0)
    # engine: evaluate until 1021; learner: start-up until 1021; then 0.4 s of training each
    assert seconds(ledger.compute(1021.4)) == pytest.approx([0.8, 11, 31])
    ledger.add(Spans("learner", (("idle", 1012.0, 1021.2),)))
    # the learner idled beside the evaluation for 9 s
    assert seconds(ledger.compute(1021.4)) == pytest.approx([0.8, 20, 22])
    ledger.add(Spans("engine", (("evaluate", 1020.0, 1021.1),)))  # a report across the moment
    assert seconds(ledger.compute(1021.4)) == pytest.approx([0.6, 20.2, 22])


@pytest.mark.parametrize("state", ["evaluate", "generate"])
def test_a_role_that_idles_beside_an_evaluation_is_booked_with_it_however_late_it_reports(state: str) -> None:
    ledger = Ledger({"learner": 1.0, "engine": 1.0}, "core-hours", START, None)
    ledger.begin_training(START)
    for i in range(30_000):
        at = START + i / 1000
        ledger.add(Spans("engine", (("generate", at, at + 0.0005), (state, at + 0.0005, at + 0.001))))
    ledger.add(Spans("learner", (("idle", START, START + 20), ("optimizer", START + 20, START + 30))))
    evaluation = 15 + 10 if state == "evaluate" else 0
    assert seconds(ledger.compute()) == pytest.approx([60 - evaluation, evaluation, 0], abs=1e-3)


def test_time_after_the_last_report_is_booked_when_the_ledger_is_closed(tmp_path: Path) -> None:
    ledger = Ledger({"learner": 1.0, "engine": 1.0}, "core-hours", START, None)
    ledger.add(Spans("engine", (("generate", 1000.0, 1010.0),)))
    ledger.close(tmp_path, 1025.0)
    roles = json.loads((tmp_path / "ledger.json").read_text())["roles"]
    assert roles["engine"]["states"] == {"generate": 25.0}
    assert roles["learner"]["states"] == {"start-up": 25.0}


def test_the_seconds_in_which_the_processes_end_are_none_of_the_curves(
    ledger: Ledger, tmp_path: Path
) -> None:
    ledger.end_training(1041.0)
    ledger.add(Spans("engine", (("generate", 1040.0, 1042.0), ("idle", 1042.0, 1043.0))))
    assert seconds(ledger.compute(1045.0))[0] == 35 + 2
    ledger.close(tmp_path, 1050.0)
    assert seconds(ledger.compute()) == [35 + 2, 23, 22 + 2 * 9]
    roles = json.loads((tmp_path / "ledger.json").read_text())["roles"]
    assert roles["engine"]["states"]["shut-down"] == roles["learner"]["states"]["shut-down"] == 9.0
    assert roles["learner"]["states"]["idle"] == 12 + 6 + 1
    resumed = Ledger(ledger.devices, "core-hours", 2000.0, json.loads((tmp_path / "ledger.json").read_text()))
    assert seconds(resumed.compute()) == [37, 23, 40]


def test_the_states_add_up_to_the_wall_time_held_from_the_start(ledger: Ledger) -> None:
    books = ledger.to_json()
    assert books["wall_s"] == 40.0 and books["devices_total"] == 2.0 and books["unit"] == "core-hours"
    for role in ("engine", "learner"):
        assert sum(books["roles"][role]["states"].values()) == pytest.approx(40.0)
        assert books["roles"][role]["wall_s"] == 40.0
    assert books["roles"]["engine"]["states"]["start-up"] == 10.0  # the 2 s before its clock ran are start-up
    assert sum(books["roles"]["controller"]["states"].values()) == 0.0  # it holds no device
    assert books["roles"]["controller"]["seconds"] == {"idle": 40.0}


def test_a_real_clock_leaves_no_gap() -> None:
    start = time.monotonic()
    ledger = Ledger({"engine": 0.5}, "core-hours", start, None)
    clock = Clock("engine", ledger.add)
    for _ in range(20):
        with clock.state("generate"):
            time.sleep(0.002)
            with clock.state("weight_push"):
                time.sleep(0.001)
        clock.enter("idle")
    clock.flush()
    wall = time.monotonic() - start
    books = ledger.to_json()["roles"]["engine"]
    assert sum(books["states"].values()) == pytest.approx(0.5 * books["wall_s"], rel=1e-6)
    assert books["wall_s"] == pytest.approx(wall, rel=0.01)


def test_a_respawned_role_keeps_holding_its_devices() -> None:
    ledger = Ledger({"engine": 4.0}, "GPU-hours", START, None)
    ledger.add(Spans("engine", (("generate", 1000.0, 1010.0),)))
    ledger.add(Spans("engine", (("start-up", 1015.0, 1018.0), ("generate", 1018.0, 1020.0))))
    assert ledger.to_json()["roles"]["engine"]["states"] == {"generate": 4 * 12.0, "start-up": 4 * 8.0}


def test_a_resume_carries_the_books_on(ledger: Ledger, tmp_path: Path) -> None:
    ledger.close(tmp_path, 1040.0)
    carried = json.loads((tmp_path / "ledger.json").read_text())
    resumed = Ledger({"learner": 1.0, "engine": 1.0}, "core-hours", START, carried)
    assert seconds(resumed.compute()) == seconds(ledger.compute())
    book(resumed)
    assert seconds(resumed.compute()) == [2 * 35, 2 * 23, 2 * 22]
    books = resumed.to_json()
    assert books["wall_s"] == 80.0
    assert books["roles"]["engine"]["states"]["generate"] == 2 * 15.0
    assert sum(books["roles"]["learner"]["states"].values()) == pytest.approx(80.0)

    resumed.close(tmp_path, 1040.0)
    spans = [Span(**row) for row in read_lines(tmp_path / "timeline.jsonl")]
    engine = [s for s in spans if s.role == "engine"]
    assert engine[0] == Span("engine", "start-up", 0.0, 10.0)  # merged with the time before its clock
    assert engine[6] == Span("engine", "start-up", 40.0, 50.0)
    assert sum(s.end - s.start for s in engine) == pytest.approx(80.0)


def test_idle_shares_are_of_training_time(ledger: Ledger) -> None:
    # the learner: 4 s (1020-1024) + 5 s (1035-1040) idle of 19 s; the engine never idles.
    assert ledger.idle_shares() == {"learner": pytest.approx(9 / 19), "engine": 0.0}
