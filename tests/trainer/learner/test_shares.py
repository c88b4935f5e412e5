"""Promises of the shares: every completion once, no rank waits long, and every rank comes to the same."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.learner.packing import pack
from trainer.learner.schedule import IDLE, padding, rounds, rows, rows_by_rank
from trainer.types import TrainSequence


def batch(prompts: int, group: int, median: float, longest: int) -> tuple[TrainSequence, ...]:
    """Log-normal lengths, cut at the longest."""
    rng = np.random.default_rng(0)
    out = []
    for _ in range(prompts):
        prompt = rng.integers(0, 1000, rng.integers(50, 250)).astype(np.int32)
        for n in np.clip(rng.lognormal(np.log(median), 0.8, group), 1, longest).astype(int):
            ids, zeros = rng.integers(0, 1000, n).astype(np.int32), np.zeros(n, np.int32)
            one = np.ones(n, np.float32)
            out.append(TrainSequence(prompt, ids, -one, zeros, one, 1.0))
    return tuple(out)


@pytest.mark.parametrize(
    ("prompts", "group", "ranks"),
    [(16, 8, 2), (16, 8, 3), (16, 8, 4), (16, 8, 7), (16, 8, 8), (48, 16, 3), (48, 16, 8)],
)
def test_padding_is_below_five_percent_of_a_real_batch(prompts: int, group: int, ranks: int) -> None:
    found = rounds(batch(prompts, group, 256, 2048), 4096, ranks)
    assert all(len(share) == ranks for share in found)
    assert 0 <= padding(found) < 0.05
    slots = sum(ranks * max(len(m.input_ids) for m in share) for share in found)
    assert padding(found) == pytest.approx(1 - rows(found) / slots)
    of_rank = rows_by_rank(found)
    assert sum(of_rank) == rows(found) and max(of_rank) < 1.1 * min(of_rank)


def test_levelling_repeats_few_prompts() -> None:
    sequences = batch(16, 8, 1000, 12_288)
    prompts = {s.prompt_ids.tobytes(): len(s.prompt_ids) for s in sequences}
    least = sum(prompts.values()) + sum(len(s.token_ids) - 1 for s in sequences)
    for ranks in (4, 8):
        found = rounds(sequences, 16_384, ranks)
        time = sum(max(len(m.input_ids) for m in share) for share in found)
        assert time * ranks < 1.05 * least  # padding and prompts computed again, together


@pytest.mark.parametrize(("prompts", "ranks"), [(1, 3), (2, 3), (5, 2), (5, 1)])
def test_every_completion_is_in_one_share_within_the_budget(prompts: int, ranks: int) -> None:
    sequences = batch(prompts, 4, 60, 300)
    found = rounds(sequences, 256, ranks)
    of = [np.unique(m.owners) for share in found for m in share if m is not IDLE]
    assert sorted(np.concatenate(of).tolist()) == list(range(len(sequences)))
    longest = max(len(s.prompt_ids) + len(s.token_ids) for s in sequences)
    assert all(len(m.input_ids) <= max(256, longest) for share in found for m in share)
    again = rounds(sequences, 256, ranks)
    assert [m.owners.tolist() for r in found for m in r] == [m.owners.tolist() for r in again for m in r]


@pytest.mark.parametrize("ranks", [2, 3])
def test_answers_of_one_token_which_add_no_row_are_shared_out_too(ranks: int) -> None:
    sequences = batch(3, 4, 1, 1)
    found = rounds(sequences, 64, ranks)
    of = [np.unique(m.owners) for share in found for m in share if m is not IDLE]
    assert sorted(np.concatenate(of).tolist()) == list(range(12))


def test_one_rank_computes_what_was_packed_in_that_order_and_an_empty_batch_has_no_round() -> None:
    sequences = batch(3, 4, 60, 300)
    one = [share[0].owners.tolist() for share in rounds(sequences, 256, 1)]
    assert one == [m.owners.tolist() for m in pack(sequences, 256)]
    assert rounds((), 256, 3) == [] and padding([]) == 0
    assert not IDLE.token_weights.any() and len(IDLE.input_ids) == 1
