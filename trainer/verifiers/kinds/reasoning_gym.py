"""Kind `reasoning_gym`: a task's own scorer. `generate` makes its items in a subprocess.

The controller generates and encodes the items; the worker that scores them decodes: several scorers
distinguish tuples from lists, which JSON does not. Several tasks draw from Python sets, so their items depend
on the interpreter's hash seed: the subprocess sets it to 0, for the same items in every run.

`may_be_scored` keeps from reasoning-gym 0.1.25's scorers what they must not get: nine execute the text with
eval, and four of all give full marks to some answer that is wrong for every item.
"""

import dataclasses
import difflib
import importlib
import json
import os
import re
import subprocess
import sys
from fractions import Fraction
from typing import Any

from trainer.config import ConfigError
from trainer.types import CORRECT, UNPARSABLE, WRONG, Prompt, Verdict
from trainer.verifiers.code_runner import decode, encode
from trainer.verifiers.text import answer_part
from trainer.verifiers.verifier import Verifier

DEADLINE_S = 600.0
# Scorers that execute the text. No call and no attribute is possible in what these patterns accept, but
# elementary functions of an expression: Integral(f, x) is no integral, expand((x+1)*(x+2)) no product.
_EXPRESSION = re.compile(
    r"(?:\d+(?:\.\d+)?(?![\w(])|[A-Za-z](?!\w|\s*\()|pi\b|[\s+*/^-]|\(|\)(?!\s*\()"
    r"|(?:a?(?:sin|cos|tan)h?|cot|sec|csc|exp|log|ln|sqrt|Abs)(?=\())*",
    re.ASCII,
)
_LIST = re.compile(r"[\w\s,\[\]'\"-]*", re.ASCII)
EXECUTED = dict.fromkeys(
    ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), _LIST
) | dict.fromkeys(
    ("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"),
    _EXPRESSION,
)
# Arithmetic, and words without brackets, dots or underscores: they can neither call nor change anything.
_INERT = re.compile(r"[0-9\s+*/^().,%$-]*|[A-Za-z0-9\s+*/^,;!?'%$-]*")
_tasks: dict[str, Any] = {}  # a worker makes each task object once


class ReasoningGym(Verifier, kind="reasoning_gym"):
    """The verdict of the task's own scorer, but for constant answers."""

    def problem(self, prompt: Prompt) -> str:
        return "" if "origin" in prompt.metadata else " of another source; use math or exact"

    def compare(self, completion: str, answer: str, metadata: dict[str, Any]) -> Verdict | None:
        text = tagged(completion)
        if text and text == answer:
            return CORRECT
        return None if text and len(text) <= max(500, 4 * len(answer)) else UNPARSABLE

    def load(self) -> None:
        importlib.import_module("reasoning_gym")

    def slow(self, completion: str, answer: str, metadata: dict[str, Any]) -> Verdict:
        """The task's own scorer. Partial scores count as wrong: some scorers give .01 to any text."""
        import reasoning_gym

        origin = metadata["origin"]
        key = repr(origin)
        if key not in _tasks:
            _tasks[key] = reasoning_gym.create_dataset(origin["task"], **origin["arguments"])
        item = decode({name: metadata[name] for name in ("question", "answer", "metadata")}, str)
        text = tagged(completion)
        if not may_be_scored(origin["task"], text, item):
            return UNPARSABLE
        return CORRECT if _tasks[key].score_answer(answer=text, entry=item) >= 1.0 else WRONG

    def may_execute(self, completion: str) -> bool:
        return not _INERT.fullmatch(tagged(completion))

    def vote(self, completion: str, prompt: Prompt) -> str | None:
        return tagged(completion) or None


def tagged(completion: str) -> str:
    """The content of the last <answer> tag after the thinking, or else all text after the thinking."""
    part = answer_part(completion)
    _, tag, text = part.rpartition("<answer>")
    return (text.partition("</answer>")[0] if tag else part).strip()


def generate(task: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """All items of the task, encoded. `arguments`: the task's options with seed and size."""
    paths = os.pathsep.join(os.path.abspath(p) for p in sys.path)
    try:
        process = subprocess.run(
            [sys.executable, "-m", __name__, task, json.dumps(arguments)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=DEADLINE_S,
            env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired as e:
        raise ConfigError(f"reasoning_gym:{task} took over {DEADLINE_S:g} s; lower data.size") from e
    if process.returncode:
        lines = process.stderr.decode(errors="replace").strip().splitlines() or [f"exit {process.returncode}"]
        raise ConfigError(f"reasoning_gym:{task} with {arguments} cannot be generated: {lines[-1]}")
    items: list[dict[str, Any]] = json.loads(process.stdout)
    return items


def may_be_scored(task: str, answer: str, item: dict[str, Any]) -> bool:
    """True if the task's scorer may get this text; only in a worker, since a number in it may be enormous."""
    if (pattern := EXECUTED.get(task)) and not pattern.fullmatch(answer):
        return False
    if task == "puzzle24":  # the scorer accepts any numbers, and what rounds down to 24
        from sympy import parse_expr

        numbers = sorted(map(int, re.findall(r"\d+", answer)))
        return numbers == sorted(item["metadata"]["numbers"]) and parse_expr(answer) == 24
    if task == "game_of_life_halting":  # the scorer compares whether both texts are empty
        return answer.casefold() == item["answer"].casefold()
    if task == "coin_flip":  # the scorer accepts the first digit, and 0 for a small probability
        gold = Fraction(item["answer"])
        return abs(Fraction(answer) - gold) <= min(Fraction(1, 10_000), gold / 100)
    return task != "complex_arithmetic" or "n" not in answer.lower()  # the scorer accepts nan


def _items(task: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """The items, in the subprocess; SystemExit with a line for the user if there can be none."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        sys.exit("the package is missing: pip install 'reasoning-gym==0.1.25'")
    if task not in DATASETS:
        close = ", ".join(difflib.get_close_matches(task, DATASETS, n=3)) or "basic_arithmetic, gsm_symbolic"
        sys.exit(f"reasoning-gym has no such task; similar names: {close}")
    try:
        dataset = reasoning_gym.create_dataset(task, **arguments)
    except (TypeError, AssertionError, ValueError) as e:
        known = ", ".join(f.name for f in dataclasses.fields(DATASETS[task][1]))
        sys.exit(f"data.options: {e}; it takes {known}")
    return [encode(item, str) for item in dataset]


if __name__ == "__main__":
    json.dump(_items(sys.argv[1], json.loads(sys.argv[2])), sys.stdout)
