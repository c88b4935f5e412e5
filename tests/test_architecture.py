"""Promises of docs/architecture.md: who may import whom, no import cycles, a small house, plain words."""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROCESSES = {"launcher", "controller", "engines", "learner"}
FOLDERS = PROCESSES | {"verifiers", "environments", "models", "accounting", "scaling", "sweep", "evaluate"}
FOLDERS |= {"serve", "view"}
SHARED = {"config"}  # a folder that counts as a module at the top of trainer/
# What each folder may import besides itself; `shared` means the modules at the top of trainer/.
MAY_IMPORT = {
    "kernels": set[str](),
    "shared": {"kernels"},  # its table of objectives, which is imported without torch
    "models": {"shared"},
    "verifiers": {"shared"},
    "environments": {"shared", "verifiers"},  # its processes are forked as a scorer's are
    "accounting": {"shared"},
    "scaling": {"shared", "accounting"},
    "engines": {"shared", "models"},
    "learner": {"shared", "accounting", "models", "kernels"},
    "controller": {"shared", "engines", "verifiers", "environments", "kernels"},
    "launcher": {"shared", "accounting", "models", "scaling", "kernels"},  # a chunk's size, without torch
    "sweep": {"shared", "accounting", "scaling"},  # it starts `python -m trainer.main`, imports none of it
    "evaluate": {"shared", "accounting", "scaling", "models", "launcher"},
    "serve": {"shared", "engines", "models", "controller", "evaluate"},  # evaluate's reading of RUN@STEP
    "view": {"shared", "controller", "scaling"},  # the journal's tokens; the report's charts
}
# The command line checks and explains the kinds of verifiers, which the registry knows.
MAY_IMPORT_TOO = {"trainer.cli": {"verifiers"}}
# They connect the folders, and no other module imports them.
COMMANDS = {
    "trainer.main", "trainer.__main__", "trainer.beginning", "trainer.doctor", "trainer.evaluate.__main__",
    "trainer.serve.__main__", "trainer.view.__main__",
}  # fmt: skip


# Code lines (without blanks, comments and docstrings) that a folder may have; `trainer` means its top and
# config/. They only fall. A feature that needs room says in its commit how many lines it costs, and raises
# its folder by that.
CEILINGS = {
    "kernels": 3_570,
    "trainer": 2_289,
    "controller": 3_064,
    "engines": 1_773,
    "launcher": 2_090,
    "accounting": 400,
    "learner": 2_475,
    "models": 403,
    "environments": 646,
    "verifiers": 1_474,
    "sweep": 901,
    "scaling": 6_526,
    "evaluate": 525,
    "view": 782,
    "serve": 561,
    "bench": 4_740,
    "tests": 32_495,
}
# Module-level numbers (3 of `inference`: resamples, cells, rows; 3 of curve/axis.py); the longest chain of
# imports.
SCALING_CONSTANTS, SCALING_FLOORS = 66, 8  # the 8th: `allocate` on the frontier on `compare`


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def modules(*packages: str) -> dict[str, Path]:
    """Every module of these packages, by its dotted name."""
    paths = {}
    for path in sorted(p for package in packages for p in (ROOT / package).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        paths[name.removesuffix(".__init__")] = path
    return paths


@cache
def import_statements(path: Path, everywhere: bool) -> list[ast.Import | ast.ImportFrom]:
    tree = tree_of(path)
    nodes = ast.walk(tree) if everywhere else tree.body
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


def imports(name: str, path: Path, known: dict[str, Path], everywhere: bool = True) -> Iterator[str]:
    """The known modules that a module imports; `everywhere` includes imports inside functions."""
    for node in import_statements(path, everywhere):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif node.module in known:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else node.module


def graph_of(known: dict[str, Path]) -> dict[str, set[str]]:
    """What each module imports when it is imported."""
    return {name: set(imports(name, path, known, everywhere=False)) - {name} for name, path in known.items()}


def folder(module: str) -> str:
    """The folder of a module: a key of MAY_IMPORT."""
    package, *rest = module.split(".")
    return package if package != "trainer" else rest[0] if rest and rest[0] in FOLDERS else "shared"


def test_each_process_has_a_folder_and_few_modules_are_shared() -> None:
    top = ROOT / "trainer"
    assert {p.parent.name for p in top.glob("*/__init__.py")} == FOLDERS | SHARED
    assert len(list(top.glob("*.py"))) <= 15


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
    list(TopologicalSorter(graph_of(known)).static_order())  # CycleError names the circle


def test_no_module_has_over_400_lines_and_no_function_over_60() -> None:
    long = []
    for module, path in modules("kernels", "trainer", "bench").items():
        lines = len(path.read_text().splitlines())
        long += [f"{module}: {lines}"] * (lines > 400)
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                long += [f"{module}.{node.name}: {lines}"] * (lines > 60)
    assert not long


def tracked(*folders: str) -> list[Path]:
    """The Python files of these folders that git knows."""
    command = ["git", "ls-files", *(f"{folder}/*.py" for folder in folders)]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in sorted({*names.splitlines()}) if (ROOT / name).exists()]


