"""Kind `choice`: the letter of the option that a completion chooses.

Of the text after the thinking, the last \\boxed{} counts, else the last statement such as `Answer: B`, `the
correct option is (B)` or `B is correct`, else the last line. It is a letter (`B`, `(b)`, `B.`, `B. Paris`) or
the full text of an option. Several letters (`A or B`), a denial (`not B`) and all else are unparsable.
"""

import re
from collections.abc import Sequence
from string import ascii_uppercase
from typing import Any

from trainer.types import Prompt, Verdict
from trainer.verifiers.text import answer_part, compared, fold, last_boxed
from trainer.verifiers.verifier import Verifier

MAX_CHARS = 2000  # at the end of a completion, where its answer is
_CORRECT = r" is (?:the )?(?:correct|right|best|answer)\b"
_STATEMENT = re.compile(
    rf"(?i)\b(?:answer|choice|option)\b[*_\s]*(?:(?:is\b|[:=])[*_\s]*)+|(?=(?<!\w)[A-Z]\)?[*_]*{_CORRECT})"
)
_SEVERAL = re.compile(r"\(?[A-Z]\)?\s*(?:or\b|(?:[,/&]|and\b)\s*\(?[A-Z]\b)|(?i:not|neither|none|either)\b")
_LETTER = re.compile(
    rf"[(\[]*([A-Z])(?:\s*$|[\])}}.:,;]+(?:\s|$|{_CORRECT})|{_CORRECT}|\s+(?:because|since|as|[-–—(]))"
)
_MARKUP = re.compile(r"(?i)\\(?:text|mathrm|textbf|mathbf)\s*(?=\{)|[*_$`{}\"']|\b(?:option|choice)\b")


class Choice(Verifier, kind="choice"):
    """The letter of the right option."""

    def problem(self, prompt: Prompt) -> str:
        options = prompt.metadata.get("choices")  # a column of the data may have this name, too
        named = isinstance(options, list) and prompt.answer in tuple(ascii_uppercase[: len(options)])
        return "" if named else ", without options that have letters; set data.choices_column"

    def compare(self, completion: str, answer: str, metadata: dict[str, Any]) -> Verdict:
        return compared(chosen_letter(completion, metadata["choices"]), answer)

    def vote(self, completion: str, prompt: Prompt) -> str | None:
        return chosen_letter(completion, prompt.metadata["choices"])


def chosen_letter(completion: str, options: Sequence[str]) -> str | None:
    """The letter that a completion chooses; None if it is not clear."""
    text = fold(answer_part(completion))[-MAX_CHARS:]
    if "\\boxed" in text:
        return _resolve(last_boxed(text) or "", options)
    claims = [text[match.end() :].lstrip() for match in _STATEMENT.finditer(text)]
    for claim in [*reversed(claims), *text.splitlines()[-1:]]:
        first_line, *_ = claim.splitlines() or [""]
        if _SEVERAL.match(_MARKUP.sub("", first_line).strip()):
            return None
        if letter := _resolve(first_line, options):
            return letter
    return None


def _resolve(claim: str, options: Sequence[str]) -> str | None:
    """The letter that a short text names, by itself or by an option's text."""
    claim = _MARKUP.sub("", claim).strip()
    if _SEVERAL.match(claim):
        return None
    letter = _LETTER.match(claim.upper() if len(claim.strip("().[]")) == 1 else claim)
    letters = ascii_uppercase[: len(options)]
    if letter and letter[1] in letters:
        return letter[1]
    texts = [fold(_MARKUP.sub("", option)).casefold().rstrip(".") for option in options]
    text = claim.casefold().rstrip(".")
    return letters[texts.index(text)] if texts.count(text) == 1 else None
