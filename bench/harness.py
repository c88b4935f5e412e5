"""Code shared by all benchmarks: options, the record that grows with each case, errors as lines, and tables.

A benchmark is a module with
    OPTIONS     name -> (default, meaning), and a third element for choices; a tuple as default: positional
    cases       options -> the name of each case, and the function that measures it and returns its row
    describe    head, rows -> the tables
and, if it has them,
    RECORD      the file in bench/results that --record writes; {option} stands for an option's value
    PARALLEL    true if its cases are simulations: they run on every core, one a core
    publish     head, rows -> nothing: writes the pages and pictures made from a record, with --record

A record is JSON lines: a head with command, options and machine, then a row for each case, written as soon as
it is measured. So a call that was interrupted goes on when it is repeated with the same --out. A case whose
function returns None leaves no row, and one that fails leaves a row that says why; it is tried again.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

from trainer.config import ConfigError
from trainer.jsonl import append, nan_to_null, open_to_append, read_lines

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PROGRESS_S = 5.0  # between two lines of progress
GROWING = ("runs", "rounds", "only", "processes", "against")  # a call with other values of them goes on
Row = dict[str, Any]
Case = tuple[str, Callable[[], Row | None]]


def parser(name: str, benchmark: ModuleType) -> argparse.ArgumentParser:
    """The parser of `python -m bench NAME`."""
    p = argparse.ArgumentParser(
        f"python -m bench {name}",
        description=benchmark.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options = dict(benchmark.OPTIONS)
    if hasattr(benchmark, "PARALLEL"):
        options["processes"] = (cores(), "cases at a time")
    for key, (default, text, *choices) in options.items():
        if isinstance(default, tuple):
            p.add_argument(key, nargs="*", help=text)
        elif isinstance(default, bool):
            p.add_argument(f"--{key.replace('_', '-')}", action="store_true", help=text)
        else:
            kind = str if default is None else type(default)
            shown = text if default in (None, "") else f"{text} ({default})"
            values = {"choices": choices[0]} if choices else {}
            p.add_argument(f"--{key.replace('_', '-')}", type=kind, default=default, help=shown, **values)
    p.add_argument("--out", type=Path, metavar="FILE", help="the record; what is in it is not measured again")
    p.add_argument("--record", action="store_true", help="write what is tracked: record, pages and pictures")
    p.add_argument("--table", type=Path, metavar="FILE", help="only print the tables of this record")
    return p


def run(name: str, benchmark: ModuleType, argv: Sequence[str]) -> int:
    """Measure what is missing, print the tables; 1 if a case has failed."""
    options = parser(name, benchmark).parse_args(argv)
    tracked = getattr(benchmark, "RECORD", None)
    path = options.out
    if options.record and tracked and path is None:
        path = RESULTS / tracked.format(**vars(options))
        path.unlink(missing_ok=True)
    try:
        check_numbers(benchmark, options)
        if options.table:
            head, rows = read(options.table)
        else:
            head, rows = new_head(name, argv, options), []
            if path and path.exists():
                head, rows = same(head, *read(path))
            rows = measure(benchmark, options, head, rows, path)
    except (ConfigError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    good = [row for row in rows if "error" not in row]
    if good:
        print(benchmark.describe(head, good))
    for row in rows:
        if "error" in row:
            print(f"{row['case']}: {row['error']}")
    if options.record and hasattr(benchmark, "publish"):
        benchmark.publish(head, good)
    return int(any(row.get("failed") for row in rows))


def check_numbers(benchmark: ModuleType, options: Namespace) -> None:
    """ConfigError for a number below 0, or for 0 where the default is a positive whole number."""
    for key, (default, *_) in benchmark.OPTIONS.items():
        if isinstance(default, int | float) and not isinstance(default, bool):
            least = 1 if isinstance(default, int) and default > 0 else 0
            if not getattr(options, key) >= least:
                option, value = f"--{key.replace('_', '-')}", getattr(options, key)
                raise ConfigError(f"{option} is {value:g}; expected at least {least}")


def new_head(name: str, argv: Sequence[str], options: Namespace) -> Row:
    """The head of a record: its command, options, commit, machine and versions."""
    from bench.measure import machine, versions  # with torch, which simulations need not import

    values = {key: value for key, value in vars(options).items() if not isinstance(value, Path)}
    facts = {"commit": commit(), "machine": machine(), "versions": versions()}
    return {"command": " ".join(["python -m bench", name, *argv]), "options": values, **facts}


def read(path: Path) -> tuple[Row, list[Row]]:
    """The head of a record, and the last row of each case."""
    lines = read_lines(path)
    head = next(lines, {})
    if "options" not in head:
        raise ConfigError(f"{path}: expected the record of a benchmark, whose first line has its options")
    return head, list({row["case"]: row for row in lines}.values())


def same(head: Row, earlier: Row, rows: list[Row]) -> tuple[Row, list[Row]]:
    """The earlier record, if it is of the same benchmark and options. ConfigError: it is not."""
    new, old = ({k: v for k, v in x["options"].items() if k not in GROWING} for x in (head, earlier))
    name, other = (x["command"].split()[3] for x in (head, earlier))
    if differing := {k for k in new | old if new.get(k) != old.get(k)} or name != other:
        raise ConfigError(
            f"--out is the record of {earlier['command']!r}, which differs in {differing}; expected the same "
            "options, or another file"
        )
    return {**earlier, "options": head["options"]}, rows


def measure(
    benchmark: ModuleType, options: Namespace, head: Row, known: Sequence[Row], path: Path | None
) -> list[Row]:
    """The row of every case, in their order: those of the record, and those measured now."""
    cases, rows = dict(benchmark.cases(options)), {row["case"]: row for row in known}
    done = {case for case, row in rows.items() if "error" not in row and not row.get("failed")}
    missing = [case for case in cases.items() if case[0] not in done]
    with ExitStack() as stack:
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open_to_append(path))
            if not known:
                file.truncate(0)
                append(file, head)
        began = printed = time.monotonic()
        for n, row in enumerate(_rows(missing, getattr(options, "processes", 1)), 1):
            if row is None:
                continue
            rows[row["case"]] = row = nan_to_null(row)
            if path:
                append(file, row)
            now = time.monotonic()
            if "error" in row or now > printed + PROGRESS_S:
                printed, remaining = now, (now - began) / n * (len(missing) - n)
                problem = f": {row['error']}" if "error" in row else ""
                say(f"{n} of {len(missing)}, about {remaining:.0f} s left; {row['case']}{problem}")
    return [rows[case] for case in cases if case in rows]


def _rows(cases: Sequence[Case], processes: int) -> Iterator[Row | None]:
    if processes == 1 or len(cases) < 2:
        yield from (measured(*case) for case in cases)
        return
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")  # for the processes spawned
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for future in as_completed([pool.submit(measured, *case) for case in cases]):
            yield future.result()


def measured(case: str, function: Callable[[], Row | None]) -> Row | None:
    """The case's row; an error becomes a line. A package that is not installed is no failure."""
    try:
        row = function()
    except Exception as error:
        return {"case": case, "error": reason(error), "failed": not isinstance(error, ImportError)}
    return None if row is None else {"case": case, **row}


