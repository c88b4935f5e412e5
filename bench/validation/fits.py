"""One simulated run, fitted by our procedure and by the paper's."""

from __future__ import annotations

import time
from typing import Any

from bench.validation.scenarios import PAPER_RUNS, PaperRun, Points, Scenario, simulate
from trainer.scaling import Fit, Sigmoid, fit
from trainer.scaling.curve.paper import PaperGrid, paper_fit

FINER = PaperGrid(C_mid=(300.0, 30_000.0, 200), spacing="log")  # with more values of C_mid than the paper's


def measure(task: tuple[Scenario, str, int, int]) -> dict[str, Any]:
    """One run's record: each procedure's estimates, ours as [truth, value, low, high] by quantity."""
    scenario, name, i, seed = task
    run = PAPER_RUNS[name]
    points = simulate(scenario, run, i, seed)
    began = time.perf_counter()
    fitted = ours(points)
    record: dict[str, Any] = {
        "case": scenario.name, "row": name, "i": i, "seed": seed,
        "fit_ms": 1e3 * (time.perf_counter() - began),
        "identified": fitted.identified, "flags": list(fitted.flags), 
        "autocorrelated_prob": fitted.autocorrelated_prob,
        "ours": {**_estimates(points, fitted), "far": _far(points, run, fitted.sigmoid)},
    }  # fmt: skip
    if scenario.paper:
        for key in ("paper", "paper, finer"):
            curve = paper(points, key)
            record[key] = {"A": curve.A, "B": curve.B, "C_mid": curve.C_mid, "far": _far(points, run, curve)}
    if scenario.noise == "outliers":
        clean = simulate(scenario, run, i, seed, "independent")
        record["A_moved"] = fitted.A.value - ours(clean).A.value
        record["A_moved_paper"] = record["paper"]["A"] - paper(clean, "paper").A
    return record


def ours(points: Points) -> Fit:
    """The project's fit."""
    return fit(points.compute, points.reward, points.se, R0=points.R0, R0_se=points.R0_se)


def paper(points: Points, procedure: str) -> Sigmoid:
    """The curve fitted by the paper's procedure, with the grid it prints or a finer one."""
    assert points.R0 is not None, "the paper's procedure needs R0"
    return paper_fit(
        points.compute, points.reward, points.R0, FINER if procedure == "paper, finer" else None
    ).sigmoid


def truths(points: Points) -> dict[str, float]:
    """The true values of the estimated quantities; `2x` is the reward at twice the last compute."""
    curve = points.curve
    at_2x = float(curve.reward(2 * points.compute[-1]))
    return {"A": curve.A, "B": curve.B, "C_mid": curve.C_mid, "2x": at_2x}


def _estimates(points: Points, fitted: Fit) -> dict[str, list[float]]:
    estimates = {"A": fitted.A, "B": fitted.B, "C_mid": fitted.C_mid, "2x": fitted.at_2x}
    return {
        key: [truth, estimates[key].value, estimates[key].low, estimates[key].high]
        for key, truth in truths(points).items()
    }


def _far(points: Points, run: PaperRun, curve: Sigmoid) -> float:
    """Error of the reward predicted where the paper predicts it, against the curve without noise."""
    return float(curve.reward(run.far) - points.curve.reward(run.far))
