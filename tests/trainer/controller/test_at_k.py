"""Promises of pass@k, maj@k and best@k: numbers worked by hand, and the mean over every choice of k."""

from itertools import combinations, product

import numpy as np
import pytest

from trainer.controller.evaluate import best_at_k, maj_at_k, pass_at_k


@pytest.mark.parametrize(
    ("right", "n", "k", "expected"),
    [
        (1, 4, 1, 1 / 4),  # the mean
        (1, 4, 2, 1 / 2),  # of the 6 pairs, 3 hold the right one
        (2, 4, 2, 5 / 6),  # one pair of 6 is wrong, wrong
        (3, 4, 2, 1.0),  # one wrong sample makes no pair
        (0, 4, 4, 0.0),
        (2, 10, 5, 1 - 56 / 252),  # C(8, 5) = 56 of C(10, 5) = 252
    ],
)
def test_pass_at_k_by_hand(right: int, n: int, k: int, expected: float) -> None:
    assert pass_at_k([True] * right + [False] * (n - right), k) == pytest.approx(expected)


def test_pass_at_k_is_the_mean_over_all_choices_of_k_samples() -> None:
    for n in range(1, 8):
        for correct in product([False, True], repeat=n):
            for k in range(1, n + 1):
                brute = np.mean([any(choice) for choice in combinations(correct, k)])
                assert pass_at_k(correct, k) == pytest.approx(brute)


@pytest.mark.parametrize(
    ("answers", "right", "k", "expected"),
    [
        ("7757", "7", 4, 1.0),
        ("5577", "7", 4, 1 / 2),  # a tie of two
        ("579", "7", 3, 1 / 3),  # a tie of three
        ("5??7?", "7", 5, 1 / 2),  # ? has no vote
        ("???", "7", 3, 0.0),
        ("577", "7", 1, 2 / 3),  # of one sample: the mean
        ("575777", "7", 3, 1 / 2),  # 575 elects 5, 777 elects 7
        ("57577", "7", 3, 0.0),  # 575 elects 5; the other two are no run of three
    ],
)
def test_maj_at_k_by_hand(answers: str, right: str, k: int, expected: float) -> None:
    votes = [None if answer == "?" else answer for answer in answers]
    assert maj_at_k([answer == right for answer in answers], votes, k) == pytest.approx(expected)


def test_a_right_completion_without_an_answer_elects_nothing() -> None:
    assert maj_at_k([True, True], [None, None], 2) == 0
    assert maj_at_k([True, True, False], [None, None, "5"], 3) == 0


@pytest.mark.parametrize(
    ("scores", "correct", "k", "expected"),
    [
        ((0.9, 0.5, 0.1), (1, 0, 0), 3, 1.0),
        ((0.9, 0.5, 0.1), (0, 1, 1), 2, 1 / 3),  # pairs 12, 13: wrong; 23: right
        ((0.9, 0.5, 0.1), (0, 1, 1), 1, 2 / 3),  # the mean
        ((0.5, 0.5, 0.1), (1, 0, 0), 3, 1 / 2),  # a tie at the top
    ],
)
def test_best_at_k_by_hand(
    scores: tuple[float, ...], correct: tuple[int, ...], k: int, expected: float
) -> None:
    assert best_at_k([bool(c) for c in correct], scores, k) == pytest.approx(expected)


def test_best_at_k_is_the_mean_over_all_choices_and_all_ways_to_break_a_tie() -> None:
    def brute(correct: list[bool], scores: list[float], k: int) -> float:
        found = []
        for choice in combinations(range(len(scores)), k):
            top = [i for i in choice if scores[i] == max(scores[j] for j in choice)]
            found.append(np.mean([correct[i] for i in top]))
        return float(np.mean(found))

    rng = np.random.default_rng(0)
    for n in range(1, 8):
        for _ in range(20):
            correct = [bool(c) for c in rng.integers(0, 2, n)]
            scores = [float(s) for s in rng.integers(0, 4, n)]
            for k in range(1, n + 1):
                assert best_at_k(correct, scores, k) == pytest.approx(brute(correct, scores, k))


def test_a_judge_that_knows_the_answers_makes_best_at_k_equal_pass_at_k() -> None:
    for correct in product([False, True], repeat=6):
        for k in range(1, 7):
            assert best_at_k(correct, [float(c) for c in correct], k) == pytest.approx(pass_at_k(correct, k))
