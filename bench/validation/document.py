"""The generated part of docs/validation.md, from the numbers of bench.validation.tables."""

from __future__ import annotations

from collections.abc import Sequence

from bench.records import Record
from bench.validation.intervals import METHODS
from bench.validation.scenarios import LONG, NOISE, OFF_GRID, PAPER_RUNS, WEAK, WELL
from bench.validation.tables import PROCEDURES, QUANTITIES


def document(result: Record) -> str:
    """The page in Markdown: the bars, then every table."""
    sections = (
        _bars,
        _accuracy,
        _coverage,
        _coverage_by_row,
        _intervals,
        _flags,
        _outliers,
        _ranges,
        _wrong_R0,
    )
    runs, planned, seed = (result[key] for key in ("runs", "planned", "seed"))
    head = f"{runs} of {planned} simulated runs, seed {seed}; noise of sd {NOISE:g}."
    if runs < planned:
        head += " The command was interrupted: start it again to go on."
    return "\n\n".join([head, *(section(result) for section in sections)])


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is aligned left."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _bars(result: Record) -> str:
    rows = [
        [b["what"], f"{b['found']:.4f}", b["bar"], "yes" if b["holds"] else "**no**"] for b in result["bars"]
    ]
    note = f"Errors, flags and outliers: rows of Table 1 but {WEAK}, which has its own lines below."
    return f"## Bars\n\n{note}\n\n{markdown(('measure', 'found', 'bar', 'holds'), rows)}"


def _accuracy(result: Record) -> str:
    text = "## Error of one fit\n\nMedian / 95 % of the absolute error; C_mid in per cent."
    for scenario, note in (
        (WELL, "**Laws as printed.** Every A is a node of the paper's grid, some C_mid are near one."),
        (OFF_GRID, "**Laws off the grid**: A and C_mid anywhere in the grid's cell around it, B within 5 %."),
    ):  # fmt: skip
        rows = []
        for name, v in result["accuracy"][scenario].items():
            mine, others = v["ours"], (v[p] for p in PROCEDURES[1:])
            relative = _pair([100 * x for x in mine["C_mid"]], ".1f")
            cells = [_pair(mine["A"], ".4f"), _pair(mine["B"], ".2f"), relative]
            rows.append([f"{name}, {_range_of(name)}", *cells, *(_pair(o["A"], ".4f") for o in others)])
        head = ("row, fit to", "ours: A", "B", "C_mid, %", "paper: A", "paper, finer: A")
        text += f"\n\n{note}\n\n{markdown(head, rows)}"
    text += "\n\n## Error of the reward far ahead\n\n"
    text += "Median; and by how much our error is larger (+) or smaller (−)\n"
    text += "than the paper's procedure on the same runs, mean ± its standard error."
    for scenario in (WELL, OFF_GRID):
        rows = []
        for name, v in result["accuracy"][scenario].items():
            more = [f"{mean:+.4f} ± {se:.4f}" for mean, se in (v[f"ours − {p}"] for p in PROCEDURES[1:])]
            rows.append([
                f"{name}, at {PAPER_RUNS[name].far / 1000:g}k", str(v["runs"]),
                *(f"{v[p]['far'][0]:.4f}" for p in PROCEDURES), *more,
            ])  # fmt: skip
        columns = (f"{scenario}: row", "runs", *PROCEDURES, "ours − paper", "ours − paper, finer")
        text += f"\n\n{markdown(columns, rows)}"
    return text


def _range_of(name: str) -> str:
    return f"{PAPER_RUNS[name].high / 1000:g}k"


def _pair(values: Sequence[float], form: str) -> str:
    return " / ".join(format(x, form) for x in values)


def _coverage(result: Record) -> str:
    head = ("noise", "runs", *QUANTITIES, "identified", "A, where identified", "width of A")
    text = "## How often 90 % intervals hold the truth\n\n2x: the reward at twice the last compute. "
    text += "Monte-Carlo error of a share: ±.01 at 1,000 runs, ±.017 at 300."
    return f"{text}\n\n{markdown(head, [_coverage_row(k, v) for k, v in result['coverage'].items()])}"


