"""Does the fit find the truth? Simulated runs of the paper's published curves, fitted by both procedures.

  python -m bench.validation                   1,000 runs well-specified, 300 of each other kind; half an hour
  python -m bench.validation --runs 40         a first look
  python -m bench.validation --record          over docs/validation.md and .png, bench/results/validation.json

Every run is kept in --out as it comes, so that an interrupted command goes on where it ended, unless the code
of the fit has changed. The tables are printed; they are written only with --record, --docs or --json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import records
from bench.records import RESULTS, ROOT, Record
from bench.validation.document import document
from bench.validation.plot import draw
from bench.validation.runs import STUDIES, Key, kept_in, read, tasks_of, work
from bench.validation.small import power_law, wrong_R0
from bench.validation.tables import intervals_by_method, summary

SEED = 2510
WRITE_EVERY_S = 300.0
BEGIN, END = (
    "<!-- made by python -m bench.validation: begin -->",
    "<!-- made by python -m bench.validation: end -->",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, fit, print the tables, write them where asked."""
    args = _parser().parse_args(argv)
    if args.record:
        args.docs, args.json = ROOT / "docs", RESULTS / "validation.json"
    args.out.mkdir(parents=True, exist_ok=True)
    files = kept_in(args.out)
    tasks = tasks_of(args.runs, args.seed)
    kept = read(files)
    left = [task for task in tasks if task.key not in kept]
    print(f"{len(tasks)} runs, {len(tasks) - len(left)} of them kept in {args.out}", flush=True)
    small = {"wrong_R0": wrong_R0(), "power_law": power_law(args.seed)}

    def write() -> None:
        _write({task.key: kept[task.key] for task in tasks if task.key in kept}, small, args)

    written = time.monotonic()
    try:
        for key, record in work(left, files, args.processes) if left else ():
            kept[key] = record
            if time.monotonic() - written > WRITE_EVERY_S:
                write()
                written = time.monotonic()
    finally:
        write()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = records.parser("validation", __doc__)
    parser.add_argument(
        "--runs", type=int, default=1000, help="simulated runs that are well-specified (1000)"
    )
    parser.add_argument("--processes", type=int, default=2, help="that simulate and fit (2)")
    parser.add_argument("--seed", type=int, default=SEED, help=f"of the simulation ({SEED})")
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "build" / "validation",
        help="folder of the runs kept (build/validation)",
    )
    parser.add_argument(
        "--record", action="store_true", help="write over docs/ and bench/results/validation.json"
    )
    parser.add_argument(
        "--docs", type=Path, metavar="FOLDER", help="write validation.md and .png into this folder"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the tables' numbers here")
    return parser


def _write(done: dict[Key, Record], small: Record, args: argparse.Namespace) -> None:
    """Print the tables of the runs so far, or write them where asked."""
    wanted = {
        (name, x.name, row) for name, study in STUDIES.items() for x in study.scenarios for row in x.rows
    }
    if wanted != {key[:3] for key in done}:
        print("too few runs for the tables: some scenarios have none; start again to go on", flush=True)
        return
    runs, intervals = ([r for key, r in done.items() if key[0] == name] for name in STUDIES)
    planned = sum(task.study == "runs" for task in tasks_of(args.runs, args.seed))
    result = {
        "runs": len(runs), "planned": planned, "seed": args.seed,
        "code": {name: study.version() for name, study in STUDIES.items()},
        **summary(runs), "intervals": intervals_by_method(intervals),
        **small,
    }  # fmt: skip
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
