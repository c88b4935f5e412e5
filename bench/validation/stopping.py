"""Does `forecast.stop` end runs where it may? Simulated runs of many shapes. [10 min]

  python -m bench validation.stopping          5 runs of each shape; ten minutes

Each run is planned up to 6,000, its data's end. It ends wrongly if more was to be gained than the rule says.
"""

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from bench.harness import Case, Row, grouped, repeated
from bench.table import table
from bench.validation.shapes import CONTROL, KINDS, LAST, SEED, simulate
from trainer.config.forecast import ForecastConfig, StopRule
from trainer.scaling.forecast import forecast, says_stop

OPTIONS = {"runs": (5, "runs of each shape")}
PARALLEL = True
PATIENCE = ForecastConfig().patience
RULES = [
    rule
    for until in ("per doubling", "until the end")
    for gain in (0.005, 0.01, 0.02)
    if (rule := ForecastConfig(stop=f"gain<{gain} {until}").rule)
]


def measure(kind: str, i: int, seed: int = SEED) -> Row:
    """The gain that was still to come where each rule ended a run; None: it did not end it."""
    shape, run = simulate(kind, i, seed)
    points, look = list(run.evaluations), forecast(run.evaluations[:1], LAST, None)
    in_a_row, gains = Counter[StopRule](), dict[StopRule, float]()
    for n in range(2, len(points)):
        look, c = forecast(points[:n], LAST, look), points[n - 1].compute
        for rule in RULES:
            in_a_row[rule] = in_a_row[rule] + 1 if says_stop(look, c, LAST, rule) else 0
            if in_a_row[rule] == PATIENCE and rule not in gains:
                now, later = shape(np.array([c, 2 * c if rule.per_doubling else LAST]))
                gains[rule] = float(later - now)
    return {"kind": kind, "gains": [gains.get(rule) for rule in RULES]}


def cases(options: Namespace) -> Iterator[Case]:
    """Every run of every kind."""
    return repeated((CONTROL, *KINDS), options.runs, measure)


def describe(head: Row, runs: Sequence[Row]) -> str:
    """A line for each kind, in Markdown: how many runs ended, and how many of them wrongly."""
    lines = []
    for kind, group in grouped(runs, "kind").items():
        gains = [run["gains"] for run in group]
        cells = []
        for rule, column in zip(RULES, zip(*gains, strict=True), strict=True):
            ended = [gain for gain in column if gain is not None]
            cells.append(f"{len(ended)}, {sum(gain > rule.gain for gain in ended)}")
        lines.append([kind, str(len(gains)), *cells])
    return table(["kind", "runs", *(f"{rule.text}: ended, wrongly" for rule in RULES)], lines)
