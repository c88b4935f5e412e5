"""The fault matrix: every process of a run, in every phase, is killed or frozen at random instants; disks are
full, folders read-only, the clock jumps. Each run must recover or end in one clear line that names the
culprit, within its deadline; be resumed; and its books must add up: no prompt lost, none trained on twice,
no process, shared memory or semaphore left.

    python -m bench.faults --out FILE               the whole matrix: hours; goes on with what FILE lacks
    python -m bench.faults --only learner --instants 3     of each cell; 0: 20 for a kill, 3 for another fault
    python -m bench.faults --table FILE             the table of docs/reliability.md

Disks and read-only folders need root, who alone can mount them, and vLLM's cells an environment with vLLM
(`.venv-vllm/bin/python -m bench.faults --only vLLM`); without them these cells are left out.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import records
from bench.faults.matrix import FULL, KILLED, READ_ONLY, VLLM, Cell, all_cells
from bench.faults.trial import try_cell
from bench.table import markdown
from trainer.jsonl import append, open_to_append, read_lines

Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 if a cell has failed."""
    p = records.parser("faults", __doc__, instants=0, seed=0)
    text = "append the rows here; instants that are there count"
    p.add_argument("--out", type=Path, metavar="FILE", help=text)
    text = "print the table of these rows, and try nothing"
    p.add_argument("--table", type=Path, metavar="FILE", help=text)
    p.add_argument("--only", default="", metavar="TEXT", help="only cells whose name contains this text")
    args = p.parse_args(argv)
    if args.table:
        rows = list(read_lines(args.table))
        print(table(rows))
        return 0
    rows = list(read_lines(args.out)) if args.out and args.out.exists() else []
    file = open_to_append(args.out) if args.out else None
    tried: Counter[Cell] = Counter()
    for row in rows:
        tried[Cell(row["role"], row["phase"], row["fault"])] += len(row["instants"])
    for cell in all_cells():
        if args.only not in cell.name or not _possible(cell):
            continue
        missing = (args.instants or (20 if cell.fault == KILLED else 3)) - tried[cell]
        if missing <= 0:
            continue
        row = try_cell(cell, missing, f"{args.seed} {tried[cell]}")
        rows.append(row)
        if file:
            append(file, row)
        ends = ", ".join(f"{n} {ended}" for ended, n in Counter(i["ended"] for i in row["instants"]).items())
        records.say(f"{cell.name}: {ends}; {'; '.join(failures(row)) or 'no failure'}")
    print(table(rows))
    return int(any(map(failures, rows)))


def _possible(cell: Cell) -> bool:
    """Whether this user, in this environment, can try it."""
    if cell.role == VLLM:
        return importlib.util.find_spec("vllm") is not None
    return os.geteuid() == 0 or cell.fault not in (FULL, READ_ONLY)


def failures(row: Row) -> list[str]:
    """The violated invariants of one case."""
    cell = Cell(row["role"], row["phase"], row["fault"])
    violated = [*row["end"]["problems"], *(f"orphan: {line}" for line in row["end"]["orphans"])]
    violated += [f"left in shared memory: {name}" for name in row["leaked"]]
    for i in row["instants"]:
        ended = i["ended"]
        if ended in ("hang", "missed") or (ended == "error" and not cell.fatal):
            violated.append(f"{ended} {i['line']}".strip())
        if ended == "error" and not _names(cell, i["line"]):
            violated.append(f"the culprit is not named: {i['line']!r}")
        violated += [f"orphan: {line}" for line in i.get("orphans", ())]
    return violated


def _names(cell: Cell, line: str) -> bool:
    """Whether an error line names the process, or what is wrong with the disk."""
    words = {
        "run folder": ("space", "Read-only", "read-only"),
        "learner-1": ("learner-1", "learner rank 1"),
        "fork server": ("verif",),
        "verifier worker": ("verif",),
    }
    return any(word in line for word in words.get(cell.role, (cell.process,)))


def table(rows: Sequence[Row]) -> str:
    """Markdown: by role and fault, what became of the run, how soon, and how often something was wrong."""
    head = ["process", "fault", "instants", "recovered", "ended in one line"]
    head += ["seconds, median (most)", "failures"]
    lines = []
    keys = dict.fromkeys((row["role"], row["fault"]) for row in rows)
    phases = Counter((cell.role, cell.fault) for cell in all_cells())
    for role, fault in keys:
        cells = [row for row in rows if (row["role"], row["fault"]) == (role, fault)]
        instants = [i for row in cells for i in row["instants"]]
        ended = Counter(i["ended"] for i in instants)
        seconds = [i["seconds"] for i in instants] or [0.0]
        failed = sum(len(failures(row)) for row in cells)
        tried = f"{len({row['phase'] for row in cells})} of {phases[role, fault]} phases"
        lines.append([
            role, fault, f"{len(instants)} in {tried}", str(ended["recovered"] + ended["complete"]),
            str(ended["error"] + ended["killed"]), f"{statistics.median(seconds):.1f} ({max(seconds):.1f})",
            str(failed),
        ])  # fmt: skip
    return markdown(head, lines)


if __name__ == "__main__":
    sys.exit(main())
