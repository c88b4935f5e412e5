"""Kind `exact`: text that is equal but for case, white space and Unicode form."""

from typing import Any

from trainer.types import CORRECT, WRONG, Prompt, Verdict
from trainer.verifiers.text import fold, no_text
from trainer.verifiers.verifier import Verifier


class Exact(Verifier, kind="exact"):
    """The same text, but for case, blanks and Unicode form."""

    def problem(self, prompt: Prompt) -> str:
        return no_text(prompt.answer)

    def compare(self, completion: str, answer: str, metadata: dict[str, Any]) -> Verdict:
        return CORRECT if plain(completion) == plain(answer) else WRONG

    def vote(self, completion: str, prompt: Prompt) -> str | None:
        return plain(completion) or None


def plain(text: str) -> str:
    """The text in lower case, with single blanks."""
    return " ".join(fold(text).casefold().split())
