"""Does the fit find the truth? Simulated runs of the paper's published curves, fitted by both procedures.

  python -m bench.validation                   1,000 runs well-specified, 300 of each other kind; half an hour
  python -m bench.validation --runs 40         a first look
  python -m bench.validation --record          over docs/validation.md and .png, bench/results/validation.json

The tables are printed; they are written only with --record or --json.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import records
from bench.records import ROOT, Record
from bench.validation.document import document
from bench.validation.plot import draw
from bench.validation.runs import tasks_of, work
from bench.validation.tables import summary

BEGIN, END = (f"<!-- made by python -m bench.validation: {edge} -->" for edge in ("begin", "end"))
TRACKED = "validation.json"
CODE = ("trainer/scaling", "bench/validation/*.py")


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, fit, print the tables, write them where asked."""
    parser = records.parser("validation", __doc__, TRACKED, runs=1000, processes=2, seed=2510)
    args = parser.parse_args(argv)
    runs = list(work(tasks_of(args.runs, args.seed), args.processes))
    result: Record = {"runs": len(runs), "seed": args.seed, "commit": records.commit(*CODE), **summary(runs)}
    if args.record:
        _write_page(result, ROOT / "docs")
    return records.finish(args, TRACKED, _rounded(result), document(result))


def _write_page(result: Record, folder: Path) -> None:
    """Replace the generated part of the page, and draw its picture."""
    page = folder / "validation.md"
    text = page.read_text()
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
