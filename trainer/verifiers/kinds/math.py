"""Kind `math`: the final answer of a solution, compared by value.

1. Only the text after the last `</think>` counts; a `<think>` without an end has no answer.
2. The candidate is the content of the last \\boxed{}. Without a box it is the last line after its last
   `=`, `:`, `#`, ` is ` or ` equals `; there the only number among words is taken, so
   `71 or 72` is not an answer.
3. The same text after normalisation is correct. If the gold answer is a plain number, the candidate must be
   a literal number too, so `17+25`, `4!` and `1=1` are not accepted. Neither check needs a worker.
4. An integral, sum, limit, factorial or the like that the gold answer does not have is a task, not an answer.
5. Otherwise math-verify decides, in a worker, on at most MAX_CHARS characters. It evaluates: the gold answer
   \\frac{\\pi}{4} is also matched by \\arctan(1), which its form does not distinguish from an answer.
"""

import re
from decimal import Decimal
from typing import Any

from trainer.types import CORRECT, UNPARSABLE, WRONG, Prompt, Verdict
from trainer.verifiers.text import MAX_CHARS, answer_part, compared, fold, last_boxed, literal_number, no_text
from trainer.verifiers.verifier import Verifier

_CHOICE = re.compile(r"\bor\b")
_CHANGES = re.compile(  # words that change the number beside them
    r"hundred|thousand|million|billion|dozen|half|minus|negative|sqrt|\b(?:sin|cos|tan|log|ln|pi|not)\b"
)
_TASK = re.compile(
    r"\\(?:i+nt|oint|sum|prod|lim|[dt]?binom|min|max|gcd|det|[bp]mod|[lr]floor|[lr]ceil)(?![A-Za-z])"
    r"|(?<!\\)!|\\[dt]?frac\s*\{\s*d\s*\}\s*\{\s*d"
)
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox|textnormal)\s*\{([^{}]*)\}")
_UNIT = re.compile(
    r"(?:\\[ ,;!]|\s)*"
    r"(?:\\(?:text|mathrm|mbox|textnormal)\s*\{[^{}]*\}(?:\^\{?[23]\}?)?|\\?%|\^\{?\\circ\}?)$"
)
_NOISE = re.compile(r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\[ ,;:!]|\s+|[$~]")
_ANSWER_AT = re.compile(r"=|:|#|\b(?:is|equals)\b")


def normalise(latex: str) -> str:
    """The LaTeX without markup that only changes its look."""
    latex = _TEXT.sub(r"\1", fold(latex)).replace("\\$", "")
    latex = latex.replace("dfrac", "frac").replace("tfrac", "frac").replace("{,}", ",")
    latex = re.sub(r"\^\{?\\circ\}?", "", _NOISE.sub("", latex)).rstrip(".")
    while latex.startswith("{") and latex.endswith("}") and last_boxed(f"\\boxed{latex}") == latex[1:-1]:
        latex = latex[1:-1]
    return latex


def plain_number(latex: str) -> Decimal | None:
    """The literal number, without its unit (%, degrees, \\text{...}) and a leading `x =`; else None."""
    latex = re.sub(r"^\s*[A-Za-z]\s*=", "", fold(latex))
    if _CHANGES.search(latex):
        return None
    return literal_number(normalise(_UNIT.sub("", latex.replace("\\!", ""))))


def _unboxed(text: str) -> str | None:
    """The answer in the last line of a solution without a box: the only number among words, else the text."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines or len(lines[-1]) > 4 * MAX_CHARS:
        return None
    tail = _ANSWER_AT.split(fold(lines[-1]))[-1].strip()
    words = [word.lstrip("*$").rstrip("*$,.;!?") for word in tail.split()]
    others = [word for word in words if literal_number(word) is None]
    if len(others) == len(words) - 1 and all(re.fullmatch(r"[A-Za-z'-]{2,}|[aAI]|", w) for w in others):
        return tail if _CHANGES.search(tail) else next(w for w in words if literal_number(w) is not None)
    return tail.rstrip(".") or None


def candidate(completion: str) -> str | None:
    """The final answer as written, None if there is none or it is too long."""
    part = answer_part(completion)
    answer = last_boxed(part) if "\\boxed" in part else _unboxed(part)
    return answer if answer and len(answer) <= MAX_CHARS else None


class Math(Verifier, kind="math"):
    r"""The last `\boxed{}` or the end of the last line, by value."""

    def problem(self, prompt: Prompt) -> str:
        return no_text(prompt.answer)

    def compare(self, completion: str, answer: str, metadata: dict[str, Any]) -> Verdict | None:
        text = candidate(completion)
        if text is None:
            return UNPARSABLE
        if normalise(text) == normalise(answer):
            return CORRECT
        gold = plain_number(answer)
        if gold is not None:
            return compared(plain_number(text), gold)
        if any(form.search(text) and not form.search(answer) for form in (_CHOICE, _TASK)):
            return UNPARSABLE
        return None

    def load(self) -> None:
        verify("\\boxed{(1, \\frac{1}{2})}", "(1, \\frac{2}{4})")  # fills the caches that all workers share

    def slow(self, completion: str, answer: str | list[str], metadata: dict[str, Any]) -> Verdict:
        """The best verdict on the gold answers that comparing text has left open."""
        answers = [answer] if isinstance(answer, str) else answer
        open_ones = [one for one in answers if self.compare(completion, one, metadata) is None]
        return max(verify(completion, one) for one in open_ones)

    def vote(self, completion: str, prompt: Prompt) -> Decimal | str | None:
        """A number by value, any other answer as text after normalisation."""
        text = candidate(completion) or ""
        number = plain_number(text)
        return (normalise(text) or None) if number is None else number


def verify(completion: str, answer: str) -> Verdict:
    """math-verify's judgement; only in a worker, since it can hang inside C, where no signal ends it."""
    import math_verify

    parsed = math_verify.parse(f"\\boxed{{{candidate(completion)}}}", parsing_timeout=None)
    # In dollars, a tuple or set is parsed as such; in a box, as a list of answers.
    gold = math_verify.parse(f"${answer}$", parsing_timeout=None)
    if not parsed or not gold:
        return UNPARSABLE
    return CORRECT if math_verify.verify(gold, parsed, timeout_seconds=None) else WRONG
