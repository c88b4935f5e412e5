"""One simulated run, fitted by both procedures: what they say, beside the truth."""

from __future__ import annotations

import time
from typing import Any

from bench.validation.cases import ROWS, Case, Points, Row, simulate
from trainer.scaling import Fit, Sigmoid, fit
from trainer.scaling.alternatives.paper import PaperGrid, paper_fit

FINER = PaperGrid(
    C_mid=(300.0, 30_000.0, 200), spacing="log"
)  # the paper's procedure without its coarse C_mid


def measure(task: tuple[Case, str, int, int]) -> dict[str, Any]:
    """Numbers of one run: per procedure its estimates, and per quantity [truth, value, low, high] of ours."""
    case, name, i, seed = task
    row = ROWS[name]
    points = simulate(case, row, i, seed)
    began = time.perf_counter()
    found = ours(points)
    record: dict[str, Any] = {
        "case": case.name, "row": name, "i": i, "seed": seed,
        "fit_ms": 1e3 * (time.perf_counter() - began),
        "identified": found.identified, "flags": list(found.flags), "wander": found.wander,
        "ours": {**_estimates(points, found), "far": _far(points, row, found.law)},
    }  # fmt: skip
    if case.paper:
        for key in ("paper", "paper, finer"):
            law = paper(points, key)
            record[key] = {"A": law.A, "B": law.B, "C_mid": law.C_mid, "far": _far(points, row, law)}
    if case.noise == "outliers":
        clean = simulate(case, row, i, seed, "independent")
        record["A_moved"] = found.A.value - ours(clean).A.value
        record["A_moved_paper"] = record["paper"]["A"] - paper(clean, "paper").A
    return record


def ours(points: Points) -> Fit:
    """The project's fit."""
    return fit(points.compute, points.reward, points.se, R0=points.R0, R0_se=points.R0_se)


def paper(points: Points, which: str) -> Sigmoid:
    """The law of the paper's procedure, with the grid it prints or a finer one."""
    assert points.R0 is not None, "the paper's procedure needs R0"
    return paper_fit(points.compute, points.reward, points.R0, FINER if which == "paper, finer" else None).law


def truths(points: Points) -> dict[str, float]:
    """What intervals are held against; `2x` is the reward at twice the last compute."""
    law = points.law
    two = float(law.reward(2 * points.compute[-1]))
    return {"A": law.A, "B": law.B, "C_mid": law.C_mid, "2x": two}


def _estimates(points: Points, found: Fit) -> dict[str, list[float]]:
    told = {"A": found.A, "B": found.B, "C_mid": found.C_mid, "2x": found.at_2x}
    return {
        key: [truth, told[key].value, told[key].low, told[key].high] for key, truth in truths(points).items()
    }


def _far(points: Points, row: Row, law: Sigmoid) -> float:
    """Error of the reward predicted where the paper predicts it, against the law without noise."""
    return float(law.reward(row.far) - points.law.reward(row.far))
