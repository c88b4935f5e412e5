"""Ordinary answers a second that the verifiers judge with two workers; bench.verifiers measures programs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from trainer.config import VerifierConfig
from trainer.types import Prompt
from trainer.verifiers.kinds.reasoning_gym import generate
from trainer.verifiers.pool import VerifierPool

ROUND = 300  # answers
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


@pytest.mark.parametrize("kind", [*ANSWERS, "reasoning_gym"])
def test_ordinary_answers(benchmark: Any, kind: str) -> None:
    """A round of answers that are asked for at once; the record has the median `checks_per_s`."""
    cases, loop = ordinary(kind), asyncio.Runner()
    asked = (cases * ROUND)[:ROUND]
    pool = VerifierPool(VerifierConfig(kind=kind, workers=2, timeout_s=60.0))

    async def judge() -> int:
        return len(await asyncio.gather(*(pool.score(*case) for case in asked)))

    assert benchmark.pedantic(lambda: loop.run(judge()), rounds=7, warmup_rounds=1) == ROUND
    pool.close()
    loop.close()
    if benchmark.enabled:
        benchmark.extra_info["checks_per_s"] = ROUND / benchmark.stats.stats.median
