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
    # 95 the derivative of linear_logprob, 113 the adapters, 55 shards and autocast, 224 the losses of 2026,
    # 62 the distillation from a teacher's top-k, 27 what a review found wrong in them, 46 FP16 on Triton and
    # the distillation over shards, 36 chunks by memory and gradients that are not copied
    # 202 the fused epilogue in QuACK's GEMM
    # 20 checks of what a stranger tried
    "kernels": 3_485,
    # 60 of them beginning.py; 24 who comes after whom, 13 recipe `own` and model.dtype auto, 9 help, dry run
    # 20 supervised fine-tuning, 9 a teacher
    # 6 LoRA; 20 supervised fine-tuning, 9 a teacher, 3 log-probs of prompts, 1 an environment's interpreter
    # 17 a teacher behind a URL
    # 19 forward KL over a teacher's top-k
    # 8 one card
    # 15 `view`, 2 Trackio
    # 6 positions, resuming from; 4 where turns begin and end, what an engine waits for,
    # 47 one command; 5 experts
    # 13 the split that a run had
    # 7 `| head` ends it, a key without dashes; 3 a dry run without vLLM; 4 --version
    # 13 the signals that stop a run or a sweep, and the error line of every command: 50 fewer elsewhere
    # 2 docs of options parsed once
    "trainer": 2_289,  # 2 host; 5 options in bash; 1 no free memory known; 3 no split that memory refuses
    # 236 data sets of the hub, bad rows; 84 evaluation without a learner; 92 data; 54 supervised fine-tuning,
    # 3 lengths of its completions, 8 a teacher
    # 3 a dry run of an interpreter
    # 138 a teacher behind a URL: its answers checked, in batch and journal
    # 33 what the learner said of tokens, in the journal
    # 6 a dry run of a scorer; 1 which turn is the last, 101 turns in the journal; 25 experts, a file
    # 57 unnamed labels, CSV and JSON files, the first prompt of a dry run, the share that would skip bad rows
    # 17 labels that an answer is not, rows and columns of CSV that run together
    "controller": 3_058,
    # 32 keys of turns that are computed again, 26 the state `tools`
    "engines": 1_773,  # 34 log-probs of prompts; 12 weights of a folder; 3 sliding windows; 35 experts
    # 5 vLLM 0.33
    # 2 the end of a replay, 16 engines without a learner; 15 a value network, model.dtype auto; 1 supervised,
    # 2 a teacher
    # 36 what was odd and what next
    # 123 what fits one card, 10 several
    # 40 trackers: Trackio
    # 8 what was computed until each evaluation, and the rest of the run at the rate ahead
    # 7 a resumed run goes on in its run of W&B
    # 8 wrong answers alone
    # 13 rewards with grades, positions; 26 LoRA; 2 the entry of the HTTP server; 5 episodes,
    # 9 steps without a signal
    # 38 another recipe on data of one's own, answers that nobody could read, short runs
    # 8 a solved run, what another recipe must keep, RL from before a fall
    # 3 a killed controller is named
    "launcher": 2_090,  # 18 a fallen run goes on more slowly, another recipe; 8 bounds; 4 its cause
    # 29 the fastest split, turns where none fits, shorter completions; 5 the loss's rows by free memory
    # 8 recomputation in the rates, a split as before
    "accounting": 400,  # 7 shut-down; 4 LoRA; 10 active experts; 3 a teacher
    # 151 LoRA; 37 sliding windows, 6 the value network's rate, active experts; 19 a teacher
    # 46 forward KL over a teacher's top-k
    # 3 a first push that fails
    "learner": 2_463,  # 17 newest transformers and vLLM; 9 each token's ratio and entropy; 54 experts
    "models": 403,  # 141 LoRA's files, merge; 14 their sums for vLLM, a base of several files; 52 experts
    # 173 verifiers, 28 OpenEnv, 23 skyrl-gym, 3 what processes share, 6 which call a reply answers
    "environments": 644,
    # 29 the HTTP client that a judge and a teacher share
    # 2 a column called choices
    "verifiers": 1_472,  # 2 Linux alone; 8 what a worker has started ends with it, 8 an import that hangs
    # 3 a fork server for environments, too; 16 its interpreter
    # 54 a sweep goes on from kept curves
    # 2 a sweep that came first
    "sweep": 901,  # 3 empty cells; 81 axes; 1 dtype of kept curves; 15 two recipes that are the same run
    # 97 the frontier over an axis, 29 evaluations of a run, 14 episodes turn by turn,
    # 138 tables of any shape, consoles and notebooks, 97 the files of Trackio and W&B
    # 118 forecasts on FLOPs where a device-hour was not always the same work, 179 `allocate`
    # 22 resumed W&B runs, damaged files of trackers
    # 37 all options that a log needs at once, 8 fallen runs of --like, 126 tasks and difficulty,
    # 16 the error of what is still gained, 8 lines of steps, 3 many rewards at once
    "scaling": 6_491,  # 3 a CSV without a header; 9 values that fell; 3 the level of a flat run; 3 pace
    "evaluate": 525,
    "view": 782,  # the page of runs while they train; 49 curves in a process; 30 held-out answers
    "serve": 561,  # an HTTP server over the engine pool; 93 scores by a command
    # 98 forecasts where the rate drifts, 61 frontiers with a known answer, 98 pictures
    # 174 laws of the literature, 92 view beside a training, 12 the error of a gain
    "bench": 4_740,  # 16 sources as shipped; 1 free memory; 6 LoRA; 22 faults of other runs; 8 QuACK
    # 78 pictures and the story
    # 56 damaged logs, 25 a resumed run of W&B, 10 options at once, 18 fallen runs of --like
    # 221 QuACK's GEMM run from PTX; 96 laws of the literature, the rate ahead
    # 37 what a stranger tried of the loss, DDP; 41 the end of a fallen run, Linux alone
    # 37 what a stranger tried of the loss, DDP
    # 45 what runs on which cards
    # 90 a newcomer's three files
    # 70 a review of data files, what next and warnings
    # 17 generators and verdicts, in the place of a suite of 42 lines in bench
    # 51 logs of strangers: dicts after bars, what cells print, lines of slime and prime-rl,
    # 44 what a review of these found, 35 promises that no test noticed
    "tests": 32_114,  # 181 vLLM's sources; 1,490 kernels run from PTX, 110 notebooks, 134 trackers
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
    return [ROOT / name for name in names.splitlines() if (ROOT / name).exists()]


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
