"""Kind `exact`: the answer of a completion as text, compared in SQuAD's way.

1. Only the text after the last `</think>` counts; a `<think>` without an end has no answer.
2. The answer is the last \\boxed{}; else what follows the last `Answer:` or `answer is`, in one line; else
   the last line. Of that line the first sentence counts after such a statement, else the last one; of the
   sentence what follows its last ` is `, ` are `, ` was `, ` were `, `it's ` or `: `, but for a mark of
   Markdown such as `- ` or `1. `. All of the text, the line and the sentence are answers, too, so that an
   answer may have several lines or hold an `is`.
3. An answer is right if it equals a gold answer. One that contains it is wrong, so that no list of guesses,
   no `Paris or Rome` and no `Paris, I think` is right.
4. Texts are equal that differ in case, white space, Unicode form, punctuation and the articles a, an, the
   (arXiv 1606.05250). Unlike there, punctuation counts within a word, but for dots, apostrophes and hyphens
   between letters and commas before three digits, and so does a sign or dot before a digit: `3.5`, `-5`, `.5`
   and `f(x)` are not 35, 5, 5 and fx. Where nothing but punctuation and articles is left, all of it counts.
"""

import re
from collections.abc import Iterator
from typing import Any

from trainer.types import CORRECT, UNPARSABLE, WRONG, Prompt, Verdict
from trainer.verifiers.text import answer_part, fold, last_boxed, no_text
from trainer.verifiers.verifier import Verifier, accepted

MAX_CHARS = 2000  # of a line with an answer
_STATEMENT = re.compile(r"(?i)\banswer\b[*_\s]*(?:is\b|[:=\uff1a])[*_\s]*")
_VERB = re.compile(r"\b(?:is|are|was|were)\b|(?i:\bit['\u2019]s\b)|:\s")
_SENTENCE_END = re.compile(r"(?<=\w\w\w)[\"')*]*[.!?]\s+")
_MARKUP = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")
_EDGE = (
    ".,;:!?\"'`*_()[]{}\u2018\u2019\u201c\u201d\u00ab\u00bb"
    "\u3001\u3002\u300c\u300d\u060c\u061b\u061f\u06d4\u0964"  # of Chinese, Japanese, Arabic, Urdu, Hindi
)
_LINE_MARK = re.compile(r"^\s*(?:[#>\u2022-]+|\d+\.)\s+")  # of Markdown: a heading, a quotation, an item
_INNER = re.compile(
    r"(?<=\d),(?=\d{3}(?!\d))|(?<=[^\W\d_])[.'\u2019](?=[^\W\d_])|(?<=[^\W\d_]{2})-(?=[^\W\d_]{2})"
)


class Exact(Verifier, kind="exact"):
    """The same text, but for case, blanks, punctuation and articles."""

    def problem(self, prompt: Prompt) -> str:
        return no_text(prompt.answer)

    def compare(self, completion: str, answer: str, metadata: dict[str, Any]) -> Verdict:
        answers = list(map(plain, answers_of(completion)))
        return UNPARSABLE if not any(answers) else CORRECT if plain(answer) in answers else WRONG

    def vote(self, completion: str, prompt: Prompt) -> str | None:
        """The gold answer that it has; else the shortest part that is an answer."""
        answers, gold = list(map(plain, answers_of(completion))), set(map(plain, accepted(prompt.answer)))
        return next((answer for answer in answers if answer in gold), answers[-1] if answers else "") or None


def answers_of(completion: str) -> Iterator[str]:
    """The text, its line with the answer, and parts of that line; the shortest comes last."""
    text = answer_part(completion).strip()
    if "\\boxed" in text:
        yield _MARKUP.sub(r"\1", last_boxed(text) or "")
        return
    yield text
    *before, claim = _STATEMENT.split(text)
    lines = claim.splitlines() or [""]
    line = (lines[0] if before else lines[-1])[:MAX_CHARS]
    sentences = _SENTENCE_END.split(line.rstrip())
    sentence = sentences[0] if before else sentences[-1]
    yield from (line, sentence, _LINE_MARK.sub("", _VERB.split(sentence)[-1]))


def plain(text: str) -> str:
    """The text in the form in which answers are compared."""
    words = fold(text).casefold().split()
    bare = [_INNER.sub("", _stripped(word)) for word in words]
    return " ".join(word for word in bare if word not in ("", "a", "an", "the")) or " ".join(words)


def _stripped(word: str) -> str:
    """The word without punctuation around it; a dot before a digit stays."""
    start = word.lstrip(_EDGE)
    dot = "." if start[:1].isdigit() and word[: len(word) - len(start)].endswith(".") else ""
    return dot + start.rstrip(_EDGE)
