"""Promises of the batch: hand-worked advantages and weights for every kind of group."""

import math
from dataclasses import replace
from typing import Any

import fakes
import numpy as np
import pytest

from trainer.config import KLConfig, ObjectiveConfig
from trainer.controller.batch import Moments, build_batch, zero_variance
from trainer.types import Group, Outcome, Prompt, Rollout, TokenScores, TrainBatch


def rollout(reward: float, n: int, phrase: slice = slice(0), version: int = 3, **more: Any) -> Rollout:
    sampled = np.ones(n, bool)
    sampled[phrase] = False
    return fakes.rollout(reward, sampled.tolist(), versions=np.full(n, version, np.int32), **more)


def group(group_id: int, *rollouts: Rollout) -> Group:
    return Group(group_id, 0, Prompt(f"p{group_id}", "", (9, group_id), "", {}), rollouts)


PLAIN = group(0, rollout(1, 2), rollout(-1, 4), rollout(-1, 2))  # centred: 4/3, -2/3, -2/3
INTERRUPTED = group(1, rollout(1, 6, phrase=slice(2, 4)), rollout(-1, 4))  # 4 + 4 loss tokens; 1, -1
TRUNCATED = group(2, rollout(1, 3), rollout(-1, 12, truncated=True), rollout(-1, 5))  # 4/3, (-2/3), -2/3
ALL_RIGHT = group(3, rollout(1, 3), rollout(1, 5))
ALL_WRONG = group(4, rollout(-1, 3, truncated=True), rollout(-1, 5))
GROUPS = [PLAIN, INTERRUPTED, TRUNCATED, ALL_RIGHT, ALL_WRONG]
# Surviving: 3 prompts; 3 + 2 + 2 completions; 8 + 8 + 8 loss tokens.
CENTRED = [4 / 3, -2 / 3, -2 / 3, 1, -1, 4 / 3, -2 / 3]


NEARLY = group(5, *[rollout(1, 2)] * 15, rollout(-1, 9, truncated=True))
MIXED = group(6, rollout(1, 2), rollout(-1, 2), rollout(-1, 9, truncated=True))
LENGTHS = [2, 4, 2, 4, 4, 3, 5]  # loss tokens of the surviving completions


def built(
    *groups: Group,
    drop_truncated: bool = True,
    scores: Any = (),
    aside: Any = (),
    moments: Moments | None = None,
    **objective: Any,
) -> TrainBatch:
    settings = ObjectiveConfig(drop_truncated=drop_truncated, **objective)
    return build_batch(groups, 4, settings, 3, scores, aside, longest=20, moments=moments)


def weights(batch: TrainBatch) -> list[list[float]]:
    """The weights of the sampled tokens, after a check that injected ones have none."""
    for s in batch.sequences:
        assert s.token_weights.tolist() == [s.token_weights.max() if w else 0 for w in s.token_weights]
    return [s.token_weights[s.token_weights > 0].tolist() for s in batch.sequences]


def exact(weight: list[float], lengths: list[int]) -> list[list[float]]:
    return [[float(np.float32(w))] * n for w, n in zip(weight, lengths, strict=True)]


def advantages(batch: TrainBatch) -> list[float]:
    return [float(s.advantages[0]) for s in batch.sequences]


@pytest.mark.axis("objective.drop_truncated", True)
@pytest.mark.axis("objective.aggregation", "prompt", "sample", "token", "sum")
@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("prompt", [1 / (3 * 8)] * 7),
        ("sample", [1 / (7 * n) for n in LENGTHS]),
        ("token", [1 / 24] * 7),
        ("sum", [1 / (7 * 20)] * 7),  # seven completions survive; the engine may make 20 tokens
    ],
)
def test_the_weights_of_a_mixed_batch_are_as_worked_by_hand(aggregation: str, expected: list[float]) -> None:
    batch = built(*GROUPS, aggregation=aggregation)
    assert weights(batch) == exact(expected, LENGTHS) and batch.step == 4
    (phrase,) = (s.token_weights == 0 for s in batch.sequences if len(s.token_ids) == 6)
    assert phrase.tolist() == [False, False, True, True, False, False]  # its two tokens carry no loss
    assert batch.stats["train/effective_prompts"] == 3 and batch.stats["train/effective_completions"] == 7
    total = sum(s.token_weights.sum(dtype=np.float64) for s in batch.sequences)
    assert aggregation == "sum" or total == pytest.approx(1, abs=1e-6)
    assert built(ALL_RIGHT, aggregation=aggregation).sequences == ()


