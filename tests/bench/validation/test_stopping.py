"""Promises of the study of `forecast.stop`: an end is wrong if more was to be gained than the rule says."""

from __future__ import annotations

from bench.validation.shapes import CONTROL
from bench.validation.stopping import RULES, describe, measure


def test_little_was_to_be_gained_where_a_sigmoid_ended() -> None:
    gains = dict(zip(RULES, measure(CONTROL, 0, 1)["gains"], strict=True))
    ended = [gain for rule, gain in gains.items() if rule.gain == 0.02 and gain is not None]
    assert len(RULES) == 6 and ended and all(0 < gain < 0.02 for gain in ended)


def test_the_table_counts_ends_and_wrong_ones() -> None:
    gains = [[None, 0.004], [0.006, None], [0.001, None]]
    text = describe({}, [{"kind": "a", "gains": [*row, *[None] * 4]} for row in gains])
    assert text.splitlines()[-1] == "| a | 3 | 2, 1 | 1, 0 | 0, 0 | 0, 0 | 0, 0 | 0, 0 |"
