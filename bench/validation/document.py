"""The generated part of docs/validation.md, from the rows of the simulated runs."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bench.harness import Row
from bench.sources import RANGES
from bench.table import number, table
from bench.validation.scenarios import (
    LONG,
    NOISE,
    OFF_GRID,
    OUTLIERS,
    PAPER_RUNS,
    PROCEDURES,
    SCENARIOS,
    TOO_SHORT,
    WEAK,
    WELL,
)

Array = NDArray[np.float64]
Runs = Sequence[Row]

WORST_OF_TEN = 2.6  # standard errors: the bound of the largest of ten rows, 19 times in 20
QUANTITIES = ("A", "B", "C_mid", "2x")
LINES = f"rows of Table 1 but {WEAK}, which has its own lines below."


def document(runs: Runs) -> str:
    """The page in Markdown: the bars, then every table."""
    head = f"{len(runs)} simulated runs; noise of sd {NOISE:g}."
    sections = (_bars, _accuracy, _far, _coverage, _flags, _outliers, _ranges)
    return "\n\n".join([head, *(section(runs) for section in sections)])


def of_kind(runs: Runs, kind: str) -> list[Row]:
    """The runs of a scenario."""
    return [run for run in runs if run["kind"] == kind]


def by_row(runs: Runs, kind: str) -> dict[str, list[Row]]:
    """The runs of a scenario by the paper's run."""
    rows = {name: [run for run in of_kind(runs, kind) if run["row"] == name] for name in PAPER_RUNS}
    return {name: group for name, group in rows.items() if group}


def errors(runs: Runs, procedure: str, key: str) -> Array:
    """Absolute errors of A, B, C_mid (relative) or of the reward far ahead."""
    if key == "far":
        return np.abs([run[procedure]["far"] for run in runs])
    truth = np.array([run["ours"][key][0] for run in runs])
    values = [run["ours"][key][1] if procedure == "ours" else run[procedure][key] for run in runs]
    return np.abs(values - truth) / (truth if key == "C_mid" else 1)


def far_beyond(runs: Runs, procedure: str) -> tuple[float, float]:
    """Our error far ahead less the paper's on the same runs: mean, standard error."""
    more = errors(runs, "ours", "far") - errors(runs, procedure, "far")
    return float(more.mean()), float(more.std(ddof=1) / len(more) ** 0.5) if len(more) > 1 else np.nan


def coverage(runs: Runs) -> dict[str, float]:
    """Share of intervals that hold the truth; for A also among the runs whose ceiling is identified."""
    estimates = {key: np.array([run["ours"][key] for run in runs]).T for key in QUANTITIES}
    holds = {key: (low <= truth) & (truth <= high) for key, (truth, _, low, high) in estimates.items()}
    identified = np.array([run["identified"] for run in runs])
    return {
        **{key: float(x.mean()) for key, x in holds.items()},
        "identified": float(identified.mean()),
        "A, where identified": float(holds["A"][identified].mean()) if identified.any() else np.nan,
        "width of A": float(np.median(estimates["A"][3] - estimates["A"][2])),
    }


def moved(runs: Runs, weak: bool) -> tuple[list[Row], Array, Array]:
    """The runs with outliers, and by how much these move A: ours, and the paper's."""
    group = [run for run in of_kind(runs, OUTLIERS) if (run["row"] == WEAK) == weak]
    ours, paper = (np.abs([run[key] for run in group]) for key in ("A_moved", "A_moved_paper"))
    return group, ours, paper


def flagged(runs: Runs) -> float:
    """Share of runs whose ceiling the fit calls not identified."""
    return float(np.mean([not run["identified"] for run in runs]))


def bars(runs: Runs) -> list[tuple[str, float, str, bool]]:
    """Each bar: its title, the measured value, the limit, and whether it holds."""
    rows = {name: group for name, group in by_row(runs, WELL).items() if name != WEAK}
    lines: list[tuple[str, float, str, bool]] = []

    def add(title: str, value: float, limit: float, text: str = "", low: float = -np.inf) -> None:
        lines.append((title, value, text or f"≤ {limit:g}", bool(low <= value <= limit)))

    def worst(key: str, quantile: float) -> float:
        return max(float(np.quantile(errors(group, "ours", key), quantile)) for group in rows.values())

    add("error of A, median, worst row", worst("A", 0.5), 0.01)
    add("error of A, 95 %, worst row", worst("A", 0.95), 0.02)
    add("error far ahead, median, worst row", worst("far", 0.5), 0.005)
    for name, kind in (("laws off the grid", OFF_GRID), ("laws as printed", WELL)):
        for other in PROCEDURES[1:]:
            pairs = [far_beyond(group, other) for group in by_row(runs, kind).values()]
            mean, error = max(pairs, key=lambda p: p[0] - WORST_OF_TEN * p[1])
            text = f"≤ 0 within {WORST_OF_TEN:g} · {error:.5f}"
            title = f"error far ahead, ours − {other}, {name}, worst row"
            add(title, mean, WORST_OF_TEN * error, text)
    shares = coverage(of_kind(runs, WELL))
    for key in QUANTITIES:
        add(f"90 % intervals of {key} hold the truth", shares[key], 0.93, "0.87 to 0.93", low=0.87)
    add("fit of 1.5k–4k: flagged", flagged(of_kind(runs, TOO_SHORT)), 1.0, "≥ 0.95", low=0.95)
    add("the paper's ranges: flagged", flagged([run for group in rows.values() for run in group]), 0.05)
    for name, quantile in (("median", 0.5), ("95 %", 0.95)):
        add(f"5 % outliers move A, {name}", float(np.quantile(moved(runs, False)[1], quantile)), 0.01)
    return lines