def test_prompts_weigh_the_same_whatever_their_lengths_and_dropped_ones_nothing() -> None:
    long = group(1, rollout(1, 30), rollout(-1, 10))
    # 1/2 over the prompt's 8 tokens, and over 40
    assert weights(built(PLAIN, long)) == exact([1 / 16] * 3 + [1 / 80] * 2, [2, 4, 2, 30, 10])
    gone = group(5, rollout(1, 4, truncated=True), rollout(-1, 4, truncated=True))
    batch = built(PLAIN, gone)
    assert weights(batch) == exact([1 / 8] * 3, [2, 4, 2]) and batch.stats["train/effective_prompts"] == 1
    kept = built(ALL_RIGHT, PLAIN, zero_variance="keep")
    assert weights(kept) == exact([1 / 16] * 5, [3, 5, 2, 4, 2]) and advantages(kept)[:2] == [0, 0]
    assert kept.stats["train/effective_prompts"] == 1  # one of the two that are in the loss teaches something
    thirds = group(5, *[rollout(0.1, 2)] * 3)  # whose mean is not quite .1
    for norm in ("batch", "group", "running"):
        alone = built(thirds, zero_variance="keep", advantage_norm=norm)
        assert alone.stats["train/effective_prompts"] == 0 and len(alone.sequences) == 3
    # All completions of TRUNCATED stay: 1 over 20 tokens.
    assert weights(built(TRUNCATED, drop_truncated=False)) == exact([1 / 20] * 3, [3, 12, 5])


@pytest.mark.axis("objective.kl.place", "reward")
@pytest.mark.parametrize(("estimator", "k"), [("k1", 1), ("k2", 1 / 2), ("k3", math.exp(-1))])
def test_zero_variance_is_judged_on_the_reward_less_its_kl_penalty(estimator: Any, k: float) -> None:
    # log π − log π_ref is 1 for each token of ALL_RIGHT's second completion, which has five of 24; else 0.
    kl = KLConfig(coefficient=0.1, estimator=estimator, place="reward")
    ones = [[0] * 2, [0] * 4, [0] * 2, [0] * 3, [1] * 5, [0] * 3, [0] * 5]
    scores = [TokenScores(np.zeros(len(x), np.float32), -np.array(x, np.float32)) for x in ones]
    groups = PLAIN, ALL_RIGHT, ALL_WRONG
    batch = built(*groups, drop_truncated=False, scores=scores, kl=kl, advantage_norm="none")
    assert batch.stats["train/effective_prompts"] == 2  # all that is equal in ALL_WRONG still is
    # ALL_RIGHT: rewards 1 and 1 − k/2, mean 1 − k/4.
    np.testing.assert_allclose(advantages(batch), [4 / 3, -2 / 3, -2 / 3, k / 4, -k / 4], rtol=1e-6)
    assert batch.stats["kl/ref"] == pytest.approx(5 * k / 24)
    assert all(s.logprobs_ref is None for s in batch.sequences)  # the loss has no penalty


# PLAIN's advantages, whose squares add up to 8/3; ALL_RIGHT's are two zeros.
THIRDS = np.array([4, -2, -2]) / 3


@pytest.mark.axis("objective.advantage_norm", "batch", "group", "none", "global")
@pytest.mark.axis("objective.std_over", "surviving", "all")
@pytest.mark.axis("objective.zero_variance", "keep")
@pytest.mark.axis("objective.drop_truncated", False)
@pytest.mark.parametrize(
    ("groups", "objective", "expected"),
    [
        # Σ of squares: 16/9 + 4/9 + 4/9 + 1 + 1 + 16/9 + 4/9 = 62/9; mean 2/21; variance 62/63 − 4/441
        (GROUPS, {}, np.array(CENTRED) / np.sqrt(430 / 441)),
        # the std of (1, −1, −1) is √(8/9)
        (GROUPS, {"advantage_norm": "group"}, CENTRED / np.sqrt([8 / 9] * 3 + [1] * 2 + [8 / 9] * 2)),
        (GROUPS, {"advantage_norm": "none"}, CENTRED),
        ([PLAIN], {"advantage_norm": "global", "global_std": 0.5}, [8 / 3, -4 / 3, -4 / 3]),
        ([PLAIN, ALL_RIGHT], {"std_over": "surviving"}, THIRDS / np.sqrt(8 / 3 / 3)),
        ([PLAIN, ALL_RIGHT], {"std_over": "all"}, THIRDS / np.sqrt(8 / 3 / 5)),
        ([PLAIN, ALL_RIGHT], {"zero_variance": "keep"}, [*THIRDS / np.sqrt(8 / 3 / 5), 0, 0]),
        ([ALL_RIGHT], {"zero_variance": "keep"}, [0, 0]),
        # A truncated completion counts in the mean, kept or not: here −1/3.
        ([TRUNCATED], {"drop_truncated": False, "advantage_norm": "none"}, THIRDS),
        ([MIXED], {"advantage_norm": "none"}, [4 / 3, -2 / 3]),
    ],
)
def test_advantages_are_as_worked_by_hand(groups: list[Group], objective: Any, expected: Any) -> None:
    np.testing.assert_allclose(advantages(built(*groups, **objective)), expected, rtol=1e-6)


