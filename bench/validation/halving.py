"""Does --halving of a sweep lose the winner, and how much does it save? [hours]

  python -m bench validation.halving --out FILE        500 simulated sweeps, some hours; goes on with FILE
  python -m bench validation.halving docs/study/runs.toml --compute-column compute/flops

Simulated sweeps of 12 recipes × 3 seeds, which differ in A, B and C_mid, and their seeds by what the paper
reports. The winner is the recipe with the highest true reward at the budget. Given the runs of a finished
sweep, it says what halving would have done.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from bench.harness import Case, Row
from trainer.scaling import Curve, Sigmoid
from trainer.scaling.reading.options import ReadOptions
from trainer.scaling.reading.read import curves_of, read_groups
from trainer.scaling.simulate import simulated
from trainer.sweep.halving import RISK, RUNGS, chances, forecasts, least_likely

OPTIONS: dict[str, Any] = {
    "inputs": ((), "runs of a finished sweep, as trainer.scaling reads them"),
    "compute_column": (None, "column of compute in them"),
    "runs": (500, "simulated sweeps"),
}
PARALLEL = True
RECORD = "halving.jsonl"
RECIPES, SEEDS, EVALUATIONS = 12, 3, 32
SD = 0.012  # of an evaluation: 400 prompts × 4
A_SD, LOG_SD = 0.04, 0.25  # over recipes, of A and of log B and log C_mid
SEED_A, SEED_LOG = 0.006, 0.07  # over seeds
TARGET = 1.0  # where the winner is the best, in budgets
LAST = 3  # evaluations of a finished run whose mean is its reward
C = np.linspace(0, 1, EVALUATIONS + 1)[1:]  # in budgets


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
        remaining = {name: runs for name, runs in curves.items() if name not in stopped}
        going = {name: [cut(curve, rung * budget) for curve in runs] for name, runs in remaining.items()}
        stopped |= dict.fromkeys(least_likely(chances(forecasts(going), target), RISK), rung)
    return {name: stopped.get(name, 1.0) for name in curves}


def cut(curve: Curve, compute: float) -> Curve:
    """The curve up to this compute."""
    return replace(curve, points=tuple(p for p in curve.points if p.compute <= compute * (1 + 1e-9)))


def trial(number: int) -> Row:
    """One sweep, halved: was the winner stopped, what was saved, and how much lower the best one left is."""
    laws, curves = simulate(np.random.default_rng([0, number]))
    shares = list(halve(curves, TARGET).values())
    rewards = np.array([float(law.reward(TARGET)) for law in laws])
    remaining = max(r for r, share in zip(rewards, shares, strict=True) if share == 1)
    lost, saved = shares[int(rewards.argmax())] < 1, 1 - float(np.mean(shares))
    return {"lost": lost, "saved": saved, "regret": float(rewards.max() - remaining)}


def replay(curves: dict[str, list[Curve]]) -> Row:
    """The course of halving in a finished sweep, up to the compute to which all its runs have data."""
    budget = min(run.points[-1].compute for runs in curves.values() for run in runs)
    shares = halve(curves, budget, budget)
    ends = {
        name: float(np.mean([p.pass_rate for run in runs for p in cut(run, budget).points[-LAST:]]))
        for name, runs in curves.items()
    }
    recipes = {name: [end, shares[name]] for name, end in ends.items()}
    return {"budget": budget, "unit": next(iter(curves.values()))[0].unit, "recipes": recipes}


def cases(options: Namespace) -> Iterator[Case]:
    """Every simulated sweep, or the finished one."""
    if options.inputs:
        reading = ReadOptions(compute_column=options.compute_column)
        yield "replay", partial(replay, curves_of(read_groups(options.inputs, reading)))
        return
    for number in range(options.runs):
        yield f"sweep {number}, risk {RISK:g}", partial(trial, number)


def describe(head: Row, rows: Sequence[Row]) -> str:
    """The share of sweeps whose winner was lost and what was saved; or what would have been stopped when."""
    if "recipes" not in rows[0]:
        regrets = [row["regret"] for row in rows if row["lost"]]
        saved, lower = np.mean([row["saved"] for row in rows]), float(np.mean(regrets or 0.0))
        return (
            f"{len(rows)} sweeps: {saved:.0%} of compute saved, winner lost in "
            f"{len(regrets) / len(rows):.1%} (the best left is then {lower:.4f} lower)"
        )
    (row,) = rows
    lines = [f"Reward at {row['budget']:.3g} {row['unit']}, mean of {LAST} evaluations of each run"]
    for name, (end, share) in sorted(row["recipes"].items(), key=lambda item: -item[1][0]):
        lines.append(f"{name:24} {end:.3f}  {f'stopped at {share:.1%}' if share < 1 else 'goes on'}")
    saved = 1 - np.mean([share for _, share in row["recipes"].values()])
    return "\n".join([*lines, f"{saved:.0%} of compute saved"])
