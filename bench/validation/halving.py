"""`python -m bench.validation.halving`: does --halving of a sweep lose the winner, and how much does it save?

Simulated sweeps of 12 recipes × 3 seeds, which differ in A, B and C_mid, and their seeds by what the paper
reports. The winner is the recipe with the highest true reward at the budget.
It uses every core that it may. Given the runs of a finished sweep, such as docs/study/runs.toml, it says what
halving would have done.
"""

import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench import records
from trainer.jsonl import read_lines
from trainer.scaling import Curve, Sigmoid
from trainer.scaling.reading.options import ReadOptions
from trainer.scaling.reading.read import curves_of, read_groups
from trainer.scaling.simulate import simulated
from trainer.sweep.halving import RISK, RUNGS, chances, forecasts, least_likely

RECIPES, SEEDS, EVALUATIONS = 12, 3, 32
SD = 0.012  # of an evaluation: 400 prompts × 4
A_SD, LOG_SD = 0.04, 0.25  # over recipes, of A and of log B and log C_mid
SEED_A, SEED_LOG = 0.006, 0.07  # over seeds
TARGET = 1.0  # where the winner is the best, in budgets
LAST = 3  # evaluations of a finished run whose mean is its reward
C = np.linspace(0, 1, EVALUATIONS + 1)[1:]  # in budgets


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of one sweep."""

    number: int
    seed: int
    risk: float
    target: float  # where the winner is the best, in budgets
    lost: bool  # the winner was stopped
    saved: float  # share of the compute
    regret: float  # how much lower the best recipe is that was left
    rungs: tuple[float, ...] = ()  # shares of the budget at which recipes are stopped


def simulate(rng: np.random.Generator) -> tuple[list[Sigmoid], dict[str, list[Curve]]]:
    """The laws of the recipes, and the curves of their runs up to the budget."""
    R0, A, B = rng.uniform(0.05, 0.35), rng.uniform(0.55, 0.85), rng.uniform(1.2, 2.4)
    C_mid = float(np.exp(rng.uniform(np.log(0.08), np.log(0.35))))
    laws, curves = [], {}
    for i in range(RECIPES):
        log_B, log_C = rng.normal(0, LOG_SD, 2)
        law = Sigmoid(R0, min(0.98, A + rng.normal(0, A_SD)), B * np.exp(log_B), C_mid * np.exp(log_C))
        laws.append(law)
        runs = []
        for seed in range(SEEDS):
            b, c = np.exp(rng.normal(0, SEED_LOG, 2))
            run = Sigmoid(R0, law.A + rng.normal(0, SEED_A), law.B * b, law.C_mid * c)
            errors = rng.normal(0, SD, len(C) + 1)
            runs.append(simulated(run.reward, [0.0, *C], errors, SD, f"r{i}-{seed}"))
        curves[f"r{i}"] = runs
    return laws, curves


def halve(curves: dict[str, list[Curve]], target: float, budget: float = 1.0) -> dict[str, float]:
    """The share of the budget at which each recipe is stopped; 1 if it is not."""
    stopped: dict[str, float] = {}
    for rung in RUNGS:
        left = {name: runs for name, runs in curves.items() if name not in stopped}
        going = {name: [cut(curve, rung * budget) for curve in runs] for name, runs in left.items()}
        stopped |= dict.fromkeys(least_likely(chances(forecasts(going), target), RISK), rung)
    return {name: stopped.get(name, 1.0) for name in curves}


def cut(curve: Curve, compute: float) -> Curve:
    """The curve up to this compute."""
    points = tuple(p for p in curve.points if p.compute <= compute * (1 + 1e-9))
    return Curve(curve.name, curve.unit, points, curve.R0)


def trial(number: int, seed: int) -> Trial:
    """One sweep, halved."""
    laws, curves = simulate(np.random.default_rng([seed, number]))
    shares = list(halve(curves, TARGET).values())
    rewards = np.array([float(law.reward(TARGET)) for law in laws])
    left = max(r for r, share in zip(rewards, shares, strict=True) if share == 1)
    lost, saved = shares[int(rewards.argmax())] < 1, 1 - float(np.mean(shares))
    return Trial(number, seed, RISK, TARGET, lost, saved, float(rewards.max() - left), RUNGS)


def replay(curves: dict[str, list[Curve]]) -> str:
    """What halving would have done to a finished sweep, up to the compute to which all its runs have data."""
    budget = min(run.points[-1].compute for runs in curves.values() for run in runs)
    shares = halve(curves, budget, budget)
    ends = {
        name: float(np.mean([p.pass_rate for run in runs for p in cut(run, budget).points[-LAST:]]))
        for name, runs in curves.items()
    }
    rows = [
        f"{name:24} {end:.3f}  {f'stopped at {shares[name]:.1%}' if shares[name] < 1 else 'goes on'}"
        for name, end in sorted(ends.items(), key=lambda item: -item[1])
    ]
    unit, saved = next(iter(curves.values()))[0].unit, 1 - float(np.mean(list(shares.values())))
    head = f"Reward at {budget:.3g} {unit}, mean of {LAST} evaluations of each run"
    return "\n".join([head, *rows, f"{saved:.0%} of compute saved"])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the share of sweeps whose winner was lost, and what was saved."""
    parser = records.parser("validation.halving", __doc__, sweeps=500, seed=0)
    text = "a file for each sweep's result; those in it are not run again"
    parser.add_argument("--out", type=Path, help=text)
    parser.add_argument("inputs", nargs="*", metavar="RUN_OR_FILE", help="runs instead of simulations")
    ReadOptions.add_to(parser)
    args = parser.parse_args(argv)
    if args.inputs:
        print(replay(curves_of(read_groups(args.inputs, ReadOptions.from_arguments(args)))))
        return 0
    known = [Trial(**row) for row in read_lines(args.out)] if args.out and args.out.is_file() else []
    asked = {(i, args.seed, RISK, TARGET) for i in range(args.sweeps)}
    known = [t for t in known if tuple(t.rungs) == tuple(RUNGS)]  # others are of other code
    done = [t for t in known if (t.number, t.seed, t.risk, t.target) in asked]
    with ProcessPoolExecutor(records.cores()) as pool:
        remaining = sorted({i for i, *_ in asked} - {t.number for t in done})
        running = [pool.submit(trial, number, args.seed) for number in remaining]
        for future in as_completed(running):
            done.append(future.result())
            if args.out:
                with args.out.open("a") as file:
                    file.write(json.dumps(asdict(done[-1])) + "\n")
            records.say(describe(done))
    print(describe(done))
    return 0


def describe(done: Sequence[Trial]) -> str:
    """What the sweeps show so far."""
    lost = [one.regret for one in done if one.lost]
    saved, lower = np.mean([one.saved for one in done]), float(np.mean(lost)) if lost else 0.0
    return (
        f"{len(done)} sweeps: {saved:.0%} of compute saved, winner lost in {len(lost) / len(done):.1%} "
        f"(the best left is then {lower:.4f} lower)"
    )


if __name__ == "__main__":
    sys.exit(main())