@pytest.mark.axis("objective.advantage_norm", "running")
def test_running_norm_is_over_all_batches_so_far() -> None:
    moments, running = Moments(), {"advantage_norm": "running"}
    first = built(PLAIN, moments=moments, **running)
    np.testing.assert_allclose(advantages(first), THIRDS / np.sqrt(8 / 9), rtol=1e-6)
    assert built(ALL_RIGHT, moments=moments, **running).sequences == () and moments.count == 3
    # The second batch adds 4/3 and −2/3, without the truncated one: 4/3, −2/3, −2/3, 4/3, −2/3 have the mean
    # 2/15 and the mean square (16 + 4 + 4 + 16 + 4) / 9 / 5 = 44/45, so the variance 44/45 − 4/225 = 216/225.
    second = built(TRUNCATED, moments=moments, **running)
    expected = (np.array([4 / 3, -2 / 3]) - 2 / 15) / np.sqrt(216 / 225)
    np.testing.assert_allclose(advantages(second), expected, rtol=1e-6)
    # A later epoch brings no new numbers: both keep the mean 2/15 and the variance 216/225 of above.
    closed = replace(moments, closed=True)
    assert advantages(built(TRUNCATED, moments=closed, **running)) == advantages(second)
    assert replace(closed, closed=False) == moments
    with_zeros = Moments()
    built(PLAIN, ALL_RIGHT, moments=with_zeros, std_over="all", **running)
    assert with_zeros.count == 5 and with_zeros.std == pytest.approx(np.sqrt(8 / 15))


def test_moments_of_parts_are_those_of_the_whole() -> None:
    values = np.random.default_rng(0).normal(1e4, 1e-2, 1000)  # far from 0: sums of squares would lose it
    moments = Moments()
    for part in np.split(values, [1, 1, 7, 400]):
        moments.add(part)
    assert (moments.count, moments.mean) == (1000, pytest.approx(values.mean(), rel=1e-12))
    assert moments.std == pytest.approx(values.std(), rel=1e-6)


@pytest.mark.axis("objective.zero_variance", "drop")
def test_fifteen_right_ones_and_a_truncated_one_leave_nothing_to_learn() -> None:
    batch = built(PLAIN, NEARLY)
    assert len(batch.sequences) == 3 and batch.stats["train/effective_prompts"] == 1
    assert len(built(PLAIN, NEARLY, drop_truncated=False).sequences) == 19
    groups = NEARLY, MIXED, PLAIN, ALL_WRONG
    assert [zero_variance(g, True) for g in groups] == [True, False, False, True]
    assert [zero_variance(g) for g in groups] == [False, False, False, True]
    empty = built(ALL_RIGHT, ALL_WRONG)
    assert empty.sequences == () and np.isfinite(list(empty.stats.values())).all()


def test_stats_report_rewards_drops_lengths_and_lag() -> None:
    stale = group(6, rollout(1, 2, version=0), rollout(-1, 2))
    stats = built(*GROUPS, stale).stats
    assert stats["train/pass_rate"] == 6 / 14 and stats["train/reward"] == pytest.approx(-2 / 14)
    assert (stats["train/all_right"], stats["train/all_wrong"]) == (1 / 6, 1 / 6)
    assert (stats["train/truncated"], stats["train/interrupted"]) == (2 / 14, 1 / 14)
    assert stats["train/length_max"] == 12 and stats["lag/max"] == 3


def test_groups_set_aside_count_in_the_statistics_alone() -> None:
    alone = built(PLAIN, zero_variance="resample")
    batch = built(PLAIN, zero_variance="resample", aside=[ALL_RIGHT, ALL_WRONG])
    assert weights(batch) == weights(alone) and advantages(batch) == advantages(alone)
    assert (alone.stats["train/resampled"], batch.stats["train/resampled"]) == (0, 2)
    assert batch.stats["train/pass_rate"] == 3 / 7 and alone.stats["train/pass_rate"] == 1 / 3
    assert batch.stats["train/all_right"] == batch.stats["train/all_wrong"] == 1 / 3
    assert batch.stats["train/effective_prompts"] == 1


def test_stats_report_the_shares_of_broken_verdicts_and_the_mean_of_each_scorer() -> None:
    outcomes: list[Outcome] = ["crash", "crash", "timeout", "unparsable", "wrong"]
    scores = [{"math": 1.0, "style": 0.5}, {"math": -1.0}, {}, {}, {}]
    pairs = zip(outcomes, scores, strict=True)
    stats = built(group(0, *(replace(rollout(-1, 2), outcome=o, scores=s) for o, s in pairs))).stats
    assert [stats[f"verify/{name}"] for name in ("crash", "timeout", "unparsable")] == [0.4, 0.2, 0.2]
    assert (stats["reward/math"], stats["reward/style"]) == (0.0, 0.5)
