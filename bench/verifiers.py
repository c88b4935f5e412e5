"""Answers and programs a second that the verifiers judge, all asked for at once. [3 min]

  python -m bench verifiers            ordinary answers of each kind, then programs; three minutes

Answers: right and wrong ones as models write them, 300 a round, median of 7 rounds. Programs (kind `code`, in
the sandbox): with one, two or ten tests on standard input, calls, and asserts.
"""

import asyncio
import json
import statistics
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from bench.harness import Case, Row, cores
from bench.table import table
from trainer.config import CodeConfig, VerifierConfig
from trainer.types import Prompt
from trainer.verifiers.kinds.reasoning_gym import generate
from trainer.verifiers.pool import VerifierPool

OPTIONS: dict[str, Any] = {"programs": (100, "programs of each kind"), "workers": (cores(), "workers")}
ROUND, ROUNDS = 300, 7  # answers
THOUGHT = "<think>" + "We add the two numbers and carry the one. " * 50 + "</think>The answer follows.\n"
ANSWERS = {  # gold answers with answers as models write them
    "number": [("42", " 42"), ("42", "The answer is 42"), ("1234", "1,234.0"), ("7", "8\nQuestion:")],
    "exact": [("New York", "new york"), ("New York", "Boston"), ("Yes.", "Yes. It is.")],
    "choice": [("B", "Answer: B"), ("B", "\\boxed{A}"), ("C", "It is C, so **C**.")],
    "math": [
        ("42", "\\boxed{42}"), ("42", "so it is 41."), ("\\frac{1}{2}", "\\boxed{0.5}"),
        ("2x+1", "\\boxed{1 + 2x}"), ("(3, \\frac{\\pi}{2})", "\\boxed{(3, \\pi/2)}"),
        ("\\frac{1}{3}", "\\boxed{\\frac{2}{3}}"), ("72", "\\boxed{72\\text{ cents}}"), ("5", "\\boxed{5"),
    ],
}  # fmt: skip
SUM = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
ADD = "```python\ndef add(a, b):\n    return a + b\n```"
CALLS = [{"input": [i, 1], "output": i + 1, "fn_name": "add"} for i in range(10)]


def stdio(tests: int) -> dict[str, list[str]]:
    """So many sums to read and print."""
    return {"inputs": [f"{i} 1\n" for i in range(tests)], "outputs": [str(i + 1) for i in range(tests)]}


PROGRAMS: dict[str, tuple[str, Any, str]] = {  # name -> completion, tests, outcome
    "standard input, 1 test": (SUM, stdio(1), "correct"),
    "standard input, 2 tests": (SUM, stdio(2), "correct"),
    "standard input, 10 tests": (SUM, stdio(10), "correct"),
    "standard input, wrong at the first test": (SUM.replace("a + b", "a - b"), stdio(10), "wrong"),
    "10 calls of a function": (ADD, CALLS, "correct"),
    "3 asserts": (ADD, [f"assert add({i}, 1) == {i + 1}" for i in range(3)], "correct"),
}


def items(task: str) -> list[Prompt]:
    """Prompts of a task of reasoning-gym."""
    arguments = {"seed": 3, "size": 20}
    origin = {"origin": {"task": task, "arguments": arguments}}
    return [Prompt("0", "q", (1,), item["answer"], item | origin) for item in generate(task, arguments)]


def ordinary(kind: str) -> list[tuple[Prompt, str]]:
    """Prompts and answers of this kind, right and wrong ones."""
    if kind == "reasoning_gym":
        prompts = items("chain_sum") + items("polynomial_multiplication")
        return [(p, f"<answer>{p.answer}{end}</answer>") for p in prompts for end in ("", " + 0", "1")]
    metadata = {"choices": ["4", "7", "9"]}
    thought = THOUGHT if kind in ("choice", "math") else ""  # the others read from the first line
    return [(Prompt("0", "q", (1,), gold, metadata), thought + text) for gold, text in ANSWERS[kind]]


def measure(config: VerifierConfig, asked: Sequence[tuple[Prompt, str]], rounds: int, outcome: str) -> Row:
    """Verdicts a second, median of the rounds after a first one. ValueError: one has another outcome."""
    pool, rates = VerifierPool(config), []

    async def judge() -> None:
        for _ in range(1 + rounds):
            start = time.perf_counter()
            verdicts = await asyncio.gather(*(pool.score(*case) for case in asked))
            rates.append(len(asked) / (time.perf_counter() - start))
            if wrong := {v.outcome for v in verdicts} - {outcome} if outcome else None:
                raise ValueError(f"outcomes {wrong}, expected {outcome}")

    try:
        asyncio.run(judge())
    finally:
        pool.close()
    return {"per_s": statistics.median(rates[1:])}


def cases(options: Namespace) -> Iterator[Case]:
    """Every kind of answer, and every kind of program."""
    for kind in (*ANSWERS, "reasoning_gym"):
        asked = (ordinary(kind) * ROUND)[:ROUND]
        config = VerifierConfig(kind=kind, workers=options.workers, timeout_s=60.0)
        yield kind, partial(measure, config, asked, ROUNDS, "")
    code = CodeConfig(sandbox="bubblewrap")
    config = VerifierConfig(kind="code", workers=options.workers, timeout_s=60.0, code=code)
    for name, (completion, tests, outcome) in PROGRAMS.items():
        prompt = Prompt("0", "q", (1,), json.dumps(tests), {})
        yield f"code: {name}", partial(measure, config, [(prompt, completion)] * options.programs, 1, outcome)


def describe(head: Row, rows: Sequence[Row]) -> str:
    """One line for each kind."""
    lines = [[row["case"], f"{row['per_s']:,.0f}"] for row in rows]
    return f"{head['options']['workers']} workers\n" + table(("kind", "verdicts/s"), lines)
