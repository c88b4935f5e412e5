"""Every number of the generated part of docs/validation.md, from the records of the simulated runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from bench.records import Record
from bench.sources import RANGES
from bench.validation.runs import PROCEDURES
from bench.validation.scenarios import LONG, OFF_GRID, OUTLIERS, PAPER_RUNS, SCENARIOS, TOO_SHORT, WEAK, WELL

Array = NDArray[np.float64]

WORST_OF_TEN = 2.6  # standard errors: the bound of the largest of ten rows, 19 times in 20
QUANTITIES = ("A", "B", "C_mid", "2x")


def summary(records: Sequence[Record]) -> Record:
    """All numbers, by table."""
    by_name = {s.name: [r for r in records if r["case"] == s.name] for s in SCENARIOS}
    good = [r for r in by_name[WELL] if r["row"] != WEAK]
    result: Record = {
        "accuracy": {name: _by_row(by_name[name], accuracy) for name in (WELL, OFF_GRID)},
        "coverage": {name: coverage(runs) for name, runs in by_name.items() if runs and name != TOO_SHORT
                     and not name.startswith(LONG)},
        "coverage_by_row": _by_row(by_name[WELL], coverage),
        "flagged": {
            "the paper's ranges": flagged(good),
            f"the paper's range, {WEAK}": flagged([r for r in by_name[WELL] if r["row"] == WEAK]),
            **{f"{TOO_SHORT}, {k}": v for k, v in _by_row(by_name[TOO_SHORT], flagged).items()},
            TOO_SHORT: flagged(by_name[TOO_SHORT]),
        },
        "outliers": {
            f"all but {WEAK}": outliers([r for r in by_name[OUTLIERS] if r["row"] != WEAK]),
            WEAK: outliers([r for r in by_name[OUTLIERS] if r["row"] == WEAK]),
        },
        "ranges": _ranges(by_name),
        "fit_ms": float(np.median([r["fit_ms"] for r in records])),
    }  # fmt: skip
    return {**result, "bars": bars(result)}


def _by_row(records: Sequence[Record], summarise: Callable[[Sequence[Record]], Record]) -> Record:
    rows = {name: [r for r in records if r["row"] == name] for name in PAPER_RUNS}
    return {name: summarise(runs) for name, runs in rows.items() if runs}


def errors(records: Iterable[Record], procedure: str, key: str) -> Array:
    """Errors of A, B, C_mid (relative) or of the reward far ahead."""
    values = []
    for r in records:
        if key == "far":
            values.append(r[procedure]["far"])
            continue
        truth = r["ours"][key][0]
        estimate = r["ours"][key][1] if procedure == "ours" else r[procedure][key]
        values.append((estimate - truth) / (truth if key == "C_mid" else 1))
    return np.array(values)


def accuracy(records: Sequence[Record]) -> Record:
    """Median and 95 % quantile of absolute errors, and their difference from the paper's on the same runs."""
    result: Record = {"runs": len(records)}
    for procedure in PROCEDURES:
        absolute = {key: np.abs(errors(records, procedure, key)) for key in ("A", "B", "C_mid", "far")}
        result[procedure] = {
            k: [float(np.median(x)), float(np.quantile(x, 0.95))] for k, x in absolute.items()
        }
    mine = np.abs(errors(records, "ours", "far"))
    for procedure in PROCEDURES[1:]:
        more = mine - np.abs(errors(records, procedure, "far"))
        result[f"ours − {procedure}"] = [float(more.mean()), _error_of_mean(more)]
    return result


def _error_of_mean(x: Array) -> float:
    return float(x.std(ddof=1) / len(x) ** 0.5) if len(x) > 1 else float("nan")


