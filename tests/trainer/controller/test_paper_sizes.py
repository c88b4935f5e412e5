"""Promises of the loop at the paper's sizes, in virtual time: its lag, its pace, and interruptions."""

import pytest

from bench.pipeline.virtual_run import LAG, PAPER, SPEEDS, Scheme, paper_rates, paper_run, run
from trainer.launcher.placement import Split

pytestmark = pytest.mark.slow


def test_interrupted_completions_do_not_wait_behind_new_ones() -> None:
    rates = paper_rates(384, 1, 384, 1e6)  # a token a second in each slot
    out = run(PAPER, rates, Split(1, 1), Scheme("pipeline", LAG), steps=15, warm=1)
    assert out.first_batch_s <= 30_000  # behind all 6,912 it was 125,000, and the lag 4.1
    assert out.lag_mean <= 1


@pytest.mark.parametrize("name", list(SPEEDS)[1:3])
def test_the_slower_side_alone_sets_the_pace(name: str) -> None:
    out, made, trained = paper_run(name, steps=11)
    step = max(made, trained)
    assert 3600 / out.steps_per_hour == pytest.approx(step, rel=0.05)
    assert out.lag_max <= LAG
    assert out.learner_idle == pytest.approx(1 - trained / step, abs=0.05)
