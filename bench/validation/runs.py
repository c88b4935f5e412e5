"""Does the fit find the truth? Simulated runs of the paper's published curves, fitted by both procedures.

python -m bench validation                   1,000 runs well-specified, 300 of each other kind; half an hour
python -m bench validation --runs 40         a first look
python -m bench validation --record          writes the tables of docs/validation.md and its picture
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial

from bench.harness import ROOT, Case, Row
from bench.validation.document import document
from bench.validation.plot import draw
from bench.validation.scenarios import PAPER_RUNS, PROCEDURES, SCENARIOS, PaperRun, Points, Scenario, simulate
from trainer.scaling import Fit, Sigmoid, fit
from trainer.scaling.curve.paper import PaperGrid, paper_fit

OPTIONS = {"runs": (1000, "simulated runs of the first kind")}
PARALLEL = True
SEED = 2510
FINER = PaperGrid(C_mid=(300.0, 30_000.0, 200), spacing="log")  # with more values of C_mid than the paper's
BEGIN, END = (f"<!-- made by python -m bench validation: {edge} -->" for edge in ("begin", "end"))


def cases(options: Namespace) -> Iterator[Case]:
    """Every run of every kind."""
    for scenario in SCENARIOS:
        for row in scenario.rows:
            for i in range(scenario.count(options.runs)):
                yield f"{scenario.name}, {row}, {i}", partial(measure, scenario, row, i, SEED)


def measure(scenario: Scenario, row: str, i: int, seed: int) -> Row:
    """Each procedure's estimates of one run, ours as [truth, value, low, high] by quantity."""
    run = PAPER_RUNS[row]
    points = simulate(scenario, run, i, seed)
    fitted = ours(points)
    values = {"A": fitted.A, "B": fitted.B, "C_mid": fitted.C_mid, "2x": fitted.at_2x}
    estimates = {k: [x, values[k].value, values[k].low, values[k].high] for k, x in truths(points).items()}
    record: Row = {
        "kind": scenario.name, "row": row, "identified": fitted.identified,
        "ours": {**estimates, "far": _far(points, run, fitted.sigmoid)},
    }  # fmt: skip
    if scenario.paper:
        for key in PROCEDURES[1:]:
            curve = paper(points, key)
            record[key] = {"A": curve.A, "B": curve.B, "C_mid": curve.C_mid, "far": _far(points, run, curve)}
    if scenario.noise == "outliers":
        clean = simulate(scenario, run, i, seed, "normal")
        record["A_moved"] = fitted.A.value - ours(clean).A.value
        record["A_moved_paper"] = record["paper"]["A"] - paper(clean, "paper").A
    return record


def ours(points: Points) -> Fit:
    """The project's fit."""
    return fit(points.compute, points.reward, points.se, R0=points.R0, R0_se=points.R0_se)


def paper(points: Points, procedure: str) -> Sigmoid:
    """The curve fitted by the paper's procedure, with the grid it prints or a finer one."""
    assert points.R0 is not None, "the paper's procedure needs R0"
    grid = FINER if procedure == "paper, finer" else None
    return paper_fit(points.compute, points.reward, points.R0, grid).sigmoid


def truths(points: Points) -> dict[str, float]:
    """The true values of the estimated quantities; `2x` is the reward at twice the last compute."""
    curve = points.curve
    at_2x = float(curve.reward(2 * points.compute[-1]))
    return {"A": curve.A, "B": curve.B, "C_mid": curve.C_mid, "2x": at_2x}


def _far(points: Points, run: PaperRun, curve: Sigmoid) -> float:
    """Error of the reward predicted where the paper predicts it, against the curve without noise."""
    return float(curve.reward(run.far) - points.curve.reward(run.far))


def describe(head: Row, runs: Sequence[Row]) -> str:
    """The tables of the page."""
    return document(runs)


def publish(head: Row, runs: Sequence[Row]) -> None:
    """Replace the generated part of the page, and draw its picture."""
    page = ROOT / "docs" / "validation.md"
    before, _, rest = page.read_text().partition(BEGIN)
    assert END in rest, f"{page}: expected the lines {BEGIN!r} and {END!r}"
    page.write_text(f"{before}{BEGIN}\n{document(runs)}\n{END}{rest.partition(END)[2]}")
    draw(runs, page.with_suffix(".png"))
