"""Promises of the schedule: every completion once, no rank waits long, every rank computes the same."""

import numpy as np
import pytest
from training import sequence

from trainer.learner.packing import pack
from trainer.learner.schedule import DUMMY, imbalance, rank_tokens, schedule
from trainer.types import TrainSequence


def batch(prompts: int, group: int, median: float, longest: int) -> tuple[TrainSequence, ...]:
    """Log-normal lengths, cut at the longest."""
    rng = np.random.default_rng(0)
    out = []
    for _ in range(prompts):
        prompt = rng.integers(0, 1000, rng.integers(50, 250)).astype(np.int32)
        for n in np.clip(rng.lognormal(np.log(median), 0.8, group), 1, longest).astype(int):
            out.append(sequence(prompt, rng.integers(0, 1000, n)))
    return tuple(out)


@pytest.mark.parametrize(
    ("prompts", "group", "ranks"),
    [(16, 8, 2), (16, 8, 3), (16, 8, 4), (16, 8, 7), (16, 8, 8), (48, 16, 3), (48, 16, 8)],
)
def test_imbalance_is_below_three_percent_of_a_real_batch(prompts: int, group: int, ranks: int) -> None:
    steps = schedule(batch(prompts, group, 256, 2048), 4096, ranks)
    assert all(len(step) == ranks for step in steps)
    assert 0 <= imbalance(steps) < 0.03
    tokens = rank_tokens(steps)
    slots = sum(ranks * max(len(m.input_ids) for m in step) for step in steps)
    assert imbalance(steps) == pytest.approx(1 - sum(tokens) / slots)
    assert sum(tokens) == sum(len(m.input_ids) for step in steps for m in step if m is not DUMMY)
    assert max(tokens) < 1.1 * min(tokens)


def test_balancing_repeats_few_prompts() -> None:
    sequences = batch(16, 8, 1000, 12_288)
    prompts = {s.prompt_ids.tobytes(): len(s.prompt_ids) for s in sequences}
    least = sum(prompts.values()) + sum(len(s.token_ids) - 1 for s in sequences)
    for ranks in (4, 8):
        steps = schedule(sequences, 16_384, ranks)
        duration = sum(max(len(m.input_ids) for m in step) for step in steps)
        assert duration * ranks < 1.05 * least  # waiting and prompts computed again, together


@pytest.mark.parametrize(
    ("prompts", "ranks", "longest"),
    [(1, 3, 300), (2, 3, 300), (5, 2, 300), (5, 1, 300), (3, 2, 1), (3, 3, 1)],
)
def test_every_completion_is_in_one_micro_batch_of_the_budget(prompts: int, ranks: int, longest: int) -> None:
    """Also answers of one token, which add no row."""
    sequences = batch(prompts, 4, longest / 5, longest)
    steps = schedule(sequences, 256, ranks)
    owners = [np.unique(m.owners) for step in steps for m in step if m is not DUMMY]
    assert sorted(np.concatenate(owners).tolist()) == list(range(len(sequences)))
    whole = max(len(s.prompt_ids) + len(s.token_ids) for s in sequences)
    assert all(len(m.input_ids) <= max(256, whole) for step in steps for m in step)
    again = schedule(sequences, 256, ranks)
    assert [m.owners.tolist() for r in steps for m in r] == [m.owners.tolist() for r in again for m in r]


def test_one_rank_computes_what_was_packed_in_that_order_and_an_empty_batch_has_no_step() -> None:
    sequences = batch(3, 4, 60, 300)
    one = [step[0].owners.tolist() for step in schedule(sequences, 256, 1)]
    assert one == [m.owners.tolist() for m in pack(sequences, 256)]
    assert schedule((), 256, 3) == [] and imbalance([]) == 0
    assert not DUMMY.token_weights.any() and len(DUMMY.input_ids) == 1
