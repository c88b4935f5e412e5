"""Do the tests notice a wrong program? `make mutants` tells; `python tests/mutants.py --help`.

A mutant is the product with one operator, number or condition changed. On each run the tests that the
coverage data name for its line, the quickest first. Of a line that only other processes run, the tests that
mirror its module do. A mutant is killed if one of them fails or hangs. The sample is random: its share has a
standard error: sqrt(p (1 - p) / n). Results are appended to build/mutants.jsonl, and a second call goes on
from there. Before, `make coverage` writes the data that name the tests, and their durations.
"""

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 90  # for the tests of one mutant; a test that needs longer counts as hanging
MAX_TESTS = 60  # of one mutant
COVERAGE, DURATIONS, RESULTS = (ROOT / p for p in (".coverage", "build/coverage.log", "build/mutants.jsonl"))
PAIRS: list[tuple[type[ast.AST], type[ast.AST]]] = [
    (ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq),
    (ast.And, ast.Or), (ast.Is, ast.IsNot), (ast.In, ast.NotIn),
]  # fmt: skip
SWAPS = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}
SWAPS |= dict.fromkeys((ast.FloorDiv, ast.Mod, ast.Pow), ast.Mult)


class Mutant(NamedTuple):
    path: str
    line: int
    number: int  # of the place in its module
    text: str  # the source line


def changes(tree: ast.Module) -> list[tuple[int, Callable[[], None]]]:
    """Line and change of every operator, number and condition inside functions, in the order of ast.walk."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    nodes = {id(n): n for f in functions for statement in f.body for n in ast.walk(statement)}
    pairs = ((n.lineno, change(n)) for n in nodes.values() if isinstance(n, ast.expr | ast.stmt))
    return [(line, function) for line, function in pairs if function]


def change(node: ast.AST) -> Callable[[], None] | None:
    """What gives this place another operator, another number, or the condition's opposite."""
    match node:
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in SWAPS:
            return partial(setattr, node, "op", SWAPS[type(op)]())
        case ast.Compare(ops=[op, *others]) if type(op) in SWAPS:
            return partial(setattr, node, "ops", [SWAPS[type(op)](), *others])
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            return partial(setattr, node, "test", ast.UnaryOp(ast.Not(), test))
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return partial(setattr, node, "value", value * 2 or 1)
    return None


def sample(count: int, seed: int) -> list[Mutant]:
    """Random mutants of kernels/ and trainer/; nested functions count once."""
    mutants = set()
    for path in sorted(p for folder in ("kernels", "trainer") for p in (ROOT / folder).rglob("*.py")):
        name, text = str(path.relative_to(ROOT)), path.read_text()
        for number, (line, _) in enumerate(changes(ast.parse(text))):
            mutants.add(Mutant(name, line, number, text.splitlines()[line - 1].strip()))
    return random.Random(seed).sample(sorted(mutants), count)


def tests_of(
    mutant: Mutant, contexts: dict[str, dict[int, list[str]]], seconds: dict[str, float]
) -> list[str]:
    """The tests that run the line, the quickest first; else the files that mirror the module."""
    names = {c.rsplit("|", 1)[0] for c in contexts.get(mutant.path, {}).get(mutant.line, []) if c}
    if names:
        return sorted(names, key=lambda name: seconds.get(name, 0.0))[:MAX_TESTS]
    folder = ROOT / "tests" / Path(mutant.path).parent
    mirrors = sorted(folder.glob(f"test_*{Path(mutant.path).stem}*.py")) or sorted(folder.glob("test_*.py"))
    return [str(p.relative_to(ROOT)) for p in mirrors[:3]]


def run(copy: Path, tests: list[str]) -> int:
    """Run the tests in a fork of this process, which has the large packages loaded; 0 if all of them pass."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.chdir(copy)
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        sys.path.insert(0, str(copy))
        os.environ["PYTHONPATH"] = str(copy)
        import pytest

        quick = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", "--benchmark-disable"]
        os._exit(int(pytest.main([*quick, *tests])))
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return 1  # it hangs


def lines_of_tests() -> dict[str, dict[int, list[str]]]:
    """By module and line, the tests that ran it."""
    import coverage

    data = coverage.CoverageData(str(COVERAGE))
    data.read()
    contexts: dict[str, dict[int, list[str]]] = {}
    for file in data.measured_files():
        for top in ("/kernels/", "/trainer/"):
            if top in file and "/tests/" not in file:
                contexts[top[1:] + file.rsplit(top, 1)[1]] = data.contexts_by_lineno(file)
    return contexts


def durations_of_tests() -> dict[str, float]:
    """Seconds of each test, from the log that pytest wrote with --durations=0."""
    rows = [row.split() for row in DURATIONS.read_text().splitlines()]
    return {r[2]: float(r[0][:-1]) for r in rows if len(r) == 3 and r[0].endswith("s") and r[1] == "call"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="mutants (200)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (0)")
    arguments = parser.parse_args()
    import hypothesis  # noqa: F401  (loaded once, for every fork)
    import scipy.stats  # noqa: F401
    import torch  # noqa: F401
    import transformers  # noqa: F401

    contexts, seconds = lines_of_tests(), durations_of_tests()
    RESULTS.touch()
    done = {(r["path"], r["number"]): r for r in map(json.loads, RESULTS.read_text().splitlines())}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", str(copy)], cwd=ROOT, check=True)
        (copy / ".venv").symlink_to((ROOT / ".venv").resolve())
        for library in (ROOT / "kernels").glob("*.so"):
            shutil.copy(library, copy / "kernels")
        for mutant in sample(arguments.count, arguments.seed):
            if (mutant.path, mutant.number) not in done:
                result = try_mutant(copy, mutant, tests_of(mutant, contexts, seconds))
                done[mutant.path, mutant.number] = result
                with RESULTS.open("a") as out:
                    out.write(json.dumps(result) + "\n")
        subprocess.run(["git", "worktree", "remove", "--force", str(copy)], cwd=ROOT, check=True)
    killed, total = sum(r["killed"] for r in done.values()), len(done)
    error = (killed / total * (1 - killed / total) / total) ** 0.5
    print(f"{killed} of {total} mutants are killed: {killed / total:.3f} (standard error {error:.3f})")


def try_mutant(copy: Path, mutant: Mutant, tests: list[str]) -> dict[str, object]:
    """Change the copy, run the tests, and change it back."""
    source = (ROOT / mutant.path).read_text()
    tree = ast.parse(source)
    changes(tree)[mutant.number][1]()
    (copy / mutant.path).write_text(ast.unparse(tree))
    start = time.monotonic()
    code = run(copy, tests) if tests else 0
    (copy / mutant.path).write_text(source)
    result = {"killed": code in (1, 2), "code": code, "tests": len(tests)}
    return mutant._asdict() | result | {"seconds": round(time.monotonic() - start, 1)}


if __name__ == "__main__":
    main()
