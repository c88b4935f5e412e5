"""Promises of the curve as a library: arrays, tables and files give one answer; what is wrong is said."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from simulated import falling

from trainer.scaling import ConfigError, EvalPoint, Sigmoid, compare, curve, fit, predict
from trainer.scaling.__main__ import main

LAW = Sigmoid(R0=0.30, A=0.61, B=2.0, C_mid=2500)
HOURS = np.linspace(0, 12_000, 25)
SE = np.full(25, 0.005)


def rewards(seed: int, law: Sigmoid = LAW) -> np.ndarray:
    return law.reward(HOURS) + np.random.default_rng(seed).normal(0, 0.005, 25)


def test_arrays_lists_and_columns_give_the_curve_of_the_file(tmp_path: Path) -> None:
    acc = rewards(1)
    run = curve(HOURS, acc, SE)
    assert EvalPoint(0, 0.0, acc[0], 0.005) == run.R0 and len(run.points) == 24
    assert curve(HOURS.tolist(), acc.tolist(), SE.tolist()) == run
    table = {"h": HOURS, "acc": acc, "sd": SE}
    assert curve("h", "acc", "sd", data=table, unit="-").points == run.points
    assert curve("h", "acc", data=table).unit == "h"
    assert fit(run).A == fit(HOURS, acc, SE).A == fit(HOURS[1:], acc[1:], SE[1:], R0=acc[0], R0_se=0.005).A
    rows = "".join(f"{c},{r},{s}\n" for c, r, s in zip(HOURS, acc, SE, strict=True))
    (tmp_path / "x.csv").write_text(f"gpu_hours,pass_rate,pass_rate_se\n{rows}")
    out = tmp_path / "fit.json"
    assert main(["fit", str(tmp_path / "x.csv"), "--json", str(out)]) == 0
    assert f'"value": {fit(run).A.value!r}' in out.read_text()


def test_a_dataframe_with_gaps_gives_the_curve_of_its_evaluations() -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is missing: pip install pandas")
    frame = pandas.DataFrame({"h": HOURS, "acc": rewards(1), "sd": SE})
    frame.loc[frame.index % 2 == 1, ["acc", "sd"]] = math.nan  # steps without an evaluation
    evaluated = curve(HOURS[::2], rewards(1)[::2], SE[::2], unit="h")
    assert curve("h", "acc", "sd", data=frame).points == evaluated.points
    assert curve(frame.h, frame.acc) == curve(HOURS[::2], rewards(1)[::2])
    assert fit("h", "acc", "sd", data=frame) == fit(curve("h", "acc", "sd", data=frame))


def test_a_given_R0_replaces_the_measured_one() -> None:
    assert curve(HOURS, rewards(1), R0=0.25).R0 == 0.25
    assert curve(HOURS[1:], rewards(1)[1:]).R0 is None


def test_recipes_of_curves_are_compared() -> None:
    ours = [curve(HOURS, rewards(seed), SE) for seed in (1, 2)]
    others = [curve(HOURS, rewards(4, Sigmoid(0.30, 0.50, 2.0, 2500)), SE)]
    comparison = compare({"ours": ours, "theirs": others[0]}, budgets=[24_000])  # one run, or several
    assert len(repr(comparison)) < 10_000 and "EvalPoint" not in repr(comparison)
    (pair,) = comparison.pairs
    assert (pair.a, pair.b, pair.verdict) == ("ours", "theirs", "different")


def test_a_prediction_is_that_of_the_fit() -> None:
    run = curve(HOURS, rewards(1), SE)
    result = predict(run, at=[24_000], reach=[0.55])
    assert predict(fit(run), at=[24_000], reach=[0.55]) == result
    assert len(repr(result)) < 2000 and result.fit.band
    (reached,), (needed,) = result.reached, result.needed
    assert reached.reward == result.fit.at_2x and reached.ahead == 2
    assert needed.compute == result.fit.compute_for(0.55) and needed.chance > 0.99
    cheaper = predict(run, reach=[0.55], factor=0.5).needed[0]
    assert cheaper.compute.value == pytest.approx(needed.compute.value / 2)


WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: curve("h", "acc"), "compute='h' is the name of a column, but there is no data=TABLE"),
    (lambda: curve("h", "acc", data={"h": [1]}), "reward='acc' is the name of a column, but data has no s"),
    (lambda: curve([1, 2], [0.1]), "2, 1 and 2 values; expected as many of each"),
    (lambda: fit("h", "acc"), "compute='h' is the name of a column, but there is no data=TABLE"),
    (lambda: fit([[1.0]], [[0.1]]), r"the shape \(1, 1\); expected \(n,\)"),
    (lambda: fit([1.0]), r"reward has the shape \(\); expected \(n,\)"),
    (lambda: fit({"h": [1]}), "compute has values that are not numbers"),
    (lambda: fit(HOURS, 100 * rewards(1)), r"expected a number in \[0, 1\]: divide percent by 100"),
    (lambda: fit([1, 2], [0.1], R0=0.1), "have 2, 1 and 2 values"),
    (lambda: fit([1, math.nan], [0.1, 0.2], R0=0.1), "compute is nan; expected a number of at least 0"),
    (lambda: fit([1, 2], [0.1, 1.2], R0=0.1), r"reward of point 2 is 1.2; expected a number in \[0, 1\]"),
    (lambda: fit([1, 2], [0.1, 0.2], [0.1, -1], R0=0.1), "standard error of point 2 is -1"),
    (lambda: predict({"h": [1]}, at=[1]), "predict: the run is a dict; expected a Curve"),
    (lambda: compare([curve(HOURS, rewards(1))]), r"compare: expected {NAME: \[RUN, ...\], ...}"),
    (lambda: compare({"a": [HOURS]}), r"compare: expected {NAME: \[RUN, ...\], ...}"),
    (lambda: compare({"a": []}), r"compare: expected {NAME: \[RUN, ...\], ...}"),
    (lambda: curve(["a"], [0.1]), "compute has values that are not numbers"),
    (lambda: curve([[1.0]], [[0.1]]), r"the shape \(1, 1\); expected \(n,\)"),
    (lambda: curve([-1, 2], [0.1, 0.2]), "compute is -1; expected a number of at least 0"),
    (lambda: fit(curve(HOURS, 100 * rewards(1))), r"expected a number in \[0, 1\]"),
    (lambda: predict(curve([1, 2], [0.1, 0.2]), at=[3]), "fewer than 5 evaluations"),
    (lambda: predict(falling(), at=[50_000]), "there is no forecast: the reward has fallen"),
]


@pytest.mark.parametrize(("make", "says"), WRONG)
def test_what_is_wrong_is_a_value_error_that_says_what_to_do(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()
    assert issubclass(ConfigError, ValueError)
