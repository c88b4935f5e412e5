"""Answers made to break the verifiers: none is believed, executed, or waited for beyond its deadline.

`python -m bench.faults.answers` does the same with 20,000 generated answers of each kind.
"""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest
import reasoning_gym as library

from bench.faults import answers
from bench.faults.hostile_answers import TEXTS
from trainer.config import VerifierConfig
from trainer.types import Prompt
from trainer.verifiers import number
from trainer.verifiers.kinds import judge_quick
from trainer.verifiers.pool import VerifierPool
from trainer.verifiers.reasoning_gym import EXECUTED

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
QUICK = ("number", "exact", "choice", "math, a number", "judge", "own function")
SLOW = ("math, an expression", "reasoning_gym", "code, standard input", "code, calls")
CASES = answers.cases()


def check(name: str, every: int, count: int) -> None:
    case = CASES[name]
    asked = list(answers.texts(case, count, seed=1))
    hostile = [item for item in asked if not item[0]][::every]
    right = [item for item in asked if item[0]][: 20 * every]
    result = asyncio.run(answers.run(case, hostile + right))
    assert not result.wrong
    assert result.right == len(right) and sum(result.outcomes.values()) == len(hostile)


def test_the_list_written_by_hand_is_long() -> None:
    assert len(set(TEXTS)) >= 400 and set(CASES) == {*QUICK, *SLOW}


@pytest.mark.parametrize("name", QUICK)
def test_no_hostile_answer_breaks_a_comparison(name: str) -> None:
    check(name, 1, 2000)


@pytest.mark.parametrize("name", SLOW)
def test_no_hostile_answer_breaks_a_worker_or_a_sandbox(name: str) -> None:
    check(name, 29, 400)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_none_of_the_list_breaks_a_worker_or_a_sandbox(name: str) -> None:
    check(name, 1, 1000)


@pytest.mark.parametrize("marks", ["\u0301" * 100_000 + "\u0327" * 100_000, "\uff9e\uff9f" * 100_000])
@pytest.mark.parametrize("kind", ["exact", "number", "math"])
def test_combining_marks_do_not_take_quadratic_time(
    kind: str, marks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100,000 take 20 s to normalise, in which nothing else in the controller would run."""
    normalize = number.unicodedata.normalize
    longest = []

    def measured(form: str, text: str) -> str:
        runs = re.findall("[\u0301\u0327\uff9e\uff9f]+", text)
        longest.append(max(map(len, runs), default=0))
        return normalize(form, text) if longest[-1] <= number.MAX_MARKS else text

    number._marks()
    monkeypatch.setattr(number.unicodedata, "normalize", measured)
    judge_quick(kind, "a" + marks, "Ko\u0308nigsberg")
    assert max(longest, default=0) <= number.MAX_MARKS


def test_marks_of_an_ordinary_text_stay() -> None:
    text = "a\u0301" * 400
    assert number.fold(text) == "\u00e1" * 400


def test_a_long_answer_is_not_kept_in_a_cache() -> None:
    before = number._literal_number.cache_info().currsize
    assert judge_quick("number", "9" * 100_000, "7") is not None
    assert number._literal_number.cache_info().currsize <= before + 1  # the gold answer


def test_the_list_of_scorers_that_execute_text_is_complete() -> None:
    evaluates = re.compile(r"\b(?:eval|(?:sympy|sp)\.parse_expr|(?<!def )parse_expr|exec|sympify)\(")
    found = set()
    for path in Path(library.__file__).parent.rglob("*.py"):
        source = path.read_text()
        scorer = source.partition("def score_answer")[2].partition("\nclass ")[0]
        if evaluates.search(scorer) and "propositional_logic" not in path.name:  # its own parse_expr
            found.add(path.stem)
    assert found == set(EXECUTED) | {"number_sorting"}  # of which the gold answer is evaluated


REFUSED = {  # task -> texts that its scorer would accept for any item, or execute
    "puzzle24": ["6*4*1*1", "24 + 0*1*1*1", "ord('\\x18') + 0*1*2*3"],
    "countdown": ["17 or 3", "len('aaa')", "().__class__", "[1][0]", "print(1)"],
    "simple_integration": ["Integral(f, x)", "x + O(1)", "(O)(x)", "N(x)", "(sin)(x)", "Symbol('x')"],
    "intermediate_integration": ["Integral(f, x)"],
    "polynomial_multiplication": ["expand((x+1)*(x+2))", "(x+1)(x+2)"],
    "game_of_life_halting": ["0", "yes", "True or False", "[]"],
    "coin_flip": ["0", "0.", "1e-9", "-0", "00", "nan"],
    "complex_arithmetic": ["nan", "NaN", "infj", "nan + nani"],
    "spiral_matrix": ["[i for i in range(9)]", "open('x')", "().x"],
}


def test_reasoning_gyms_lenient_scorers_believe_no_constant_answer_and_still_accept_the_right_one() -> None:
    pool = VerifierPool(VerifierConfig(kind="reasoning_gym", workers=2, timeout_s=30.0))

    async def outcome(prompt: Prompt, text: str) -> str:
        return (await pool.verify(text, prompt.answer, prompt.metadata)).outcome

    async def ask() -> None:
        for task in dict.fromkeys([*EXECUTED, *REFUSED]):
            for prompt in answers.items(task)[:4]:
                if prompt.answer == "0" or "Integral" in prompt.answer:
                    continue
                # reasoning-gym makes puzzles whose own answer does not use all four numbers
                if task != "puzzle24" or len(re.findall(r"\d+", str(prompt.answer))) == 4:
                    assert await outcome(prompt, f"<answer>{prompt.answer}</answer>") == "correct", (
                        prompt.answer
                    )
                for text in REFUSED.get(task, ()):
                    assert await outcome(prompt, f"<answer>{text}</answer>") != "correct", (task, text)

    asyncio.run(ask())
    pool.close()
