"""Kind `number`: the completion's first line is one literal number, equal to the gold answer's.

Accepted, after Unicode folding (fullwidth digits, minus signs): an optional sign and dollar sign, digits
with or without commas in groups of three, an optional decimal part, an optional full stop at the end.
Not accepted: any other word or sign, so `17+25`, `4!`, `1=1`, `1/2`, `71 or 72`, `1e3` are no numbers.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal
from functools import lru_cache

from trainer.types import Outcome

MAX_CHARS = 300  # longer text is no answer, only work for the parser
_NUMBER = re.compile(
    r"(?P<sign>[+-]?)(?:\\?\$)?(?P<inner>[+-]?)(?P<digits>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)\.?",
    re.ASCII,
)
_MINUS = str.maketrans("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-------")


def fold(text: str) -> str:
    """Fullwidth forms and Unicode minus signs as plain ASCII; white space around removed."""
    return unicodedata.normalize("NFKC", text.translate(_MINUS)).strip()


@lru_cache(4096)  # gold answers, and what a small model likes to say
def literal_number(text: str) -> Decimal | None:
    """The number that `text` literally is, or None."""
    if len(text) > MAX_CHARS:
        return None
    found = _NUMBER.fullmatch(fold(text))
    if found is None or (found["sign"] and found["inner"]):
        return None
    return Decimal(found["sign"] + found["inner"] + found["digits"].replace(",", ""))


def judge_number(completion: str, answer: str) -> tuple[float, Outcome]:
    """Compare the first line of the completion with the gold answer, number by number."""
    lines = completion.strip().splitlines()
    given = literal_number(lines[0]) if lines else None
    if given is None:
        return 0.0, "unparsable"
    return (1.0, "correct") if given == literal_number(answer) else (0.0, "wrong")
