"""What the commands of bench share: their options, and their records.

Every command prints tables. It writes its record, a JSON file, only when asked to: `--out FILE` writes it
there, `--record` over the tracked file in bench/results (and over the pictures and pages made from it).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.jsonl import nan_to_null, write_atomic

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
Record = dict[str, Any]


def parser(
    module: str, description: str | None, tracked: str = "", **defaults: int | float
) -> argparse.ArgumentParser:
    """The parser of `python -m bench.<module>`, which prints the module's docstring as it stands.

    tracked: the record in bench/results, for --out and --record. defaults: of options with a number; their
    meaning stands in the docstring, unless it is among SHARED.
    """
    p = argparse.ArgumentParser(
        f"python -m bench.{module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, value in defaults.items():
        text = f"{SHARED[name]} ({value:g})" if name in SHARED else f"default: {value:g}"
        p.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=text)
    if tracked:
        add_options(p, tracked)
    return p


SHARED = {
    "rounds": "timed calls of each",
    "runs": "simulated runs of each kind",
    "seed": "seed of all that is drawn",
    "threads": "CPU threads",
}


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def add_options(p: argparse.ArgumentParser, tracked: str) -> None:
    """Add --out and --record; `tracked` names the record in bench/results."""
    where = p.add_mutually_exclusive_group()
    where.add_argument("--out", "--json", type=Path, metavar="FILE", help="write the record here, as JSON")
    where.add_argument("--record", action="store_true", help=f"write it over bench/results/{tracked}")


def path_of(args: argparse.Namespace, tracked: str) -> Path | None:
    """Where the record goes, if anywhere."""
    path: Path | None = args.out
    return path or (RESULTS / tracked if args.record else None)


def at_least(least: int, args: argparse.Namespace, *names: str) -> None:
    """Refuse smaller numbers: SystemExit names the option."""
    for name in names:
        if not getattr(args, name) >= least:
            option = f"--{name.replace('_', '-')}"
            raise SystemExit(f"{option} is {getattr(args, name):g}; expected at least {least}")


def write(path: Path | None, record: Record) -> None:
    """Write the whole record in one step, so that no reader ever sees half of it.

    JSON has no NaN: it becomes null, and `not_finite` lists where it stood.
    """
    if path is None:
        return
    not_finite: list[str] = []
    content = nan_to_null(record, replaced=not_finite)
    if not_finite:
        content["not_finite"] = not_finite
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(content, indent=1) + "\n")


def finish(args: argparse.Namespace, tracked: str, record: Record, text: str) -> int:
    """Print the tables, and write the record where asked; the exit code of success."""
    path = path_of(args, tracked)
    write(path, record)
    print(text)
    say_written(path)
    return 0


def say(line: str) -> None:
    """Print progress to stderr: stdout is for the tables."""
    print(line, file=sys.stderr, flush=True)


def say_written(*paths: Path | None) -> None:
    """Name the files that were written."""
    if written := [str(path) for path in paths if path]:
        say(f"written to {' and '.join(written)}")


def command(module: str, argv: Sequence[str] | None) -> str:
    """The command as a record states it; None: as this process was started."""
    return " ".join((f"python -m bench.{module}", *(sys.argv[1:] if argv is None else argv)))


def reason(error: BaseException) -> str:
    """An error as one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:200]


def commit(*code: str) -> str | None:
    """This tree's short commit, with '+' if `code` (default: kernels and bench) has uncommitted changes.

    Outside a git checkout: $COMMIT, or None.
    """
    try:
        git = ["git", "-C", str(ROOT)]
        head = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        paths = code or ("kernels", "bench/*.py")
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--", *paths], capture_output=True, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("COMMIT")
    return head + ("+" if changed.stdout.strip() else "")
