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

    The reward is 1 at the right guess. A guess that earlier answers exclude costs `cost`, and so does what is
    no number, whose answer is `*`. So the best reward is 1, and from .5 on the number was found."""

    def __init__(self, guesses: int = 3, most: int = 7, cost: float = 0.1) -> None:
        self._left, self._low, self._high, self._cost = guesses, 1, most, cost

    def start(self, row: dict[str, Any]) -> str:
        self._secret = int(row["secret"])
        return ""

    def step(self, message: dict[str, Any]) -> tuple[str, float, bool]:
        self._left -= 1
        text = message["content"].strip()
        guess = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else None
        if guess == self._secret:
            return "=\n", 1.0, True
        if guess is None:
            return "*\n", -self._cost, self._left == 0
        reward = 0.0 if self._low <= guess <= self._high else -self._cost
        if guess < self._secret:
            self._low = max(self._low, guess + 1)
        else:
            self._high = min(self._high, guess - 1)
        return "+\n" if guess < self._secret else "-\n", reward, self._left == 0
