"""Answers made to break a verifier: a list written by hand, and a seeded generator of further ones.

No text here is right for a case of `test_hostile_answers.py`, whatever decorates it.
@PATH@ stands for a file that must never exist, @PORT@ for a port that nobody may connect to.
"""

import json
from pathlib import Path
from random import Random

# The texts and the forms of answers (# is the text). A list joins its parts: a text, or [text, repetitions].
_LISTS = json.loads(Path(__file__).with_suffix(".json").read_text())
TEXTS = [
    text if isinstance(text, str) else "".join(p if isinstance(p, str) else p[0] * p[1] for p in text)
    for text in _LISTS["texts"]
]
_ATOMS = _LISTS["atoms"]  # parts of answers
_SHORT = [text for text in TEXTS if len(text) < 60]
_CHARACTERS = "{}[]()\\$^_&%#=<>+-*/,.;:!?'\"`~| \n\r\t\0\u2212\u200b\u202e\ud800\u0301９٣½"


def fuzz(random: Random, depth: int = 4) -> str:
    """A text that no case accepts: hostile texts and parts of answers, put together as answers are."""
    if depth == 0 or random.random() < 0.2:
        return random.choice(_ATOMS if random.random() < 0.6 else _SHORT)
    parts = random.choice(_LISTS["wrappers"]).split("#")
    text = parts[0] + "".join(fuzz(random, depth - 1) + part for part in parts[1:])
    if random.random() < 0.15:
        text *= random.choice((2, 3, 20))
    for _ in range(random.choice((0, 0, 0, 1, 3))):
        start = random.randrange(len(text) + 1)
        inserted = random.choice(_CHARACTERS) * random.choice((0, 1, 1, 40))
        text = text[:start] + inserted + text[start + random.choice((0, 1, 9)) :]
    return text[:1_000_000]


def same(completion: str, answer: str, metadata: dict[str, object]) -> float:
    """A user's function as a verifier."""
    return float(completion == answer)
