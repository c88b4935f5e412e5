"""Promises of the repetition check."""

import numpy as np
import pytest

from trainer.controller.batch import REPEATED_TOKENS as N
from trainer.controller.batch import count_distinct, is_repetitive

RNG = np.random.default_rng(0)


def test_loops_are_repetitive_and_text_is_not() -> None:
    text = RNG.zipf(1.3, 2000).clip(max=49_000).astype(np.int32)  # words are as unevenly frequent
    loop = np.tile(RNG.integers(0, 49_000, 17, np.int32), 100)
    assert not is_repetitive(text) and is_repetitive(loop) and is_repetitive(np.full(64, 7, np.int32))
    assert is_repetitive(np.concatenate([text[:300], loop]))  # it went astray half-way
    assert not is_repetitive(np.full(63, 7, np.int32))  # an answer such as 1000000 repeats itself, too


def test_an_array_need_not_be_contiguous() -> None:
    assert not is_repetitive(np.arange(200, dtype=np.int32)[::2])


@pytest.mark.parametrize("vocabulary", [2, 5, 50, 1000, 150_000])
def test_the_sequences_are_counted_as_one_by_one(vocabulary: int) -> None:
    for length in (64, 500, 12_000):
        ids = RNG.integers(0, vocabulary, length, np.int32)
        sequences = {tuple(ids[i : i + N].tolist()) for i in range(length - N + 1)}
        assert count_distinct(ids) == len(sequences)