def _coverage_row(name: str, v: Record) -> list[str]:
    inside = [_share(v[k]) for k in (*QUANTITIES, "identified", "A, identified")]
    return [name, str(v["runs"]), *inside, f"{v['width of A']:.3f}"]


def _share(x: float) -> str:
    return "–" if x != x else f"{x:.3f}"


def _coverage_by_row(result: Record) -> str:
    head = (f"{WELL}, by row", "runs", *QUANTITIES, "identified", "A, where identified", "width of A")
    return markdown(head, [_coverage_row(k, v) for k, v in result["coverage_by_row"].items()])


def _intervals(result: Record) -> str:
    rows = []
    for scenario, v in result["intervals"].items():
        cells = [f"{v[m]['A']:.2f} ({v[m]['width of A']:.3f})" for m in METHODS]
        rows.append([scenario, str(v["runs"]), *cells])
    text = """## The intervals that are not the default

90 % intervals of A on the same runs, by the posterior, by profile likelihood and by bootstrap (residuals
drawn one by one or in blocks): share that holds the truth, and median width. The classical
ones assume independent errors: where errors are correlated they are too narrow. B and
C_mid are in bench/results/validation.json."""
    return f"{text}\n\n{markdown(('noise', 'runs', *METHODS), rows)}"


def _flags(result: Record) -> str:
    rows = [[name, str(v["runs"]), _share(v["share"])] for name, v in result["flagged"].items()]
    return f"## Which ceilings are identified\n\n{markdown(('fit of', 'runs', 'flagged'), rows)}"


def _outliers(result: Record) -> str:
    rows = [
        [name, str(v["runs"]), _pair(v["ours"], ".4f"), _pair(v["paper"], ".4f")]
        for name, v in result["outliers"].items()
    ]
    text = (
        "## 5 % of the points off by ±.1\n\nHow far A moves from the same run's without them, median / 95 %."
    )
    return f"{text}\n\n{markdown(('rows', 'runs', 'ours', 'paper'), rows)}"


def _ranges(result: Record) -> str:
    rows = []
    for v in result["ranges"]:
        both = [f"{_spread(v[p]['A'], '.3f')}, {_spread(v[p]['B'], '.2f')}" for p in PROCEDURES]
        published = f"{v['published'][0]:.3f}, {v['published'][1]:.2f}"
        rows.append([f"{v['low'] / 1000:g}k–{v['high'] / 1000:g}k", published, *both])
    text = f"""## The range of the fit

A, B of the curve of {LONG} (A .645, B 1.70), fitted over several ranges: median ± sd over runs. The
paper's points are not published; the second column has its own fits of them. A simulated run follows its
curve up to noise and gives the same A and B over every range: the second column's differences are the run's.

{markdown(("range", "published", *PROCEDURES), rows)}

The power law A − D/C^B on the same points, A ≤ 1:
"""
    rows = [
        [f"{v['low'] / 1000:g}k–{v['high'] / 1000:g}k", f"{v['published A']:.2f}",
         f"{v['A']:.2f} ({v['quartiles'][0]:.2f} to {v['quartiles'][1]:.2f})"]
        for v in result["power_law"]
    ]  # fmt: skip
    return f"{text}\n{markdown(('range', 'published A', 'A, median (quartiles)'), rows)}"


def _spread(values: Sequence[float], form: str) -> str:
    return f"{values[0]:{form}} ± {values[1]:{form}}"


def _wrong_R0(result: Record) -> str:
    rows = []
    for v in result["wrong_R0"]:
        laws = [f"{v[p][0]:.3f}, {v[p][1]:.2f}, {v[p][2]:.0f}" for p in ("ours", "paper, finer")]
        rows.append([f"{v['R0']:.2f}", *laws])
    text = """## A wrong R0

The curve of ScaleRL with R0 = .30, without noise, evaluated from 1.5k to 8k and fitted with an R0 that is
assumed: A, B, C_mid. An R0 off by .05 moves B by a quarter: measure it before the first step."""
    return f"{text}\n\n{markdown(('R0 assumed', 'ours', 'paper, finer'), rows)}"
