"""What the simulated runs say: every number of docs/validation.md, from their records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.sources import RANGES
from bench.validation.cases import CASES, LONG, OFF_GRID, OUTLIERS, ROWS, TOO_SHORT, WEAK, WELL
from bench.validation.intervals import INTERVAL_CASES, KEYS, METHODS

Array = NDArray[np.float64]
Record = dict[str, Any]
Found = dict[str, Any]

WORST_OF_TEN = 2.6  # standard errors that the largest of ten rows stays within, 19 times in 20
QUANTITIES = ("A", "B", "C_mid", "2x")
PROCEDURES = ("ours", "paper", "paper, finer")


def summary(records: Sequence[Record]) -> Found:
    """All numbers, by table."""
    by_case = {case.name: [r for r in records if r["case"] == case.name] for case in CASES}
    good = [r for r in by_case[WELL] if r["row"] != WEAK]
    found: Found = {
        "accuracy": {name: _by_row(by_case[name], accuracy) for name in (WELL, OFF_GRID)},
        "coverage": {name: coverage(runs) for name, runs in by_case.items() if runs and name != TOO_SHORT
                     and not name.startswith(LONG)},
        "coverage_by_row": _by_row(by_case[WELL], coverage),
        "flagged": {
            "the paper's ranges": flagged(good),
            f"the paper's range, {WEAK}": flagged([r for r in by_case[WELL] if r["row"] == WEAK]),
            **{f"{TOO_SHORT}, {k}": v for k, v in _by_row(by_case[TOO_SHORT], flagged).items()},
            TOO_SHORT: flagged(by_case[TOO_SHORT]),
        },
        "outliers": {
            f"all but {WEAK}": outliers([r for r in by_case[OUTLIERS] if r["row"] != WEAK]),
            WEAK: outliers([r for r in by_case[OUTLIERS] if r["row"] == WEAK]),
        },
        "ranges": _ranges(by_case),
        "fit_ms": float(np.median([r["fit_ms"] for r in records])),
    }  # fmt: skip
    return {**found, "bars": bars(found)}


def _by_row(records: Sequence[Record], of: Any) -> Found:
    rows = {name: [r for r in records if r["row"] == name] for name in ROWS}
    return {name: of(runs) for name, runs in rows.items() if runs}


def errors(records: Iterable[Record], procedure: str, key: str) -> Array:
    """Estimate less truth, of A, B, C_mid (relative) or of the reward far ahead."""
    values = []
    for r in records:
        if key == "far":
            values.append(r[procedure]["far"])
            continue
        truth = r["ours"][key][0]
        estimate = r["ours"][key][1] if procedure == "ours" else r[procedure][key]
        values.append((estimate - truth) / (truth if key == "C_mid" else 1))
    return np.array(values)


def accuracy(records: Sequence[Record]) -> Found:
    """Median and 95 % of the absolute error, and how ours differs from the paper's on the same runs."""
    found: Found = {"runs": len(records)}
    for procedure in PROCEDURES:
        off = {key: np.abs(errors(records, procedure, key)) for key in ("A", "B", "C_mid", "far")}
        found[procedure] = {k: [float(np.median(x)), float(np.quantile(x, 0.95))] for k, x in off.items()}
    mine = np.abs(errors(records, "ours", "far"))
    for procedure in PROCEDURES[1:]:
        more = mine - np.abs(errors(records, procedure, "far"))
        found[f"ours − {procedure}"] = [float(more.mean()), _error_of_mean(more)]
    return found


def _error_of_mean(x: Array) -> float:
    return float(x.std(ddof=1) / len(x) ** 0.5) if len(x) > 1 else float("nan")


def coverage(records: Sequence[Record]) -> Found:
    """Share of intervals that hold the truth; that of A also among the runs said to be identified."""
    held = {key: np.array([_holds(r["ours"][key]) for r in records]) for key in QUANTITIES}
    told = np.array([r["identified"] for r in records])
    widths = [r["ours"]["A"][3] - r["ours"]["A"][2] for r in records]
    return {
        "runs": len(records),
        **{key: float(x.mean()) for key, x in held.items()},
        "identified": float(told.mean()),
        "A, identified": float(held["A"][told].mean()) if told.any() else float("nan"),
        "width of A": float(np.median(widths)),
    }


