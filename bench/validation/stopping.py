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
from bench.validation.shapes import CONTROL, KINDS, LAST, NOISE, SEED, simulate
from trainer.config.forecast import ForecastConfig, StopRule
from trainer.scaling import EvalPoint
from trainer.scaling.forecast import forecast
from trainer.scaling.stop import says_stop

PATIENCE = ForecastConfig().patience
RULES = [
    f"gain<{gain} {until}" for until in ("per doubling", "until the end") for gain in (0.005, 0.01, 0.02)
]


def ends(kind: str, i: int, seed: int, rules: Sequence[StopRule]) -> list[float | None]:
    """What was still to be gained where each rule ended a run; None: it did not."""
    shape, compute, rewards, R0 = simulate(kind, i, seed)
    points, look = [EvalPoint(0, 0.0, R0, NOISE)], forecast([EvalPoint(0, 0.0, R0, NOISE)], LAST, None)
    row, found = Counter[StopRule](), dict[StopRule, float]()
    for step, (c, reward) in enumerate(zip(compute[:-1].tolist(), rewards.tolist(), strict=False), 1):
        points.append(EvalPoint(step, c, reward, NOISE))
        look = forecast(points, LAST, look)
        for rule in rules:
            row[rule] = row[rule] + 1 if says_stop(look, c, LAST, rule) else 0
            if row[rule] == PATIENCE and rule not in found:
                now, later = shape(np.array([c, 2 * c if rule.per_doubling else LAST]))
                found[rule] = float(later - now)
    return [found.get(rule) for rule in rules]


def table(found: dict[str, list[list[float | None]]], rules: Sequence[StopRule]) -> list[str]:
    """In Markdown, a row for each kind: how many ended, and how many of them wrongly."""
    lines = ["| kind | runs | " + " | ".join(f"{rule.text}: ended, wrongly" for rule in rules) + " |"]
    lines.append("| --- |" + " ---: |" * (1 + len(rules)))
    for kind, runs in found.items():
        gains = [[gain for gain in column if gain is not None] for column in zip(*runs, strict=True)]
        wrong = [sum(g > rule.gain for g in of) for of, rule in zip(gains, rules, strict=True)]
        cells = [f"{len(of)}, {n}" for of, n in zip(gains, wrong, strict=True)]
        lines.append(f"| {kind} | {len(runs)} | {' | '.join(cells)} |")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate and print the table."""
    parser = records.parser("validation.stopping", __doc__)
    parser.add_argument("--runs", type=int, default=5, help="simulated runs of each kind (5)")
    parser.add_argument("--seed", type=int, default=SEED, help=f"of the simulation ({SEED})")
    args = parser.parse_args(argv)
    rules = [rule for text in RULES if (rule := ForecastConfig(stop=text).rule)]
    found = {k: [ends(k, i, args.seed, rules) for i in range(args.runs)] for k in (CONTROL, *KINDS)}
    print("\n".join(table(found, rules)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
