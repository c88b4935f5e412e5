"""Promises of the model whose head takes most of the learner's time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.validation.wide_vocabulary import widen


def test_it_answers_as_before_and_its_further_tokens_are_never_drawn(tmp_path: Path) -> None:
    before, after, others = widen(tmp_path, 2048)
    assert after == pytest.approx(before, abs=1e-4) and others < 1e-4
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 2048
