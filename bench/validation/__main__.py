"""Does the fit find the truth? Simulated runs of the paper's published curves, fitted by both procedures.

  python -m bench.validation                   1,000 runs well-specified, 300 of each other kind; half an hour
  python -m bench.validation --runs 40         a first look
  python -m bench.validation --record          over docs/validation.md and .png, bench/results/validation.json

Every run is kept in --out as it comes, so that an interrupted command goes on where it ended, unless the code
of the fit has changed. The tables are printed; they are written only with --record, --docs or --json.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import records
from bench.records import RESULTS, ROOT, Record
from bench.validation.document import document
from bench.validation.plot import draw
from bench.validation.runs import Key, kept_in, read, tasks_of, version, work
from bench.validation.scenarios import SCENARIOS
from bench.validation.tables import summary

WRITE_EVERY_S = 300.0
BEGIN, END = (f"<!-- made by python -m bench.validation: {edge} -->" for edge in ("begin", "end"))


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, fit, print the tables, write them where asked."""
    parser = records.parser("validation", __doc__, runs=1000, processes=2, seed=2510)
    out = ROOT / "build" / "validation"
    parser.add_argument("--out", type=Path, default=out, help="folder of the runs kept (build/validation)")
    text = "write over docs/ and bench/results/validation.json"
    parser.add_argument("--record", action="store_true", help=text)
    text = "write validation.md and .png into this folder"
    parser.add_argument("--docs", type=Path, metavar="FOLDER", help=text)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the tables' numbers here")
    args = parser.parse_args(argv)
    if args.record:
        args.docs, args.json = ROOT / "docs", RESULTS / "validation.json"
    args.out.mkdir(parents=True, exist_ok=True)
    tasks, file = tasks_of(args.runs, args.seed), kept_in(args.out)
    kept = read(file)
    remaining = [task for task in tasks if task.key not in kept]
    print(f"{len(tasks)} runs, {len(tasks) - len(remaining)} of them kept in {args.out}", flush=True)
    written = time.monotonic()
    try:
        for key, record in work(remaining, file, args.processes) if remaining else ():
            kept[key] = record
            if time.monotonic() - written > WRITE_EVERY_S:
                _write({t.key: kept[t.key] for t in tasks if t.key in kept}, len(tasks), args)
                written = time.monotonic()
    finally:
        _write({t.key: kept[t.key] for t in tasks if t.key in kept}, len(tasks), args)
    return 0


def _write(done: dict[Key, Record], planned: int, args: argparse.Namespace) -> None:
    """Print the tables of the runs so far, or write them where asked."""
    if {(x.name, row) for x in SCENARIOS for row in x.rows} != {key[:2] for key in done}:
        print("too few runs for the tables: some scenarios have none; start again to go on", flush=True)
        return
    result = {"runs": len(done), "planned": planned, "seed": args.seed, "code": version()}
    result |= summary(list(done.values()))
    records.write(args.json, _rounded(result))
    if args.docs is None:
        print(document(result))
    else:
        _write_page(result, args.docs)
    records.say_written(args.json, args.docs and args.docs / "validation.md")


def _write_page(result: Record, folder: Path) -> None:
    """Replace the generated part of the page, and draw its picture."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "validation.md"
    text = page.read_text() if page.is_file() else f"{BEGIN}\n{END}\n"
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise SystemExit(f"{page}: expected one line {BEGIN!r} and one {END!r} after it")
    before, _, rest = text.partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{document(result)}\n{END}{rest.partition(END)[2]}")
    draw(result, folder / "validation.png")


def _rounded(x: Any) -> Any:
    """Floats with four digits."""
    if isinstance(x, dict):
        return {k: _rounded(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_rounded(v) for v in x]
    return float(f"{x:.4g}") if isinstance(x, float) else x


if __name__ == "__main__":  # its worker processes import this module again
    sys.exit(main())