def in_turns(names: Sequence[str], rounds: int, measure: Callable[[str], Row | None]) -> Iterator[Case]:
    """Every name once a round; each round begins with the next one, so that none always goes first."""
    for i in range(rounds):
        first = i % max(1, len(names))
        for name in (*names[first:], *names[:first]):
            yield f"{name}: round {i + 1}", partial(measure, name)


def repeated(kinds: Iterable[Any], runs: int, measure: Callable[[Any, int], Row | None]) -> Iterator[Case]:
    """Every kind so many times, each with a number from 0 on."""
    for kind in kinds:
        for i in range(runs):
            yield f"{kind}, {i}", partial(measure, kind, i)


def grouped(rows: Iterable[Row], *keys: str) -> dict[Any, list[Row]]:
    """Rows by their value of a key, or their values of several, in order of appearance."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        values = tuple(row[key] for key in keys)
        groups.setdefault(values if len(keys) > 1 else values[0], []).append(row)
    return groups


def by_round(rows: Sequence[Row], value: str) -> dict[str, float]:
    """A value of some rows of `in_turns`, by the number of their round."""
    return {row["case"].rpartition(" ")[2]: row[value] for row in rows}


def median_and_range(values: Iterable[float], form: str = ".2f") -> str:
    """Median and range as text."""
    ordered = sorted(values)
    return f"{statistics.median(ordered):{form}} ({ordered[0]:{form}} to {ordered[-1]:{form}})"


def machine_of(head: Row) -> str:
    """The machine, threads, torch and commit of a record."""
    machine = head["machine"]
    name, threads = machine.get("card") or machine["cpu"], head["options"]["threads"]
    torch = f"torch {head['versions']['torch']}, commit {head['commit']}"
    return f"{name}, {machine['isa']}, {threads} threads, {torch}"


def say(line: str) -> None:
    """Print progress to stderr: stdout is for the tables."""
    print(line, file=sys.stderr, flush=True)


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def chosen(only: str, names: Iterable[str]) -> list[str]:
    """The names that contain the text, or else one of its comma-separated words. ConfigError: none does."""
    names, words = list(names), [only.lower()]
    if not any(words[0] in name.lower() for name in names):
        words = [word.strip().lower() for word in only.split(",")]
    hits = [name for name in names if any(word in name.lower() for word in words)]
    if not hits:
        raise ConfigError(f"--only {only}: no name contains that; there are: {', '.join(names)}")
    return hits


def reason(error: BaseException) -> str:
    """An error as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def commit() -> str:
    """This tree's short commit, with '+' if kernels, trainer or bench have uncommitted changes.

    Outside a git checkout: $COMMIT, if it is given.
    """
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True, stderr=-3).strip()
        paths = ("kernels", "trainer", "bench/*.py")
        changed = subprocess.check_output([*git, "status", "--porcelain", "--", *paths], text=True)
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("COMMIT") or "unknown: not in a git checkout"
    return head + "+" * bool(changed.strip())
