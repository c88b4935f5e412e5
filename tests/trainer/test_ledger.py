"""The ledger's books, worked by hand: two roles on one core each, so that core-hours × 3600 are seconds."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from trainer.clock import Clock
from trainer.ledger import Ledger, Span, overlap, read_timeline
from trainer.messages import Spans

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
    # engine since 1020: 10 generate + 1 push + 5 generate; learner since 1020: 20 s, idle included.
    # evaluation: 10 + 4. start-up: the engine's 10, the learner's 12 and its 8 idle before training.
    assert seconds(ledger.compute()) == [16 + 20, 14, 10 + 20]


def test_everything_held_is_booked_once(ledger: Ledger) -> None:
    assert sum(seconds(ledger.compute())) == 2 * 40


def test_compute_of_an_evaluation_is_taken_when_its_weights_were_ready(ledger: Ledger) -> None:
    # at 1034: engine 10 generate + 1 push, learner 14; evaluation 10 + 3.
    assert seconds(ledger.compute(1034.0)) == [11 + 14, 13, 30]
    assert seconds(ledger.compute(1020.0)) == [0, 10, 30]
    assert seconds(ledger.compute(1015.0)) == [0, 5, 10 + 15]


def test_a_role_that_has_not_reported_yet_stays_in_its_last_state(ledger: Ledger) -> None:
    # two seconds after the last report: 2 s generate, 2 s learner idle.
    assert seconds(ledger.compute(1042.0)) == [36 + 4, 14, 30]


def test_training_that_began_before_a_late_report_is_still_counted_from_its_beginning() -> None:
    ledger = Ledger({"learner": 1.0}, "core-hours", START, None)
    ledger.add(Spans("learner", (("start-up", 1000.0, 1004.0),)))
    ledger.begin_training(1010.0)
    ledger.add(Spans("learner", (("start-up", 1004.0, 1008.0), ("idle", 1008.0, 1016.0))))
    assert seconds(ledger.compute()) == [6, 0, 10]


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
    ledger.write(tmp_path, last=True)
    ledger.write(tmp_path, last=True)  # closing twice writes nothing twice
    carried = json.loads((tmp_path / "ledger.json").read_text())
    resumed = Ledger({"learner": 1.0, "engine": 1.0}, "core-hours", START, carried)
    assert seconds(resumed.compute()) == seconds(ledger.compute())
    book(resumed)
    assert seconds(resumed.compute()) == [2 * 36, 2 * 14, 2 * 30]
    assert seconds(resumed.compute(1034.0)) == [36 + 25, 14 + 13, 30 + 30]
    books = resumed.to_json()
    assert books["wall_s"] == 80.0
    assert books["roles"]["engine"]["states"]["generate"] == 2 * 15.0
    assert sum(books["roles"]["learner"]["states"].values()) == pytest.approx(80.0)

    resumed.write(tmp_path, last=True)
    timeline = read_timeline(tmp_path / "timeline.jsonl")
    engine = [s for s in timeline if s.role == "engine"]
    assert engine[0] == Span("engine", "start-up", 0.0, 10.0)  # merged with the time before its clock
    assert engine[6] == Span("engine", "start-up", 40.0, 50.0)
    assert sum(s.end - s.start for s in engine) == pytest.approx(80.0)


def test_idle_shares_are_of_training_time(ledger: Ledger) -> None:
    # the learner: 4 s (1020-1024) + 6 s idle of 20 s; the engine never idles.
    assert ledger.idle_shares() == {"learner": pytest.approx(0.5), "engine": 0.0}
    assert ledger.idle_shares(since=1030.0)["learner"] == pytest.approx(0.6)


def test_overlap_is_the_time_both_were_busy(ledger: Ledger, tmp_path: Path) -> None:
    ledger.write(tmp_path, last=True)
    timeline = read_timeline(tmp_path / "timeline.jsonl")
    # generate 1020-1030 and 1035-1040; forward_backward 1024-1033: 6 s together.
    assert overlap(timeline) == pytest.approx(6.0)
    assert overlap(timeline, a=("engine", "evaluate"), b=("learner", "idle")) == pytest.approx(8 + 1)


def test_a_loop_that_takes_turns_has_no_overlap() -> None:
    turns = [Span("engine", "generate", 0, 1), Span("learner", "forward_backward", 1, 2)]
    turns.append(Span("engine", "generate", 2, 3))
    assert overlap(turns) == 0.0


def test_looking_back_does_not_change_the_books(ledger: Ledger) -> None:
    before = ledger.to_json()
    ledger.compute(1022.0), ledger.compute(1100.0), ledger.idle_shares(1030.0)
    assert ledger.to_json() == before
