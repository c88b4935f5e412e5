"""`python -m bench` lists the benchmarks; `python -m bench NAME [--out FILE | --record]` runs one.

A benchmark is a module with OPTIONS (harness.py), whose first line says what it measures and how long that
takes on two cores. A record grows by a line with each case that was measured: the same command with the same
--out goes on.
"""

import ast
import importlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import harness

FOLDER = Path(__file__).parent
MAIN = ("faults.matrix", "gpu.suite", "learner.throughput", "pipeline.splits", "validation.runs")
"""Modules that have the name of their folder."""


def benchmarks() -> dict[str, str]:
    """The module of every benchmark, by its name."""
    paths = [path for path in sorted(FOLDER.rglob("*.py")) if re.search("^OPTIONS", path.read_text(), re.M)]
    modules = [".".join(path.relative_to(FOLDER).with_suffix("").parts) for path in paths]
    return {module.split(".")[0] if module in MAIN else module: module for module in modules}


def first_line(module: str) -> str:
    """The first line of a module's docstring, without importing it: some imports take seconds."""
    path = FOLDER.joinpath(*module.split(".")).with_suffix(".py")
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def main(argv: Sequence[str]) -> int:
    """List the benchmarks, or run one; the exit code."""
    modules = benchmarks()
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{__doc__}\n`python -m bench NAME --help` explains its options and columns.\n")
        print("\n".join(f"  {name:23} {first_line(module)}" for name, module in modules.items()))
        return 0
    name, *options = argv
    if name not in modules:
        print(f"error: bench has no {name!r}; expected one of: {', '.join(modules)}", file=sys.stderr)
        return 2
    return harness.run(name, importlib.import_module(f"bench.{modules[name]}"), options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
