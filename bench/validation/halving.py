"""`python -m bench.validation.halving`: does --halving of a sweep lose the winner, and how much does it save?

Simulated sweeps of 12 recipes × 3 seeds, which differ in A, B and C_mid, and their seeds by what the paper
reports. The winner is the recipe with the highest true reward at the budget, or with the highest ceiling.
"""

import argparse
from collections.abc import Iterator

import numpy as np

from trainer.scaling import Curve, EvalPoint, Sigmoid, fit_curve
from trainer.sweep.halving import RISK, RUNGS, chances, least_likely

RECIPES, SEEDS, EVALUATIONS = 12, 3, 32
SD = 0.012  # of an evaluation: 400 prompts × 4
A_SD, LOG_SD = 0.04, 0.25  # over recipes, of A and of log B and log C_mid
SEED_A, SEED_LOG = 0.006, 0.07  # over seeds
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
            rewards = np.clip(run.reward(np.array([0.0, *C])) + rng.normal(0, SD, len(C) + 1), 0, 1)
            points = [EvalPoint(j, x, r, SD) for j, (x, r) in enumerate(zip([0.0, *C], rewards, strict=True))]
            runs.append(Curve(f"r{i}-{seed}", "GPU-hours", tuple(points[1:]), points[0]))
        curves[f"r{i}"] = runs
    return laws, curves


def halve(curves: dict[str, list[Curve]], risk: float, target: float) -> dict[str, float]:
    """The share of the budget at which each recipe is stopped; 1 if it is not."""
    stopped: dict[str, float] = {}
    for rung in RUNGS:
        going = {name: runs for name, runs in curves.items() if name not in stopped}
        fits = {name: [fit_curve(cut(curve, rung)) for curve in runs] for name, runs in going.items()}
        stopped |= dict.fromkeys(least_likely(chances(fits, target), risk), rung)
    return {name: stopped.get(name, 1.0) for name in curves}


def cut(curve: Curve, share: float) -> Curve:
    points = tuple(p for p in curve.points if p.compute <= share + 1e-9)
    return Curve(curve.name, curve.unit, points, curve.R0)


def trials(sweeps: int, seed: int, risk: float, target: float) -> Iterator[tuple[bool, float, float]]:
    """Of each sweep: whether the winner was lost, the share saved, and how much lower the best left is."""
    for i in range(sweeps):
        laws, curves = simulate(np.random.default_rng([seed, i]))
        shares = list(halve(curves, risk, target).values())
        rewards = np.array([float(law.reward(target)) for law in laws])
        left = max(r for r, share in zip(rewards, shares, strict=True) if share == 1)
        yield shares[int(rewards.argmax())] < 1, 1 - float(np.mean(shares)), float(rewards.max() - left)


def main() -> None:
    """Print the share of sweeps whose winner was lost, and what was saved."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(": ")[2])
    parser.add_argument("--sweeps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--risk", type=float, default=RISK, help=f"at each rung (default: {RISK})")
    parser.add_argument("--ceiling", action="store_true", help="the winner has the highest ceiling")
    args = parser.parse_args()
    done = []
    for trial in trials(args.sweeps, args.seed, args.risk, 1e6 if args.ceiling else 1.0):
        done.append(trial)
        lost, saved, regret = np.array(done, float).T
        end = "\n" if len(done) in (args.sweeps, *range(50, args.sweeps, 50)) else "\r"
        lower = float(regret[lost > 0].mean()) if lost.any() else 0.0
        text = f"{len(done)} sweeps: {saved.mean():.0%} of compute saved, winner lost in {lost.mean():.1%}"
        print(f"{text} (the best left is then {lower:.4f} lower)", end=end, flush=True)


if __name__ == "__main__":
    main()
