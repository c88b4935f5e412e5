"""Does the fit find what is known? Simulated runs from the paper's published laws, fitted by both procedures.

  python -m bench.validate                   1,000 runs well-specified, 300 of each other kind
  python -m bench.validate --runs 40         a first look

Every run is kept in --out as it comes: a run that was cut goes on where it
ended, unless the fit itself has changed. Tables go to docs/validation.md and
bench/results/validation.json, the picture to docs/validation.png.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.measure import ROOT, write_json
from bench.validate_cases import CASES, Case
from bench.validate_document import document
from bench.validate_fits import measure
from bench.validate_plot import draw
from bench.validate_small import power_law, wrong_R0
from bench.validate_tables import summary

SEED = 2510
CHANGES_THE_RESULT = (
    *(ROOT / "trainer" / "scaling" / f"{name}.py" for name in ("posterior", "fit", "law", "paper")),
    *(ROOT / "bench" / f"{name}.py" for name in ("validate_cases", "validate_fits")),
)
REFRESH = 60.0  # seconds between two lines of progress with the tables written anew
BEGIN, END = (
    "<!-- made by python -m bench.validate: begin -->",
    "<!-- made by python -m bench.validate: end -->",
)

Task = tuple[Case, str, int, int]
Record = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    kept = args.out / f"runs-{_version()}.jsonl"
    tasks = list(tasks_of(args.runs, args.seed))
    records = {_key(r): r for r in _read(kept)}
    wanted = {(case.name, row, i, seed): (case, row, i, seed) for case, row, i, seed in tasks}
    left = [task for key, task in wanted.items() if key not in records]
    print(f"{len(tasks)} runs, {len(tasks) - len(left)} of them kept in {kept}", flush=True)
    try:
        _work(left, kept, records, args.processes)
    finally:
        _write([r for k, r in records.items() if k in wanted], args)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.validate",
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


def tasks_of(runs: int, seed: int) -> Iterator[Task]:
    """In such an order that what is cut short has done the same share of every case and row."""
    every = [(case, row, i) for case in CASES for row in case.rows for i in range(case.runs(runs))]
    for case, row, i in sorted(every, key=lambda t: (t[2] + 0.5) / t[0].runs(runs)):
        yield case, row, i, seed


def _version() -> str:
    """Of what a kept run depends on."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in CHANGES_THE_RESULT)).hexdigest()[:10]


def _key(record: Record) -> tuple[str, str, int, int]:
    return record["case"], record["row"], record["i"], record["seed"]


def _read(kept: Path) -> list[Record]:
    """Whole lines; the last one of a run that was killed may be half."""
    if not kept.is_file():
        return []
    return [json.loads(line) for line in kept.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _work(tasks: list[Task], kept: Path, records: dict[Any, Record], processes: int) -> None:
    if not tasks:
        return
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")  # inherited by the processes spawned
    began = said = time.monotonic()
    whole = kept.read_bytes().rpartition(b"\n") if kept.is_file() else (b"", b"", b"")
    kept.write_bytes(whole[0] + whole[1])
    with multiprocessing.get_context("spawn").Pool(processes) as pool, kept.open("a") as file:
        for n, record in enumerate(pool.imap_unordered(measure, tasks), 1):
            file.write(json.dumps(record) + "\n")
            file.flush()
            records[_key(record)] = record
            now = time.monotonic()
            if now - said > REFRESH or n == len(tasks):
                said = now
                left = (now - began) / n * (len(tasks) - n)
                print(f"{n} of {len(tasks)} runs, about {left / 60:.0f} min left", flush=True)


def _write(records: list[Record], args: argparse.Namespace) -> None:
    """Tables, JSON and picture of the runs there are."""
    if {(r["case"], r["row"]) for r in records} != {(case.name, row) for case in CASES for row in case.rows}:
        print("too few runs for the tables: not every case has one; start again to go on", flush=True)
        return
    found = {
        "runs": len(records), "asked": args.runs, "seed": args.seed, "fits": _version(),
        **summary(records), "wrong_R0": wrong_R0(), "power_law": power_law(args.seed),
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
