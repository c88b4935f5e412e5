"""Kind `exact`: the completion must equal the gold answer, except for case, white space and Unicode form."""

from __future__ import annotations

from trainer.types import Outcome
from trainer.verifiers.number import fold


def normalise(text: str) -> str:
    """The text folded, in lower case, with single blanks."""
    return " ".join(fold(text).casefold().split())


def judge_exact(completion: str, answer: str) -> tuple[float, Outcome]:
    """Compare as text."""
    return (1.0, "correct") if normalise(completion) == normalise(answer) else (0.0, "wrong")