def code_length(path: Path) -> int:
    """Lines without blanks, comments and docstrings."""
    bodies = (getattr(node, "body", None) for node in ast.walk(tree_of(path)))
    statements = (s for body in bodies if isinstance(body, list) for s in body if isinstance(s, ast.Expr))
    documented: set[int] = set()
    for s in statements:
        if isinstance(s.value, ast.Constant) and isinstance(s.value.value, str):
            documented.update(range(s.lineno, (s.end_lineno or 0) + 1))
    skipped = {getattr(tokenize, x) for x in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - documented)


def lines_by_folder() -> dict[str, int]:
    """Code lines of each key of CEILINGS."""
    lines = dict.fromkeys(CEILINGS, 0)
    for path in tracked("kernels", "trainer", "bench", "tests"):
        top, *inner = path.relative_to(ROOT).parts
        lines[inner[0] if top == "trainer" and inner[0] in FOLDERS else top] += code_length(path)
    return lines


def test_each_folder_keeps_its_ceiling() -> None:
    over = {name: (n, CEILINGS[name]) for name, n in lines_by_folder().items() if n > CEILINGS[name]}
    assert not over, "folder: (code lines, ceiling)"


def numbers(path: Path) -> Iterator[str]:
    """The module's constants in capitals that are a number, or a sequence with one."""
    for node in tree_of(path).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [t.id for t in targets if isinstance(t, ast.Name) and t.id.isupper()]
        value = node.value if names and isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Constant | ast.Tuple | ast.List | ast.BinOp | ast.UnaryOp):
            parts = (p.value for p in ast.walk(value) if isinstance(p, ast.Constant))
            yield from names if any(type(x) in (int, float) for x in parts) else []


def test_the_curve_has_few_numbers_and_floors() -> None:
    known = modules("trainer/scaling")
    assert sum(len(list(numbers(p))) for p in known.values()) <= SCALING_CONSTANTS
    graph = graph_of(known)
    floors: dict[str, int] = {}
    for name in TopologicalSorter(graph).static_order():
        floors[name] = 1 + max((floors[other] for other in graph[name]), default=0)
    assert max(floors.values()) <= SCALING_FLOORS, max(floors, key=lambda name: floors[name])


@pytest.mark.parametrize("package", ["kernels", "trainer", "bench"])
def test_the_words_are_the_fields(package: str) -> None:
    banned = re.compile(
        r"\b(told|foreseen|foretold|foretell|nursery|WORTH|NOTHING|VAGUE|IDLE|Outlook|_make_good"
        r"|logp_gen|gen_logprobs)\b"  # the generator's log-probs have one name: logprobs_gen
    )
    sources = [p for p in (ROOT / package).rglob("*") if p.suffix in (".py", ".cpp", ".hpp", ".js", ".html")]
    assert not [f"{p}: {line}" for p in sources for line in p.read_text().splitlines() if banned.search(line)]


def test_a_docstring_stands_without_its_name_and_a_variable_is_a_noun() -> None:
    """Subject and verb first; `at` and `left` stay where they are public, or one side of a product."""
    bare = re.compile(r"(What|Whether|How|Of|As|In|By|Not|Where|When|Which|Why|For|With|From)\b")
    participles = {"found", "given", "made", "held", "kept", "begun", "theirs", "own", "of", "freedom"}
    wrong = []
    for name, path in modules("kernels", "trainer", "bench").items():
        for node in ast.walk(tree_of(path)):
            word = ""
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                wrong += [f"{name}: {text}"] * bool(bare.match(text))
            elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                word = node.id
            elif isinstance(node, ast.arg):
                word = node.arg
            wrong += [f"{name}: {word}"] * (word in participles)
    assert not wrong