def _bars(runs: Runs) -> str:
    rows = [[title, f"{value:.4f}", limit, "yes" if holds else "**no**"]
            for title, value, limit, holds in bars(runs)]  # fmt: skip
    head = ("measure", "found", "bar", "holds")
    return f"## Bars\n\nErrors, flags and outliers: {LINES}\n\n{table(head, rows)}"


def _quantiles(x: Array, form: str) -> str:
    return " / ".join(format(np.quantile(x, q), form) for q in (0.5, 0.95))


def _accuracy(runs: Runs) -> str:
    text = "## Error of one fit\n\nMedian / 95 % of the absolute error; C_mid in per cent."
    head = ("row, fit to", "ours: A", "B", "C_mid, %", "paper: A", "paper, finer: A")
    for kind, note in (
        (WELL, "**Laws as printed.** Every A is a node of the paper's grid, some C_mid are near one."),
        (OFF_GRID, "**Laws off the grid**: A and C_mid anywhere in the grid's cell around it, B within 5 %."),
    ):
        rows = []
        for name, group in by_row(runs, kind).items():
            ours = [errors(group, "ours", key) for key in ("A", "B", "C_mid")]
            cells = [_quantiles(x, form) for x, form in zip(ours[:2], (".4f", ".2f"), strict=True)]
            cells.append(_quantiles(100 * ours[2], ".1f"))
            cells += [_quantiles(errors(group, p, "A"), ".4f") for p in PROCEDURES[1:]]
            rows.append([f"{name}, {PAPER_RUNS[name].high / 1000:g}k", *cells])
        text += f"\n\n{note}\n\n{table(head, rows)}"
    return text


def _far(runs: Runs) -> str:
    text = (
        "## Error of the reward far ahead\n\nMedian; and by how much our error is larger (+) or smaller (−)\n"
        "than the paper's procedure on the same runs, mean ± its standard error."
    )
    for kind in (WELL, OFF_GRID):
        rows = []
        for name, group in by_row(runs, kind).items():
            more = ["{:+.4f} ± {:.4f}".format(*far_beyond(group, p)) for p in PROCEDURES[1:]]
            medians = (f"{np.median(errors(group, p, 'far')):.4f}" for p in PROCEDURES)
            rows.append([f"{name}, at {PAPER_RUNS[name].far / 1000:g}k", str(len(group)), *medians, *more])
        head = (f"{kind}: row", "runs", *PROCEDURES, "ours − paper", "ours − paper, finer")
        text += f"\n\n{table(head, rows)}"
    return text


def _coverage(runs: Runs) -> str:
    text = (
        "## How often 90 % intervals hold the truth\n\n2x: the reward at twice the last compute. "
        "Monte-Carlo error of a share: ±.01 at 1,000 runs, ±.017 at 300."
    )
    noises = {s.name: of_kind(runs, s.name) for s in SCENARIOS if s.name != TOO_SHORT and s.rows != (LONG,)}
    for first, groups in (("noise", noises), (f"{WELL}, by row", by_row(runs, WELL))):
        shares = {name: coverage(group) for name, group in groups.items() if group}
        rows = [
            [name, str(len(groups[name])), *(number(x, ".3f") for x in values.values())]
            for name, values in shares.items()
        ]
        text += f"\n\n{table((first, 'runs', *next(iter(shares.values()))), rows)}"
    return text


def _flags(runs: Runs) -> str:
    well = of_kind(runs, WELL)
    groups = {
        "the paper's ranges": [run for run in well if run["row"] != WEAK],
        f"the paper's range, {WEAK}": [run for run in well if run["row"] == WEAK],
        **{f"{TOO_SHORT}, {name}": group for name, group in by_row(runs, TOO_SHORT).items()},
        TOO_SHORT: of_kind(runs, TOO_SHORT),
    }
    rows = [[name, str(len(group)), f"{flagged(group):.3f}"] for name, group in groups.items()]
    return f"## Which ceilings are identified\n\n{table(('fit of', 'runs', 'flagged'), rows)}"


def _outliers(runs: Runs) -> str:
    rows = []
    for name, weak in ((f"all but {WEAK}", False), (WEAK, True)):
        group, *both = moved(runs, weak)
        rows.append([name, str(len(group)), *(_quantiles(x, ".4f") for x in both)])
    text = (
        "## 5 % of the points off by ±.1\n\nHow far A moves from the same run's without them, median / 95 %."
    )
    return f"{text}\n\n{table(('rows', 'runs', 'ours', 'paper'), rows)}"


def _ranges(runs: Runs) -> str:
    rows = []
    for published in RANGES:
        group, cells = of_kind(runs, f"{LONG} {published.low:g}–{published.high:g}"), []
        for p in PROCEDURES:
            values = [[run[p][key][1] if p == "ours" else run[p][key] for run in group] for key in "AB"]
            (A, B), (A_sd, B_sd) = np.median(values, 1), np.std(values, 1)
            cells.append(f"{A:.3f} ± {A_sd:.3f}, {B:.2f} ± {B_sd:.2f}")
        name = f"{published.low / 1000:g}k–{published.high / 1000:g}k"
        rows.append([name, f"{published.A:.3f}, {published.B:.2f}", *cells])
    return f"""## The range of the fit

A, B of the curve of {LONG} (A .645, B 1.70), fitted over several ranges: median ± sd over runs. The
paper's points are not published; the second column has its own fits of them. A simulated run follows its
curve up to noise and gives the same A and B over every range: the second column's differences are the run's.

{table(("range", "published", *PROCEDURES), rows)}"""
