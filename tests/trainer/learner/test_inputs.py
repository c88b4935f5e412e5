"""Promises of the micro-batches prepared ahead: the same numbers, in order, and an error where it belongs."""

import threading

import pytest

from trainer.config import LearnerConfig, default_token_budget
from trainer.learner.inputs import prefetch


def test_one_item_is_made_ahead_and_an_error_comes_in_its_turn() -> None:
    made: list[int] = []
    events = [threading.Event() for _ in range(5)]

    def make(i: int) -> int:
        if i == 3:
            raise ValueError("no such item")
        assert threading.current_thread() is not threading.main_thread()
        made.append(i)
        events[i].set()
        return 10 * i

    items = prefetch(make, range(5))
    assert made == []
    assert next(items) == 0 and events[1].wait(10)
    assert made == [0, 1]  # and not yet 2
    assert next(items) == 10 and next(items) == 20
    with pytest.raises(ValueError, match="no such item"):
        next(items)
    assert list(prefetch(make, range(0))) == []


def test_the_token_budget_is_derived_from_the_device() -> None:
    assert LearnerConfig().micro_batch_tokens == 0  # derived
    assert [default_token_budget(gpu) for gpu in (True, False)] == [16_384, 4096]
