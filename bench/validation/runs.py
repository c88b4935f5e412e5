"""Do the curve's intervals hold the truth? Simulated runs of the paper's published curves. [30 min]

python -m bench validation                   1,000 runs well-specified, 300 of each other kind; half an hour
python -m bench validation --runs 40         a first look
python -m bench validation --record          writes the tables of docs/validation.md
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from bench.harness import ROOT, Case, Row
from bench.validation.document import document
from bench.validation.scenarios import PAPER_RUNS, PROCEDURES, R0, SCENARIOS, Scenario, Simulated, simulate
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
    simulated = simulate(scenario, run, i, seed)
    fitted = ours(simulated)
    values = {"A": fitted.A, "B": fitted.B, "C_mid": fitted.C_mid, "2x": fitted.at_2x}
    estimates = {k: [x, values[k].value, values[k].low, values[k].high] for k, x in truths(simulated).items()}

    def far(curve: Sigmoid) -> float:
        """Error of the reward where the paper predicts it, against the curve without noise."""
        return float(curve.reward(run.far) - simulated[0].reward(run.far))

    record: Row = {"kind": scenario.name, "row": row, "identified": fitted.identified}
    record["ours"] = {**estimates, "far": far(fitted.sigmoid)}
    if scenario.paper:
        for key in PROCEDURES[1:]:
            curve = paper(simulated, key)
            record[key] = {"A": curve.A, "B": curve.B, "C_mid": curve.C_mid, "far": far(curve)}
    if scenario.noise == "outliers":
        clean = simulate(scenario, run, i, seed, "normal")
        record["A_moved"] = fitted.A.value - ours(clean).A.value
        record["A_moved_paper"] = record["paper"]["A"] - paper(clean, "paper").A
    return record


def ours(simulated: Simulated) -> Fit:
    """The project's fit."""
    return fit(simulated[1])


def paper(simulated: Simulated, procedure: str) -> Sigmoid:
    """The curve fitted by the paper's procedure, with the grid it prints or a finer one; R0 is exact."""
    compute, reward = np.array([(p.compute, p.pass_rate) for p in simulated[1].points]).T
    return paper_fit(compute, reward, R0, FINER if procedure == "paper, finer" else None).sigmoid


def truths(simulated: Simulated) -> dict[str, float]:
    """The true values of the estimated quantities; `2x` is the reward at twice the last compute."""
    truth, run = simulated
    at_2x = float(truth.reward(2 * run.points[-1].compute))
    return {"A": truth.A, "B": truth.B, "C_mid": truth.C_mid, "2x": at_2x}


def describe(head: Row, runs: Sequence[Row]) -> str:
    """The tables of the page."""
    return document(runs)


def publish(head: Row, runs: Sequence[Row]) -> None:
    """Replace the generated part of the page."""
    page = ROOT / "docs" / "validation.md"
    before, _, rest = page.read_text().partition(BEGIN)
    assert END in rest, f"{page}: expected the lines {BEGIN!r} and {END!r}"
    page.write_text(f"{before}{BEGIN}\n{document(runs)}\n{END}{rest.partition(END)[2]}")
