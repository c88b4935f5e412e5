"""A process of a run is killed or frozen in any phase: does the run survive, or end in one line? [hours]

Every process of a run, in every phase, is killed or frozen at a random instant; disks
are full, folders read-only, the clock jumps. Each run must recover or end in one clear line that names the
culprit, within its deadline; be resumed; and its books must add up: no prompt lost, none trained on twice,
no process, shared memory or semaphore left.

    python -m bench faults --out FILE               one instant in every cell: hours; goes on with FILE
    python -m bench faults --only learner --runs 3  three in each cell whose name contains the word
    python -m bench faults --table FILE             the table of docs/reliability.md

Disks and read-only folders need root, who alone can mount them, and vLLM's cells an environment with vLLM
(`.venv-vllm/bin/python -m bench faults --only vLLM`); without them these cells are left out.
"""

import importlib.util
import os
import statistics
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from bench.faults.cells import FULL, READ_ONLY, VLLM, Cell, all_cells
from bench.faults.trial import try_cell
from bench.harness import Case, Row, chosen, grouped
from bench.table import table

OPTIONS: dict[str, Any] = {
    "runs": (1, "instants in each cell"),
    "only": ("", "comma-separated: cells whose name contains one of these"),
}


def cases(options: Namespace) -> Iterator[Case]:
    """The cells that this user, in this environment, can try."""
    cells = {cell.name: cell for cell in all_cells()}
    for name in chosen(options.only, cells):
        cell = cells[name]
        if VLLM in cell.role and importlib.util.find_spec("vllm") is None:
            continue
        if cell.fault in (FULL, READ_ONLY) and os.geteuid():
            continue
        for i in range(1, options.runs + 1):
            yield f"{name}, {i}", partial(measure, cell, i)


def measure(cell: Cell, i: int) -> Row:
    """The outcome of the run, and the invariants that it violated."""
    row = try_cell(cell, f"{cell.name} {i}")
    return row | {"violated": (violated := failures(row)), "failed": bool(violated)}


def failures(row: Row) -> list[str]:
    """The violated invariants of one case."""
    cell, ended, line = Cell(row["role"], row["phase"], row["fault"]), row["ended"], row["line"]
    violated = [*row["problems"], *(f"orphan: {line}" for line in row["orphans"])]
    violated += [f"left in shared memory: {name}" for name in row["leaked"]]
    if ended in ("hang", "missed") or (ended == "error" and not cell.fatal):
        violated.append(f"{ended} {line}".strip())
    if ended == "error" and not any(word in line for word in cell.culprit):
        violated.append(f"the culprit is not named: {line!r}")
    return violated


def describe(head: Row, rows: Sequence[Row]) -> str:
    """Markdown: by role and fault, what became of the run, how soon, and how often something was wrong."""
    columns = ["process", "fault", "instants", "recovered", "ended in one line"]
    columns += ["seconds, median (most)", "failures"]
    lines, text = [], []
    phases = Counter((cell.role, cell.fault) for cell in all_cells())
    for (role, fault), group in grouped(rows, "role", "fault").items():
        ended = Counter(row["ended"] for row in group)
        seconds = [row["seconds"] for row in group]
        tried = f"{len({row['phase'] for row in group})} of {phases[role, fault]} phases"
        lines.append([
            role, fault, f"{len(group)} in {tried}", str(ended["recovered"] + ended["complete"]),
            str(ended["error"] + ended["killed"]), f"{statistics.median(seconds):.1f} ({max(seconds):.1f})",
            str(sum(len(row["violated"]) for row in group)),
        ])  # fmt: skip
        text += [f"{row['case']}: {'; '.join(row['violated'])}" for row in group if row["violated"]]
    return "\n".join([table(columns, lines), *text])
