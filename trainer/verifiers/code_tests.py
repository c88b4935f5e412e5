"""Kind `code`: the tests of an item as data sets have them, and whether outputs are the expected ones.

The answer column holds, as JSON text or as it is, one of
- {"inputs": [...], "outputs": [...]}, with "fn_name" if a function is to be called (APPS, TACO, DeepCoder);
- a list of {"input", "output"}, with "fn_name" or metadata.func_name, in each or in the column `metadata`
  (PrimeIntellect, LiveCodeBench);
- asserts, a text or a list: of MBPP (test_setup_code and test_imports, if columns, are executed first), or
  HumanEval's `check(candidate)` (with the columns entry_point, and prompt: code in front of the program).
"""

import json
import math
import re
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from itertools import zip_longest
from typing import Any

from trainer.types import Answer
from trainer.verifiers.text import answer_part

_BLOCK = re.compile(r"```(?:python3?|py)[ \t]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Tests:
    """The tests of one item."""

    calls: bool  # the program is called; else each case is a text on standard input, and the expected output
    cases: tuple[tuple[Any, Any], ...]  # what the runner gets, and what must come back
    prefix: str = ""  # code in front of the program


def program_of(completion: str) -> str:
    """The last ```python block after the thinking, else all text after it."""
    part = answer_part(completion)
    blocks = _BLOCK.findall(part)
    return str(blocks[-1]) if blocks else part


def parse_tests(answer: Answer, metadata: dict[str, Any]) -> Tests:
    """The tests of an item; LookupError, TypeError, ValueError or SyntaxError if they have no known form."""
    tests = list(answer) if isinstance(answer, tuple) else _from_json(answer)
    if isinstance(tests, dict):
        cases, name = list(zip(tests["inputs"], tests["outputs"], strict=True)), tests.get("fn_name")
    elif isinstance(tests, list) and isinstance(tests[0], dict):
        cases = [(test["input"], test["output"]) for test in tests]
        name = tests[0].get("fn_name") or _function_name(tests[0].get("metadata"), metadata.get("metadata"))
        if not name and tests[0].get("testtype") == "functional":
            raise ValueError("they call a function, but name none in metadata.func_name")
    else:
        return _asserts(_text(tests), metadata)
    if not cases:
        raise ValueError("there are none")
    return Tests(bool(name), tuple(_call(name, *c) if name else (_text(c[0]), _text(c[1])) for c in cases))


@lru_cache(64)  # a prompt's completions come together
def _from_json(text: str) -> Any:
    with suppress(ValueError):
        return json.loads(text)
    return text


def _function_name(*columns: Any) -> str | None:
    """The first func_name in columns that are records, or their JSON."""
    records = (_from_json(column) if isinstance(column, str) else column for column in columns)
    names = (record.get("func_name") for record in records if isinstance(record, dict))
    return next(filter(None, names), None)


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _call(name: str, arguments: Any, expected: Any) -> tuple[Any, Any]:
    if isinstance(arguments, str):  # LiveCodeBench: JSON, one argument a line
        arguments = [json.loads(line) for line in arguments.splitlines() if line.strip()]
        expected = json.loads(expected)
    return {"call": name, "arguments": arguments}, expected


def _asserts(code: str, metadata: dict[str, Any]) -> Tests:
    if "assert" not in code:
        raise ValueError("there are none")
    if entry := metadata.get("entry_point"):
        prefix = metadata.get("prompt", "")
        parts, entries = [prefix, f"{code}\ncheck({entry})"], [entry] if prefix else []
    else:
        setup = [_text(metadata.get(column) or "") for column in ("test_setup_code", "test_imports")]
        prefix, parts, entries = "", [*setup, code], []
    for part in parts:
        compile(part, "tests", "exec")  # the user's own data, and not executed here
    return Tests(True, (({"code": parts, "entry": entries}, True),), f"{prefix}\n")


def same_output(actual: str, expected: str) -> bool:
    """Compare token by token in each line: blanks around tokens and empty lines at the end do not count, and
    decimal numbers of one value are equal (`.50` and `0.5`)."""
    lines = zip_longest(actual.rstrip().splitlines(), expected.rstrip().splitlines(), fillvalue="")
    return all(a == b or _same_tokens(a.split(), b.split()) for a, b in lines)


def _same_tokens(actual: list[str], expected: list[str]) -> bool:
    with suppress(InvalidOperation):  # no number
        pairs = zip_longest(actual, expected, fillvalue="")
        return all(a == b or ("_" not in a and Decimal(a) == Decimal(b)) for a, b in pairs)
    return False


def same_result(actual: Any, expected: Any) -> bool:
    """Compare what a function returned with a value of JSON, or its only element (APPS, TACO: [value])."""
    wrapped = isinstance(expected, list) and len(expected) == 1
    return _same_value(actual, expected) or (wrapped and _same_value(actual, expected[0]))


def _same_value(actual: Any, expected: Any) -> bool:
    """Compare values of JSON; floats are equal to 9 digits."""
    if isinstance(actual, list) and isinstance(expected, list):
        return len(actual) == len(expected) and all(map(_same_value, actual, expected))
    if isinstance(actual, dict) and isinstance(expected, dict):
        return actual.keys() == expected.keys() and all(_same_value(actual[k], expected[k]) for k in expected)
    if isinstance(actual, float) and isinstance(expected, int | float):
        return math.isclose(actual, expected, rel_tol=1e-9)
    return bool(actual == expected)
