"""Promises of pass@k, maj@k and best@k: numbers worked by hand, and the mean over every choice of k."""

from itertools import combinations, product

import numpy as np
import pytest

from trainer.controller.evaluate import best_at_k, maj_at_k, pass_at_k


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
        ("??", "?", 2, 0.0),  # right ones without an answer elect nothing
        ("??5", "?", 3, 0.0),
    ],
)
def test_maj_at_k_by_hand(answers: str, right: str, k: int, expected: float) -> None:
    votes = [None if answer == "?" else answer for answer in answers]
    assert maj_at_k([answer == right for answer in answers], votes, k) == pytest.approx(expected)


def test_best_at_k_is_the_mean_over_all_choices_and_all_ways_to_break_a_tie() -> None:
    def brute(correct: list[bool], scores: list[float], k: int) -> float:
        chosen = list(combinations(zip(scores, correct, strict=True), k))
        return float(np.mean([np.mean([c for s, c in pairs if s == max(pairs)[0]]) for pairs in chosen]))

    rng = np.random.default_rng(0)
    for n in range(1, 8):
        for _ in range(20):
            correct = [bool(c) for c in rng.integers(0, 2, n)]
            scores = [float(s) for s in rng.integers(0, 4, n)]
            for k in range(1, n + 1):
                assert best_at_k(correct, scores, k) == pytest.approx(brute(correct, scores, k))