def coverage(records: Sequence[Record]) -> Record:
    """Share of intervals that hold the truth; for A also among the runs whose ceiling is identified."""
    held = {key: np.array([_holds(r["ours"][key]) for r in records]) for key in QUANTITIES}
    identified = np.array([r["identified"] for r in records])
    widths = [r["ours"]["A"][3] - r["ours"]["A"][2] for r in records]
    return {
        "runs": len(records),
        **{key: float(x.mean()) for key, x in held.items()},
        "identified": float(identified.mean()),
        "A, identified": float(held["A"][identified].mean()) if identified.any() else float("nan"),
        "width of A": float(np.median(widths)),
    }


def _holds(estimate: Sequence[float]) -> bool:
    truth, _, low, high = estimate
    return low <= truth <= high


def flagged(records: Sequence[Record]) -> Record:
    """Share of runs whose ceiling the fit calls not identified."""
    return {"runs": len(records), "share": float(np.mean([not r["identified"] for r in records]))}


def outliers(records: Sequence[Record]) -> Record:
    """The change of A that outliers cause, against the same run without them: median and 95 %."""
    result: Record = {"runs": len(records)}
    for name, key in (("ours", "A_moved"), ("paper", "A_moved_paper")):
        moved = np.abs([r[key] for r in records])
        result[name] = [float(np.median(moved)), float(np.quantile(moved, 0.95))]
    return result


def _ranges(by_name: dict[str, list[Record]]) -> list[Record]:
    """A and B of the long run by range: median and sd over the runs, and the paper's printed values."""
    result = []
    for published in (r for r in RANGES if r.family == "sigmoid"):
        runs = by_name[f"{LONG} {published.low:g}–{published.high:g}"]
        row: Record = {"low": published.low, "high": published.high, "published": [published.A, published.B]}
        for procedure in PROCEDURES:
            row[procedure] = {}
            for key in ("A", "B"):
                values = [r[procedure][key][1] if procedure == "ours" else r[procedure][key] for r in runs]
                row[procedure][key] = [float(np.median(values)), float(np.std(values))]
        result.append(row)
    return result


def bars(result: Record) -> list[Record]:
    """Each bar: the measured value, the limit, and whether it holds."""
    rows = {k: v for k, v in result["accuracy"][WELL].items() if k != WEAK}
    cover, flags = result["coverage"][WELL], result["flagged"]
    moved = result["outliers"][f"all but {WEAK}"]["ours"]
    lines: list[Record] = []

    def add(title: str, value: float, limit: float, text: str = "", low: float = -np.inf) -> None:
        holds = bool(low <= value <= limit)
        lines.append({"what": title, "found": value, "bar": text or f"≤ {short(limit)}", "holds": holds})

    def worst(key: str, quantile: int) -> float:  # 0: median, 1: 95 %
        return max(float(v["ours"][key][quantile]) for v in rows.values())

    add("error of A, median, worst row", worst("A", 0), 0.01)
    add("error of A, 95 %, worst row", worst("A", 1), 0.02)
    add("error far ahead, median, worst row", worst("far", 0), 0.005)
    for name, scenario in (("laws off the grid", OFF_GRID), ("laws as printed", WELL)):
        for other in PROCEDURES[1:]:
            pairs = [v[f"ours − {other}"] for v in result["accuracy"][scenario].values()]
            mean, error = max(pairs, key=lambda p: p[0] - WORST_OF_TEN * p[1])
            text = f"≤ 0 within {WORST_OF_TEN:g} · {error:.5f}"
            title = f"error far ahead, ours − {other}, {name}, worst row"
            add(title, mean, WORST_OF_TEN * error, text)
    for key in QUANTITIES:
        add(f"90 % intervals of {key} hold the truth", cover[key], 0.93, ".87 to .93", low=0.87)
    add("fit of 1.5k–4k: flagged", flags[TOO_SHORT]["share"], 1.0, "≥ .95", low=0.95)
    add("the paper's ranges: flagged", flags["the paper's ranges"]["share"], 0.05)
    add("5 % outliers move A, median", moved[0], 0.01)
    add("5 % outliers move A, 95 %", moved[1], 0.01)
    return lines


def short(x: float) -> str:
    """A number below 1 as the page prints it: .05."""
    return f"{x:g}".removeprefix("0")
