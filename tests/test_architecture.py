"""Promises of docs/architecture.md: who may import whom, no import cycles, no long modules, plain words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROCESSES = {"launcher", "controller", "engines", "learner"}
FOLDERS = PROCESSES | {"verifiers", "models", "accounting", "scaling", "sweep"}
SHARED = {"config"}  # a folder that counts as a module at the top of trainer/
# What each folder may import besides itself; `shared` means the modules at the top of trainer/.
MAY_IMPORT = {
    "kernels": set[str](),
    "shared": set[str](),
    "models": {"shared"},
    "verifiers": {"shared"},
    "accounting": {"shared"},
    "scaling": {"shared", "accounting"},
    "engines": {"shared", "models"},
    "learner": {"shared", "accounting", "models", "kernels"},
    "controller": {"shared", "engines", "verifiers", "kernels"},
    "launcher": {"shared", "accounting", "models", "scaling"},
    "sweep": {"shared", "scaling"},  # it starts `python -m trainer.main`, and imports none of it
}
# The command line checks and explains the kinds of verifiers, which the registry knows.
MAY_IMPORT_TOO = {"trainer.cli": {"verifiers"}}
COMMANDS = {"trainer.main", "trainer.doctor"}  # they connect the folders, and no module imports them


@cache
def modules(*packages: str) -> dict[str, Path]:
    """Every module of these packages, by its dotted name."""
    paths = {}
    for path in sorted(p for package in packages for p in (ROOT / package).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        paths[name.removesuffix(".__init__")] = path
    return paths


def imports(name: str, path: Path, known: dict[str, Path], everywhere: bool = True) -> Iterator[str]:
    """The known modules that a module imports; `everywhere` includes imports inside functions."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if everywhere else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else node.module


def folder(module: str) -> str:
    """The folder of a module: a key of MAY_IMPORT."""
    package, *rest = module.split(".")
    return package if package != "trainer" else rest[0] if rest and rest[0] in FOLDERS else "shared"


def test_each_process_has_a_folder_and_few_modules_are_shared() -> None:
    top = ROOT / "trainer"
    assert {p.parent.name for p in top.glob("*/__init__.py")} == FOLDERS | SHARED
    assert len(list(top.glob("*.py"))) <= 13


def test_no_folder_imports_what_it_must_not() -> None:
    known = modules("kernels", "trainer", "bench")
    wrong = [
        f"{name} imports {other}"
        for name, path in modules("kernels", "trainer").items()
        if name not in COMMANDS
        for other in imports(name, path, known)
        if folder(other) not in MAY_IMPORT[folder(name)] | MAY_IMPORT_TOO.get(name, set()) | {folder(name)}
        or other in COMMANDS
    ]
    assert not wrong


def test_no_imports_form_a_cycle() -> None:
    known = modules("kernels", "trainer", "bench")
    graph = {name: set(imports(name, path, known, everywhere=False)) - {name} for name, path in known.items()}
    list(TopologicalSorter(graph).static_order())  # CycleError names the circle


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Each function's name and its number of lines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or 0) - node.lineno + 1


def test_no_module_has_over_400_lines_and_no_function_over_60() -> None:
    long = [f"{m}: {n}" for m, p in modules("kernels", "trainer", "bench").items() if (n := length(p)) > 400]
    for module, path in modules("kernels", "trainer", "bench").items():
        long += [f"{module}.{name}: {n}" for name, n in functions(path) if n > 60]
    assert not long


def length(path: Path) -> int:
    return len(path.read_text().splitlines())


def code_length(path: Path) -> int:
    """Lines without blanks, comments and docstrings."""
    text = path.read_text()
    docstrings = [
        range(node.lineno, (node.end_lineno or 0) + 1)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    documented = {number for lines in docstrings for number in lines}
    lines = enumerate(text.splitlines(), 1)
    return sum(bool(x.strip()) and not x.strip().startswith("#") and i not in documented for i, x in lines)


def test_kernels_and_trainer_stay_small() -> None:
    paths = modules("kernels", "trainer").values()
    assert sum(map(length, paths)) <= 29_560  # 130 for the registry of verifier kinds
    assert sum(map(code_length, paths)) <= 21_300


@pytest.mark.parametrize("package", ["kernels", "trainer", "bench"])
def test_the_words_are_the_fields(package: str) -> None:
    banned = re.compile(
        r"\b(told|foreseen|foretold|foretell|nursery|WORTH|NOTHING|VAGUE|IDLE|Outlook|_make_good)\b"
    )
    sources = [p for p in (ROOT / package).rglob("*") if p.suffix in (".py", ".cpp", ".hpp", ".js", ".html")]
    assert not [f"{p}: {line}" for p in sources for line in p.read_text().splitlines() if banned.search(line)]


def test_the_generators_log_probs_have_one_name() -> None:
    other = re.compile(r"\b(logp_gen|gen_logprobs)\b")
    sources = [p for p in modules("kernels", "trainer", "bench").values() if other.search(p.read_text())]
    assert not sources
