"""Does `forecast.stop` end runs where it may? Simulated runs of many shapes (shapes.py), whose end is known.

  python -m bench.validation.stopping --runs 5

Each run is planned up to 6,000, its data's end. It ends wrongly if more was to be gained than the rule says.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

import numpy as np

from bench import records
from bench.table import markdown
from bench.validation.shapes import CONTROL, KINDS, LAST, NOISE, SEED, simulate
from trainer.config.forecast import ForecastConfig, StopRule
from trainer.scaling import EvalPoint
from trainer.scaling.forecast import forecast, says_stop

PATIENCE = ForecastConfig().patience
RULES = [
    f"gain<{gain} {until}" for until in ("per doubling", "until the end") for gain in (0.005, 0.01, 0.02)
]


def ends(kind: str, i: int, seed: int, rules: Sequence[StopRule]) -> list[float | None]:
    """What was still to be gained where each rule ended a run; None: it did not."""
    shape, compute, rewards, R0 = simulate(kind, i, seed)
    points, look = [EvalPoint(0, 0.0, R0, NOISE)], forecast([EvalPoint(0, 0.0, R0, NOISE)], LAST, None)
    row, gains = Counter[StopRule](), dict[StopRule, float]()
    for step, (c, reward) in enumerate(zip(compute[:-1].tolist(), rewards.tolist(), strict=False), 1):
        points.append(EvalPoint(step, c, reward, NOISE))
        look = forecast(points, LAST, look)
        for rule in rules:
            row[rule] = row[rule] + 1 if says_stop(look, c, LAST, rule) else 0
            if row[rule] == PATIENCE and rule not in gains:
                now, later = shape(np.array([c, 2 * c if rule.per_doubling else LAST]))
                gains[rule] = float(later - now)
    return [gains.get(rule) for rule in rules]


def table(gains: dict[str, list[list[float | None]]], rules: Sequence[StopRule]) -> str:
    """A row for each kind, in Markdown: how many runs ended, and how many of them wrongly."""
    rows = []
    for kind, runs in gains.items():
        ended = [[gain for gain in column if gain is not None] for column in zip(*runs, strict=True)]
        wrong = [sum(g > rule.gain for g in column) for column, rule in zip(ended, rules, strict=True)]
        cells = [f"{len(column)}, {n}" for column, n in zip(ended, wrong, strict=True)]
        rows.append([kind, str(len(runs)), *cells])
    return markdown(["kind", "runs", *(f"{rule.text}: ended, wrongly" for rule in rules)], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate and print the table."""
    args = records.parser("validation.stopping", __doc__, runs=5, seed=SEED).parse_args(argv)
    rules = [rule for text in RULES if (rule := ForecastConfig(stop=text).rule)]
    kinds = (CONTROL, *KINDS)
    print(table({k: [ends(k, i, args.seed, rules) for i in range(args.runs)] for k in kinds}, rules))
    return 0


if __name__ == "__main__":
    sys.exit(main())
