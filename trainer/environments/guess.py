"""Guess the number: the environment says whether the number is higher or lower.

Binary search is the best policy: with `2^guesses − 1` numbers or fewer it always finds the number, so the
pass rate's ceiling is known: 1.
"""

import random
from collections.abc import Iterator
from typing import Any


def rows(count: int = 4000, most: int = 7) -> Iterator[dict[str, Any]]:
    """Different questions, each with a number from 1 to `most` that it does not betray."""
    for number in range(count):
        secret = random.Random(number).randint(1, most)
        yield {"question": f"{number:04d}\n", "secret": secret}


class Guess:
    """The model has so many guesses; the answer to each is `+` (it is higher), `-` (lower) or `=`.

    The reward is 1 at the right guess. The answer to what is no number from 1 to `most` is `*`, and it costs
    `cost`. So the best reward is 1, and from .5 on the number was found."""

    def __init__(self, guesses: int = 3, most: int = 7, cost: float = 0.1) -> None:
        self._left, self._most, self._cost = guesses, most, cost

    def start(self, row: dict[str, Any]) -> str:
        self._secret = int(row["secret"])
        return ""

    def step(self, message: dict[str, Any]) -> tuple[str, float, bool]:
        self._left -= 1
        text = message["content"].strip()
        guess = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else None
        if guess == self._secret:
            return "=\n", 1.0, True
        if guess is None or not 1 <= guess <= self._most:
            return "*\n", -self._cost, self._left == 0
        return "+\n" if guess < self._secret else "-\n", 0.0, self._left == 0
