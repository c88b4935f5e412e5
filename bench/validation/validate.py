"""Does the fit find what is known? Simulated runs from the paper's published laws, fitted by both procedures.

  python -m bench.validation                   1,000 runs well-specified, 300 of each other kind
  python -m bench.validation --runs 40         a first look

Every run is kept in --out as it comes: a run that was cut goes on where it
ended, unless the fit itself has changed. Tables go to docs/validation.md and
bench/results/validation.json, the picture to docs/validation.png.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.measure import ROOT, write_json
from bench.validation.document import document
from bench.validation.plot import draw
from bench.validation.runs import PARTS, Key, Record, kept_in, read, tasks_of, work
from bench.validation.small import power_law, wrong_R0
from bench.validation.tables import intervals_by_method, summary

SEED = 2510
WRITE_EVERY = 300.0  # seconds
BEGIN, END = (
    "<!-- made by python -m bench.validation: begin -->",
    "<!-- made by python -m bench.validation: end -->",
)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    files = kept_in(args.out)
    tasks = tasks_of(args.runs, args.seed)
    records = read(files)
    left = [task for task in tasks if task.key not in records]
    print(f"{len(tasks)} runs, {len(tasks) - len(left)} of them kept in {args.out}", flush=True)
    small = {"wrong_R0": wrong_R0(), "power_law": power_law(args.seed)}

    def write() -> None:
        _write({task.key: records[task.key] for task in tasks if task.key in records}, small, args)

    written = time.monotonic()
    try:
        for key, record in work(left, files, args.processes) if left else ():
            records[key] = record
            if time.monotonic() - written > WRITE_EVERY:
                write()
                written = time.monotonic()
    finally:
        write()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.validation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=1000, help="simulated runs that are well-specified")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "validation", help="folder of the runs kept"
    )
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of validation.md and .png")
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "validation.json")
    return parser


def _write(done: dict[Key, Record], small: dict[str, Any], args: argparse.Namespace) -> None:
    """Tables, JSON and picture of the runs there are."""
    wanted = {
        (name, case.name, row) for name, part in PARTS.items() for case in part.cases for row in case.rows
    }
    if wanted != {key[:3] for key in done}:
        print("too few runs for the tables: not every case has one; start again to go on", flush=True)
        return
    runs, intervals = ([r for key, r in done.items() if key[0] == name] for name in PARTS)
    planned = sum(task.part == "runs" for task in tasks_of(args.runs, args.seed))
    found = {
        "runs": len(runs), "planned": planned, "seed": args.seed,
        "code": {name: part.version() for name, part in PARTS.items()},
        **summary(runs), "intervals": intervals_by_method(intervals),
        **small,
    }  # fmt: skip
    write_json(args.json, _rounded(found))
    args.docs.mkdir(parents=True, exist_ok=True)
    page = args.docs / "validation.md"
    text = page.read_text() if page.is_file() else f"{BEGIN}\n{END}\n"
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise SystemExit(f"{page}: expected one line {BEGIN!r} and one {END!r} after it")
    before, _, rest = text.partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{document(found)}\n{END}{rest.partition(END)[2]}")
    draw(found, args.docs / "validation.png")
    print(f"written: {args.json}, {page}, {page.with_suffix('.png')}", flush=True)


def _rounded(x: Any) -> Any:
    if isinstance(x, dict):
        return {k: _rounded(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_rounded(v) for v in x]
    if isinstance(x, float):
        return float(f"{x:.4g}") if math.isfinite(x) else None
    return x


if __name__ == "__main__":
    sys.exit(main())
