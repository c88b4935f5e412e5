"""Promises of the balance: every completion in a bin, and no single move shortens the longest by a tenth."""

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainer.learner.packing import balance

GROUPS = st.lists(st.lists(st.integers(0, 500), min_size=1, max_size=6), min_size=1, max_size=6)


def loads(sizes: list[int], groups: list[int], prompts: list[int], bins: np.ndarray, count: int) -> list[int]:
    """By hand: each bin's completions, and each of its prompts once."""
    return [
        sum(n for n, at in zip(sizes, bins, strict=True) if at == b)
        + sum(prompts[g] for g in {g for g, at in zip(groups, bins, strict=True) if at == b})
        for b in range(count)
    ]


@settings(max_examples=60, deadline=None)
@given(batch=GROUPS, prompt=st.integers(0, 300), count=st.integers(1, 7))
@example(batch=[[0, 13], [0, 0, 30, 30], [0, 0, 0, 23, 5], [28]], prompt=0, count=4)
def test_no_move_shortens_the_longest_bin_by_a_tenth(batch: list[list[int]], prompt: int, count: int) -> None:
    sizes = [n for group in batch for n in group]
    groups = [g for g, group in enumerate(batch) for _ in group]
    prompts = [prompt + g for g in range(len(batch))]
    bins = balance(sizes, groups, prompts, count)
    assert bins.shape == (len(sizes),) and set(bins.tolist()) <= set(range(count))
    assert (bins == balance(sizes, groups, prompts, count)).all()
    lengths = loads(sizes, groups, prompts, bins, count)
    longest = max(lengths)
    if lengths.count(longest) > 1:
        return
    for i in np.flatnonzero(bins == lengths.index(longest)):
        for to in range(count):
            tried = bins.copy()
            tried[i] = to
            assert max(loads(sizes, groups, prompts, tried, count)) >= 0.9 * longest


def test_equal_groups_stay_whole() -> None:
    bins = balance([100] * 16, [i // 4 for i in range(16)], [50] * 4, 4)
    assert all(len(set(bins[4 * g : 4 * g + 4].tolist())) == 1 for g in range(4))
    assert len(set(bins.tolist())) == 4


def test_a_group_is_split_where_one_bin_would_wait_for_it() -> None:
    bins = balance([100] * 8, [0] * 8, [10], 2)
    assert np.bincount(bins).tolist() == [4, 4]