def _holds(estimate: Sequence[float]) -> bool:
    truth, _, low, high = estimate
    return low <= truth <= high


def intervals_by_method(records: Sequence[Record]) -> Found:
    """Per case and kind of interval: share that holds the truth, and the median width of A's."""
    found: Found = {}
    for case in INTERVAL_CASES:
        runs = [r for r in records if r["case"] == case.name]
        found[case.name] = {"runs": len(runs)}
        for method in METHODS:
            held = {key: float(np.mean([_holds(r[method][key]) for r in runs])) for key in KEYS}
            width = float(np.median([r[method]["A"][3] - r[method]["A"][2] for r in runs]))
            found[case.name][method] = {**held, "width of A": width}
    return found


def flagged(records: Sequence[Record]) -> Found:
    """Share of runs whose ceiling is said not to be identified."""
    return {"runs": len(records), "share": float(np.mean([not r["identified"] for r in records]))}


def outliers(records: Sequence[Record]) -> Found:
    """How far outliers move A from what it is for the same run without them: median and 95 %."""
    found: Found = {"runs": len(records)}
    for name, key in (("ours", "A_moved"), ("paper", "A_moved_paper")):
        moved = np.abs([r[key] for r in records])
        found[name] = [float(np.median(moved)), float(np.quantile(moved, 0.95))]
    return found


def _ranges(by_case: dict[str, list[Record]]) -> list[Found]:
    """A and B of the long run by range: median and sd over the runs, beside what the paper printed."""
    found = []
    for published in (r for r in RANGES if r.law == "sigmoid"):
        runs = by_case[f"{LONG} {published.low:g}–{published.high:g}"]
        row: Found = {"low": published.low, "high": published.high, "published": [published.A, published.B]}
        for procedure in PROCEDURES:
            row[procedure] = {}
            for key in ("A", "B"):
                values = [r[procedure][key][1] if procedure == "ours" else r[procedure][key] for r in runs]
                row[procedure][key] = [float(np.median(values)), float(np.std(values))]
        found.append(row)
    return found


def bars(found: Found) -> list[Found]:
    """What was promised, what was found, and whether that holds."""
    rows = {k: v for k, v in found["accuracy"][WELL].items() if k != WEAK}
    cover, flags = found["coverage"][WELL], found["flagged"]
    moved = found["outliers"][f"all but {WEAK}"]["ours"]

    def worst(key: str, at: int) -> float:
        return max(float(v["ours"][key][at]) for v in rows.values())

    result = [
        _bar("error of A, median, worst row", worst("A", 0), "≤ .01", worst("A", 0) <= 0.01),
        _bar("error of A, 95 %, worst row", worst("A", 1), "≤ .02", worst("A", 1) <= 0.02),
        _bar("error far ahead, median, worst row", worst("far", 0), "≤ .005", worst("far", 0) <= 0.005),
    ]
    for name, case in (("laws off the grid", OFF_GRID), ("laws as printed", WELL)):
        for other in PROCEDURES[1:]:
            pairs = [v[f"ours − {other}"] for v in found["accuracy"][case].values()]
            mean, error = max(pairs, key=lambda p: p[0] - WORST_OF_TEN * p[1])
            what = f"error far ahead, ours − {other}, {name}, worst row"
            bar = f"≤ 0 within {WORST_OF_TEN:g} · {error:.5f}"
            result.append(_bar(what, mean, bar, mean <= WORST_OF_TEN * error))
    for key in QUANTITIES:
        result.append(_bar(f"90 % intervals of {key} hold the truth", cover[key], ".87 to .93",
                           0.87 <= cover[key] <= 0.93))  # fmt: skip
    few, many = flags[TOO_SHORT]["share"], flags["the paper's ranges"]["share"]
    return [
        *result,
        _bar("fit of 1.5k–4k: flagged", few, "≥ .95", few >= 0.95),
        _bar("the paper's ranges: flagged", many, "≤ .05", many <= 0.05),
        _bar("5 % outliers move A, median", moved[0], "≤ .01", moved[0] <= 0.01),
        _bar("5 % outliers move A, 95 %", moved[1], "≤ .01", moved[1] <= 0.01),
    ]


def _bar(what: str, value: float, bar: str, holds: bool) -> Found:
    return {"what": what, "found": value, "bar": bar, "holds": bool(holds)}
