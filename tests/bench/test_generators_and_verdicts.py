"""Promises of `python -m bench engine` and `verifiers`: each does the work that it is timed for."""

from argparse import Namespace
from pathlib import Path

import pytest

from bench import engine, verifiers
from bench.learner.step import TINY, save_model
from trainer.config import VerifierConfig


@pytest.mark.parametrize("name", ["ours", "generate"])
def test_a_generator_makes_as_many_tokens_as_are_asked_for(name: str, tmp_path: Path) -> None:
    save_model(TINY, str(tmp_path))
    work = getattr(engine, name)(Namespace(dtype="float32", sequences=3, tokens=4), str(tmp_path))
    assert [work(), work()] == [12, 12]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*verifiers.ANSWERS, "reasoning_gym"])
def test_ordinary_answers_are_right_and_wrong_ones(kind: str) -> None:
    config, asked = VerifierConfig(kind=kind, timeout_s=60.0), verifiers.ordinary(kind)
    assert verifiers.measure(config, asked, 1, "")["per_s"] > 0
    with pytest.raises(ValueError, match=r"outcomes .*wrong.*, expected correct"):
        verifiers.measure(config, asked, 1, "correct")
