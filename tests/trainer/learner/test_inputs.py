"""Promises of the micro-batches prepared ahead: the same numbers, in order, and an error where it belongs."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from training import config, learner, make_model, of_the_data, sequences

from trainer.config import LearnerConfig, default_token_budget
from trainer.learner.inputs import Inputs, prefetch
from trainer.learner.learner import Learner
from trainer.learner.schedule import MicroStep
from trainer.types import TrainBatch


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


def test_a_step_of_prepared_micro_batches_is_bitwise_the_same(tmp_path: Path) -> None:
    folder, c = make_model("tied", tmp_path), config(micro_batch_tokens=40)
    results = []
    for ahead in (False, True):
        one = learner(folder, c)
        made: list[Inputs] = []
        if ahead:

            def make(step: MicroStep, one: Learner = one, made: list[Inputs] = made) -> Inputs:
                made.append(one.model.inputs(step[0], step, one.model.columns(one._objective, one._kl)))
                return made[-1]

            one._prepared = lambda steps, make=make: zip(steps, prefetch(make, steps), strict=True)  # type: ignore[method-assign,misc]  # another way to prepare them
        metrics = one.train(TrainBatch(1, sequences(), {}))
        assert len(made) == ahead * metrics["learner/micro_batches"] and metrics["learner/micro_batches"] > 2
        results.append((of_the_data(metrics), [p.detach().clone() for p in one.parameters]))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_the_token_budget_is_derived_from_the_device() -> None:
    assert LearnerConfig().micro_batch_tokens == 0  # derived
    assert [default_token_budget(gpu) for gpu in (True, False)] == [16_384, 4096]
