"""Reading a completion or a gold answer: the part after the thinking, the last box, a literal number.

A literal number is, after Unicode folding (fullwidth digits, minus signs): an optional sign and dollar sign,
digits with or without commas in groups of three, an optional decimal part, an optional full stop at the end.
Any other word or sign is refused, such as `17+25`, `4!`, `1=1`, `1/2`, `71 or 72`, `1e3`.
"""

import re
import unicodedata
from decimal import Decimal
from functools import cache, lru_cache

from trainer.types import CORRECT, UNPARSABLE, WRONG, Answer, Verdict

MAX_CHARS = 300  # of an answer
MAX_MARKS = 30  # combining marks in a row, as in Unicode's Stream-Safe Text Format
_NUMBER = re.compile(
    r"(?P<sign>[+-]?)(?:\\?\$)?(?P<inner>[+-]?)(?P<digits>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)\.?",
    re.ASCII,
)
_BRACE = re.compile(r"[{}]")
_MINUS = re.compile("[\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d]")


def answer_part(completion: str) -> str:
    """The text after the thinking."""
    _, marker, after = completion.rpartition("</think>")
    if not marker and "<think>" in completion:
        return ""
    return after


def opened_thinking(prompt: str) -> str:
    """The beginning of a completion that its prompt has written: `<think>`, if the prompt ends with one."""
    return "<think>\n" if prompt.rstrip().endswith("<think>") else ""


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{...} with balanced braces, None if there is none."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for brace in _BRACE.finditer(text, start + 6):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start + 7 : brace.start()]
    return None


def fold(text: str) -> str:
    """The text with fullwidth forms and Unicode minus signs as ASCII, stripped."""
    text = _MINUS.sub("-", text)
    if len(text) > MAX_CHARS and not text.isascii():
        mark, run = _marks()
        if mark.search(text[::MAX_MARKS]):  # without one there, no run is as long
            text = run.sub(lambda match: match[0][:MAX_MARKS], text)
    return unicodedata.normalize("NFKC", text).strip()


@cache
def _marks() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """One combining mark, and more than MAX_MARKS in a row: their normalisation takes quadratic time."""
    normal = ((i, unicodedata.normalize("NFKC", chr(i))) for i in range(0x300, 0x1F000))
    marks = re.escape("".join(chr(i) for i, text in normal if unicodedata.combining(text[0])))
    return re.compile(f"[{marks}]"), re.compile(f"[{marks}]{{{MAX_MARKS + 1},}}")


def literal_number(text: str) -> Decimal | None:
    """The literal number, or None."""
    return _literal_number(text) if len(text) <= MAX_CHARS else None


@lru_cache(4096)  # gold answers, and frequent answers of a small model
def _literal_number(text: str) -> Decimal | None:
    match = _NUMBER.fullmatch(fold(text))
    if match is None or (match["sign"] and match["inner"]):
        return None
    return Decimal(match["sign"] + match["inner"] + match["digits"].replace(",", ""))


def compared(value: Decimal | str | None, gold: Decimal | str | None) -> Verdict:
    """The verdict on an answer that was read from a completion; None: it has none."""
    return UNPARSABLE if value is None else CORRECT if value == gold else WRONG


def no_text(answer: Answer) -> str:
    """Say why completions cannot be compared with a gold answer as text; empty if they can."""
    if str(answer).startswith(('{"', '[{"')):
        return "; expected text, a number or a list of those"
    return "" if answer else "; use reasoning_gym, the task's own scorer"
