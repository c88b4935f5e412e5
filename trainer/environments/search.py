"""Search in a small collection of documents: a question needs two of them, and the prompt shows neither.

The collection is made here, of invented people and towns. The model may write words in brackets, and is shown
the document that has most of them; a line without brackets is the answer. Two searches with the right words
always suffice, so the best pass rate is known: 1. Without them it can only guess one of twelve.
"""

import random
import re
from collections.abc import Iterator
from itertools import product
from typing import Any

TOWNS = {  # each with its mayor and its river
    "Ashwick": ("Anna", "Alder"), "Birkdale": ("Boris", "Brent"), "Corham": ("Clara", "Cole"),
    "Dunmere": ("David", "Dart"), "Elstow": ("Emma", "Eden"), "Farley": ("Felix", "Fleet"),
    "Granby": ("Greta", "Gade"), "Holbeck": ("Hugo", "Hull"), "Ivelton": ("Irene", "Isle"),
    "Kelby": ("Jonas", "Kent"), "Lydgate": ("Karin", "Leen"), "Marlow": ("Leo", "Mole"),
}  # fmt: skip
STARTS = "Ba Do Fe Gu Ki Lo Me Ni Pa Ru So Ti Va We Yo Za"
ENDS = "bor den fan gil kom lan mir nax pel rik sun"
PEOPLE = ["".join(parts) for parts in product(STARTS.split(), ENDS.split())]
_order = random.Random(0)
_order.shuffle(PEOPLE)
HOME = {name: _order.choice(list(TOWNS)) for name in PEOPLE}
DOCUMENTS = [f"{name} lives in {town}." for name, town in HOME.items()]
DOCUMENTS += [f"The mayor of {town} is {mayor}." for town, (mayor, _) in TOWNS.items()]
DOCUMENTS += [f"The river of {town} is the {river}." for town, (_, river) in TOWNS.items()]
_order.shuffle(DOCUMENTS)


def search(query: str) -> str:
    """The document that shares most words with the query, of several the first; `nothing` if none does."""
    asked = _words(query)
    best = max(DOCUMENTS, key=lambda document: len(asked & _words(document)))
    return best if asked & _words(best) else "nothing"


def _words(text: str) -> set[str]:
    return set(re.findall("[a-z]+", text.lower()))


def _questions(name: str) -> Iterator[tuple[str, tuple[str, str], str]]:
    """A person's questions, each with two searches that tell the answer, and the answer."""
    town = HOME[name]
    for kind, answer in zip(("mayor", "river"), TOWNS[town], strict=True):
        searches = f"{name} lives", f"{kind} of {town}"
        yield f"Q: Which {kind} has the town where {name} lives?\n", searches, answer


def rows(tool: bool = True) -> Iterator[dict[str, Any]]:
    """Every question, each after an answered one of either kind, whose people are asked about no more."""
    examples = ""
    for question, searches, answer in (next(_questions(PEOPLE[0])), [*_questions(PEOPLE[1])][1]):
        calls = "".join(f"[{query}]={search(query)}\n" for query in searches if tool)
        examples += f"{question}{calls}A: {answer}\n\n"
    for name in PEOPLE[2:]:
        for question, _, answer in _questions(name):
            yield {"question": examples + question, "answer": answer}


class Search:
    """The reward is 1 for the right answer. `tool`: whether brackets search, or are a wrong answer."""

    def __init__(self, tool: bool = True) -> None:
        self._tool = tool

    def start(self, row: dict[str, Any]) -> str:
        self._answer = row["answer"]
        return ""

    def step(self, message: dict[str, Any]) -> tuple[str, float | None, bool]:
        text = message["content"].strip()
        call = re.match(r"\[([^\]]*)\]", text)
        if self._tool and call:  # `]=` may be one token
            return f"{'' if text.endswith('=') else '='}{search(call[1])}\n", None, False
        return "", float(text == f"A: {self._answer}"), True
