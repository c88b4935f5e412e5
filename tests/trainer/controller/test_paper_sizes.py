"""Promises of the loop at the paper's sizes, in virtual time: its lag, its pace, and interruptions."""

from __future__ import annotations

import pytest

from bench.pipeline.virtual_run import MAX_LAG, SPEEDS, Speeds, closed_form, run


@pytest.mark.slow
def test_interrupted_completions_do_not_wait_behind_new_ones() -> None:
    slots, fast = 384, 1e6
    result = run(Speeds("a token a second in each slot", 1, slots, slots, fast, push_s=0), steps=24)
    assert result.first_step <= 30_000  # behind all 6,912 it was 125,000, and the lag 4.1
    assert result.lag <= 1


@pytest.mark.parametrize("speeds", SPEEDS[1:3], ids=lambda s: s.name)
def test_the_slower_side_alone_sets_the_pace(speeds: Speeds) -> None:
    result = run(speeds, steps=20)
    made, trained = closed_form(speeds, result.tokens)
    assert result.step == pytest.approx(max(made, trained), rel=0.05)
    assert result.lag_max <= MAX_LAG
    assert result.learner_idle == pytest.approx(1 - trained / max(made, trained), abs=0.05)
    assert result.engine_idle == pytest.approx(1 - made / max(made, trained), abs=0.08)
