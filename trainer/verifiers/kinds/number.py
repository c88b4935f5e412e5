"""Kind `number`: the completion's first line must be a literal number equal to the gold answer."""

from decimal import Decimal
from typing import Any

from trainer.types import Prompt, Verdict
from trainer.verifiers.text import compared, literal_number
from trainer.verifiers.verifier import Verifier, accepted


class Number(Verifier, kind="number"):
    """The first line, which is one literal number and nothing else."""

    def problem(self, prompt: Prompt) -> str:
        literal = all(literal_number(answer) is not None for answer in accepted(prompt.answer))
        return "" if literal else ", not a literal number; use math or exact"

    def compare(self, completion: str, answer: str, metadata: dict[str, Any]) -> Verdict:
        return compared(first_number(completion), literal_number(answer))

    def vote(self, completion: str, prompt: Prompt) -> Decimal | None:
        return first_number(completion)


def first_number(completion: str) -> Decimal | None:
    """The number that the completion's first line is, or None."""
    lines = completion.strip().splitlines()
    return literal_number(lines[0]) if lines else None
