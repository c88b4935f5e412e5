"""A calculator as a tool: products of two numbers that a small model cannot compute by itself.

The model may write an expression in brackets, and the calculator writes the value behind it; a line without
brackets is the answer. The prompt shows examples, in which the tool is used if there is one.
"""

import ast
import operator
import random
import re
from collections.abc import Iterator
from typing import Any

EXAMPLES = ((31, 47), (86, 12))
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def rows(count: int = 4000, digits: int = 2, tool: bool = True) -> Iterator[dict[str, Any]]:
    """Different products of two numbers of so many digits, each after two examples."""
    called = [f"[{a}*{b}]={a * b}\n" * tool for a, b in EXAMPLES]
    shown = zip(EXAMPLES, called, strict=True)
    examples = "".join(f"Q: {a}*{b}\n{call}A: {a * b}\n\n" for (a, b), call in shown)
    numbers = random.Random(0)
    seen = set[tuple[int, int]]()
    while len(seen) < count:
        a, b = (numbers.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
        if (a, b) not in seen:
            seen.add((a, b))
            question = f"{examples}Q: {a}*{b}\n" + ("" if tool else "A:")
            yield {"question": question, "answer": str(a * b)}


class Calculator:
    """The reward is 1 for the right answer. `tool`: whether brackets are computed, or are a wrong answer."""

    def __init__(self, tool: bool = True) -> None:
        self._tool = tool

    def start(self, row: dict[str, Any]) -> str:
        self._answer = row["answer"]
        return ""

    def step(self, message: dict[str, Any]) -> tuple[str, float | None, bool]:
        text = message["content"].strip()
        call = re.fullmatch(r"\[([\d+*() -]{1,40})\](=?)", text)  # `]=` may be one token
        if self._tool and call:
            return f"{'' if call[2] else '='}{value(call[1])}\nA:", None, False
        return "", float(text == self._answer), True


def value(expression: str) -> str:
    """The value of sums, differences and products of whole numbers, or `error`."""
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, KeyError, RecursionError):
        return "error"


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp):
        return int(_OPERATIONS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError("no sum, difference or product")
