"""Promises of the study of `forecast.stop`: an end is wrong if more was to be gained than the rule says."""

from __future__ import annotations

import pytest

from bench.validation import stopping
from bench.validation.shapes import CONTROL
from bench.validation.stopping import RULES, ends, main, table
from trainer.config.forecast import ForecastConfig

PARSED = [rule for text in RULES if (rule := ForecastConfig(stop=text).rule)]


def test_little_was_to_be_gained_where_a_sigmoid_ended() -> None:
    found = ends(CONTROL, 0, 1, rules := [rule for rule in PARSED if rule.gain == 0.02])
    assert len(PARSED) == 6 and len(found) == len(rules) == 2
    assert any(gain is not None for gain in found) and all(gain is None or 0 < gain < 0.02 for gain in found)


def test_the_table_counts_ends_and_wrong_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = table({"a": [[None, 0.004], [0.006, None], [0.001, None]]}, PARSED[:2])
    assert rows.splitlines()[-1] == "| a | 3 | 2, 1 | 1, 0 |"
    monkeypatch.setattr(stopping, "KINDS", {})
    monkeypatch.setattr(stopping, "ends", lambda *args: [None] * 6)
    assert main(["--runs", "2"]) == 0 and "| sigmoid (control) | 2 | 0, 0 |" in capsys.readouterr().out
