"""The generated part of docs/validation.md, from the numbers of bench.validation.tables."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from bench.records import Record
from bench.table import markdown, number
from bench.validation.runs import PROCEDURES
from bench.validation.scenarios import LONG, NOISE, OFF_GRID, PAPER_RUNS, WEAK, WELL
from bench.validation.tables import QUANTITIES

share = partial(number, form=".3f")


def document(result: Record) -> str:
    """The page in Markdown: the bars, then every table."""
    head = f"{result['runs']} simulated runs, seed {result['seed']}; noise of sd {NOISE:g}."
    sections = (_bars, _accuracy, _far, _coverage, _flags, _outliers, _ranges)
    return "\n\n".join([head, *(section(result) for section in sections)])


def _bars(result: Record) -> str:
    rows = [
        [b["what"], f"{b['found']:.4f}", b["bar"], "yes" if b["holds"] else "**no**"] for b in result["bars"]
    ]
    note = f"Errors, flags and outliers: rows of Table 1 but {WEAK}, which has its own lines below."
    return f"## Bars\n\n{note}\n\n{markdown(('measure', 'found', 'bar', 'holds'), rows)}"


def _pair(values: Sequence[float], form: str) -> str:
    return " / ".join(format(x, form) for x in values)


def _accuracy(result: Record) -> str:
    text = "## Error of one fit\n\nMedian / 95 % of the absolute error; C_mid in per cent."
    head = ("row, fit to", "ours: A", "B", "C_mid, %", "paper: A", "paper, finer: A")
    for scenario, note in (
        (WELL, "**Laws as printed.** Every A is a node of the paper's grid, some C_mid are near one."),
        (OFF_GRID, "**Laws off the grid**: A and C_mid anywhere in the grid's cell around it, B within 5 %."),
    ):
        rows = []
        for name, v in result["accuracy"][scenario].items():
            mine = v["ours"]
            cells = [_pair(mine["A"], ".4f"), _pair(mine["B"], ".2f")]
            cells += [_pair([100 * x for x in mine["C_mid"]], ".1f")]
            cells += [_pair(v[p]["A"], ".4f") for p in PROCEDURES[1:]]
            rows.append([f"{name}, {PAPER_RUNS[name].high / 1000:g}k", *cells])
        text += f"\n\n{note}\n\n{markdown(head, rows)}"
    return text


def _far(result: Record) -> str:
    text = (
        "## Error of the reward far ahead\n\nMedian; and by how much our error is larger (+) or smaller (−)\n"
        "than the paper's procedure on the same runs, mean ± its standard error."
    )
    for scenario in (WELL, OFF_GRID):
        rows = []
        for name, v in result["accuracy"][scenario].items():
            more = [f"{mean:+.4f} ± {se:.4f}" for mean, se in (v[f"ours − {p}"] for p in PROCEDURES[1:])]
            medians = (f"{v[p]['far'][0]:.4f}" for p in PROCEDURES)
            rows.append([f"{name}, at {PAPER_RUNS[name].far / 1000:g}k", str(v["runs"]), *medians, *more])
        head = (f"{scenario}: row", "runs", *PROCEDURES, "ours − paper", "ours − paper, finer")
        text += f"\n\n{markdown(head, rows)}"
    return text


def _coverage(result: Record) -> str:
    text = (
        "## How often 90 % intervals hold the truth\n\n2x: the reward at twice the last compute. "
        "Monte-Carlo error of a share: ±.01 at 1,000 runs, ±.017 at 300."
    )
    for first, key in (("noise", "coverage"), (f"{WELL}, by row", "coverage_by_row")):
        head = (first, "runs", *QUANTITIES, "identified", "A, where identified", "width of A")
        shares = (*QUANTITIES, "identified", "A, identified", "width of A")
        rows = [[name, str(v["runs"]), *(share(v[k]) for k in shares)] for name, v in result[key].items()]
        text += f"\n\n{markdown(head, rows)}"
    return text


def _flags(result: Record) -> str:
    rows = [[name, str(v["runs"]), share(v["share"])] for name, v in result["flagged"].items()]
    return f"## Which ceilings are identified\n\n{markdown(('fit of', 'runs', 'flagged'), rows)}"


def _outliers(result: Record) -> str:
    pairs = result["outliers"].items()
    rows = [[name, str(v["runs"]), *(_pair(v[k], ".4f") for k in ("ours", "paper"))] for name, v in pairs]
    text = (
        "## 5 % of the points off by ±.1\n\nHow far A moves from the same run's without them, median / 95 %."
    )
    return f"{text}\n\n{markdown(('rows', 'runs', 'ours', 'paper'), rows)}"


def _ranges(result: Record) -> str:
    def spread(values: Sequence[float], form: str) -> str:
        return f"{values[0]:{form}} ± {values[1]:{form}}"

    rows = []
    for v in result["ranges"]:
        both = [f"{spread(v[p]['A'], '.3f')}, {spread(v[p]['B'], '.2f')}" for p in PROCEDURES]
        published = f"{v['published'][0]:.3f}, {v['published'][1]:.2f}"
        rows.append([f"{v['low'] / 1000:g}k–{v['high'] / 1000:g}k", published, *both])
    return f"""## The range of the fit

A, B of the curve of {LONG} (A .645, B 1.70), fitted over several ranges: median ± sd over runs. The
paper's points are not published; the second column has its own fits of them. A simulated run follows its
curve up to noise and gives the same A and B over every range: the second column's differences are the run's.

{markdown(("range", "published", *PROCEDURES), rows)}"""
