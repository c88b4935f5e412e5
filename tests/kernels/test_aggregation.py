"""Promises of `token_weights`: each aggregation by hand."""

from typing import Any

import pytest

from kernels import token_weights

# prompt 7: completions of 1 and 3 tokens; prompt 5: one of 2 tokens, one empty; prompt 9: one, empty
LENGTHS, PROMPTS = [1, 3, 2, 0, 0], [7, 7, 5, 5, 9]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token", [1 / 6] * 6),
        ("sample", [1 / 3] + [1 / 9] * 3 + [1 / 6] * 2),
        ("prompt", [1 / 8] * 4 + [1 / 4] * 2),
        ("sum", [1.0] * 6),
    ],
)
def test_weights_by_hand(aggregation: Any, expected: list[float]) -> None:
    assert token_weights(LENGTHS, PROMPTS, aggregation).tolist() == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("aggregation", ["token", "sample", "prompt", "sum"])
@pytest.mark.parametrize("lengths", [[], [0, 0], [0.0]])
def test_no_token_has_no_weight(aggregation: Any, lengths: list[int]) -> None:
    assert token_weights(lengths, [1] * len(lengths), aggregation).shape == (0,)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (([1, 2], [0]), r"one of each per completion, given shapes \(2,\) and \(1,\)"),
        (([1, -2], [0, 0]), "least length -2"),
        (([1.5, 2], [0, 0]), "lengths: expected whole numbers, given 1.5"),
        (([1], [0], "mean"), "aggregation is 'mean'; expected one of token, sample, prompt, sum"),
    ],
)
def test_wrong_input_is_a_clear_error(arguments: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        token_weights(*arguments)
