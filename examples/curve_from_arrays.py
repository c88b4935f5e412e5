"""The scaling curve from Python: fits a run, compares two recipes and predicts what more compute would give.

`pip install .` is enough: it imports neither torch nor transformers. The runs are simulated; yours can be
lists, arrays or the columns of a DataFrame, with the compute in any unit and rewards from 0 to 1.

    python -m examples.curve_from_arrays
"""

import numpy as np

from trainer.scaling import Curve, Sigmoid, compare, curve, explain, fit, predict

HOURS = np.arange(0, 12_001, 500)  # (25,) GPU-hours of the whole run at each evaluation; 0: before step 1


def accuracy(ceiling: float, seed: int) -> np.ndarray:
    """(25,) held-out accuracies of a simulated run, with an error of .005."""
    truth = Sigmoid(R0=0.30, A=ceiling, B=2.0, C_mid=2500).reward(HOURS)
    return truth + np.random.default_rng(seed).normal(0, 0.005, len(HOURS))


def main() -> None:
    """Print a fit, a comparison and a prediction."""
    errors = np.full(len(HOURS), 0.005)  # standard errors; leave them out if you do not know them
    print(explain(fit(HOURS, accuracy(0.61, seed=1), errors), "GPU-hours"))

    # The same from a table of columns, such as a DataFrame: NaN where nothing was evaluated.
    table = {"hours": HOURS, "acc": accuracy(0.52, seed=2), "acc_se": errors}
    baseline = curve("hours", "acc", "acc_se", data=table, unit="GPU-hours")
    ours: list[Curve] = [curve(HOURS, accuracy(0.61, seed), errors, unit="GPU-hours") for seed in (1, 3)]
    comparison = compare({"ours": ours, "baseline": [baseline]}, budgets=[24_000])
    (pair,) = comparison.pairs
    print(f"The ceilings are {pair.verdict}: A {pair.A.value:+.3f} ({pair.A.low:+.3f} to {pair.A.high:+.3f})")
    for budget, standings in comparison.budgets:
        for s in standings:
            best = "not ranked" if s.best is None else f"best with {s.best:.0%}"
            print(f"at {budget:,.0f} GPU-hours: {s.recipe} {s.reward.value:.3f}, {best}")

    prediction = predict(ours[0], at=[24_000], reach=[0.6])
    for r in prediction.reached:
        print(f"at {r.budget:,.0f} GPU-hours: {r.reward.low:.3f} to {r.reward.high:.3f}")
    for n in prediction.needed:
        takes = f"{n.compute.low:,.0f} to {n.compute.high:,.0f} GPU-hours"
        print(f"{n.reward} takes {takes}; the probability that it is ever reached is {n.chance:.0%}")


if __name__ == "__main__":
    main()
