"""Promises of the studies of laws, shapes, comparisons and stops: runs are what is said, tables count."""

from collections.abc import Callable

import numpy as np
import pytest

from bench import harness
from bench.validation import allocation, axis, comparisons, laws, shapes, stopping
from bench.validation.comparisons import Kind, Pairs
from bench.validation.laws import NOISES, REACHES
from bench.validation.shapes import CONTROL, EVALUATIONS, FALLS, KINDS, LAST, NOISE
from trainer.scaling import Curve, EvalPoint, Sigmoid, curve_of

EXACT = Sigmoid(0.30, 0.58, 1.8, 2000)
SIMULATED: dict[str, Callable[[float, int], tuple[Sigmoid, Curve]]] = {  # by correlation and number
    # So far beyond C_mid that nothing is cut off.
    "laws": lambda rho, i: laws.simulate(50.0, rho, i, seed=1),
    "comparisons": lambda rho, i: (EXACT, comparisons.simulate(Kind(False, 5, rho), 0.58, i, seed=1)),
}


def columns(run: Curve) -> np.ndarray:
    """(3, n): compute, reward and standard error."""
    return np.array([(p.compute, p.pass_rate, p.pass_rate_se) for p in run.points]).T


def cells(line: str) -> list[str]:
    return [x.strip() for x in line.split("|")[1:-1]]


@pytest.mark.parametrize("study", SIMULATED)
@pytest.mark.parametrize("correlation", NOISES.values())
def test_errors_have_the_size_and_the_correlation_in_compute_that_are_said(
    study: str, correlation: float
) -> None:
    errors, products, expected = [], [], []
    for i in range(400):
        truth, run = SIMULATED[study](correlation, i)
        compute, reward, se = columns(run)
        error = (reward - truth.reward(compute)) / se
        errors.append(error)
        products.append(error[1:] * error[:-1])
        expected.append(correlation ** (np.diff(compute) / (compute[-1] / len(compute))))
    assert np.std(np.concatenate(errors)) == pytest.approx(1, abs=0.05)
    assert np.mean(np.concatenate(products)) == pytest.approx(np.mean(np.concatenate(expected)), abs=0.05)


def test_a_law_is_the_same_curve_in_every_cell_and_the_table_counts_what_holds() -> None:
    runs = [laws.simulate(reach, rho, 3, seed=1) for reach in REACHES for rho in NOISES.values()]
    assert len({truth for truth, _ in runs}) == 1 and len({len(run.points) for _, run in runs}) == 1
    assert [run.points[-1].compute / truth.C_mid for truth, run in runs[::2]] == pytest.approx(REACHES)
    one = laws.measure("independent", 5.0, 0, seed=1) | {"identified": True}
    right = [one | {"noise": noise, "reach": reach} for noise in NOISES for reach in REACHES]
    wrong = [row | {"A": [0.99, 0.5, 0.4, 0.6], "identified": False} for row in right]
    rows = [cells(line) for line in laws.describe({}, right + wrong).splitlines()[2:]]
    assert len(rows) == len(right) and all(x[4] == x[6] == "0.50" and x[7] == "1.00 (1)" for x in rows)


@pytest.mark.parametrize("kind", [CONTROL, *KINDS])
def test_a_run_is_its_shape_with_noise_and_falls_only_where_it_is_said_to(kind: str) -> None:
    for i in range(20):
        shape, run = shapes.simulate(kind, i, seed=1)
        compute, reward = np.array([(p.compute, p.pass_rate) for p in run.evaluations]).T
        assert len(run.points) == EVALUATIONS and compute[0] == 0 and compute[-1] == LAST
        assert np.abs(reward - shape(compute)).max() < 5 * NOISE
        curve = shape(np.linspace(0, LAST, 601))
        assert curve.min() >= 0 and curve.max() <= 1
        assert (np.diff(curve) >= -1e-12).all() != (kind in FALLS)


def test_a_shape_is_right_if_it_is_flagged_or_covered() -> None:
    fell, sigmoid = (shapes.measure(kind, 0, seed=1) for kind in ("fast collapse", CONTROL))
    assert fell["flagged"] and fell["either"] and not fell["covered"] and not fell["wrong"]
    assert sigmoid["covered"] and sigmoid["either"] and not sigmoid["wrong"]
    missed = sigmoid | {"covered": False, "either": False, "flagged": False, "wrong": True}
    runs = [r | {"kind": kind} for kind in (*KINDS, CONTROL) for r in (sigmoid, missed)]
    rows = [cells(line) for line in shapes.describe({}, runs).splitlines()[2:]]
    assert len(rows) == len(KINDS) + 2 and all(x[4] == x[5] == "0.50" for x in rows)


def test_seeds_of_a_recipe_vary_by_what_is_said() -> None:
    """Far beyond C_mid the rewards vary as A does, and at C_mid by dR = .28 · B / 4 · d log C_mid, too."""

    def moved(reach: int, evaluation: int) -> float:
        runs = [comparisons.simulate(Kind(True, reach), 0.58, i, seed=1) for i in range(400)]
        points = [run.points[evaluation] for run in runs]
        return float(np.std([p.pass_rate - EXACT.reward(p.compute) for p in points]))

    assert moved(500, -1) == pytest.approx(np.hypot(NOISE, 0.006), rel=0.1)
    at_C_mid = np.sqrt(NOISE**2 + (0.006 / 2) ** 2 + (0.28 * 1.8 / 4 * 0.07) ** 2)
    assert moved(24, 0) == pytest.approx(at_C_mid, rel=0.1)  # 24 evaluations: the first is at C_mid


@pytest.mark.slow
def test_the_table_of_comparisons_holds_the_shares_of_each_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(comparisons, "ROWS", [Pairs(Kind(False, 5), 1, gap) for gap in (0.0, 0.04)])
    assert harness.run("validation.comparisons", comparisons, ["--runs=4", "--processes=1"]) == 0
    rows = [cells(line) for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows[0][:4] == ["exact", "5 ×", "1", "0"]
    same, apart = ([float(x) for x in row[4:]] for row in rows)
    assert same[0] <= 0.25 and apart[0] >= 0.5
    assert sum(same[:3]) == sum(apart[:3]) == pytest.approx(1)


@pytest.mark.slow
def test_a_stop_is_wrong_if_more_was_to_be_gained_than_the_rule_says() -> None:
    gains = dict(zip(stopping.RULES, stopping.measure(CONTROL, 0, 1)["gains"], strict=True))
    ended = [gain for rule, gain in gains.items() if rule.gain == 0.02 and gain is not None]
    assert len(gains) == 6 and ended and all(0 < gain < 0.02 for gain in ended)
    rows = [[None, 0.004], [0.006, None], [0.001, None]]
    text = stopping.describe({}, [{"kind": "a", "gains": [*row, *[None] * 4]} for row in rows])
    assert cells(text.splitlines()[-1])[:4] == ["a", "3", "2, 1", "1, 0"]


def test_a_simulated_machine_does_the_work_of_the_run_at_its_speeds() -> None:
    """Full speed or one lower speed, from .3 on; rewards and FLOPs are those that were measured."""
    points = [EvalPoint(i, float(i), 0.01 * i, 0.01, 10.0 * i) for i in range(201)]
    run = curve_of("run", "core-hours", points)
    for seed in range(4):
        slow = axis.loaded(run, [seed])
        assert [(p.pass_rate, p.flops) for p in slow.points] == [(p.pass_rate, p.flops) for p in run.points]
        speeds = 1 / 200 / np.diff([0.0, *(p.compute for p in slow.points)])
        assert speeds.max() == pytest.approx(1) and axis.SLOWEST <= speeds.min() < 1
        assert np.isin(speeds.round(6), (1, speeds.min().round(6))).mean() > 0.9  # but where it changes


def test_the_table_of_the_axis_counts_drifted_runs_on_flops_and_others_on_hours() -> None:
    drifted = {
        "source": "study",
        "share": 0.5,
        "spread": 0.3,
        "hours": [0.1, 0.0, 0.2],
        "FLOPs": [0.02, 1.0, 0.3],
        "in FLOPs": [0.01, 1.0, 0.1],
    }
    rows = [drifted, drifted | {"spread": 0.1, "hours": [0.3, 1.0, 0.2]}]
    first, *_ = [
        line for line in axis.describe({"options": {"rates": False}}, rows).splitlines() if "50%" in line
    ]
    assert cells(first)[:4] == ["study", "50%", "2", "1"]
    assert cells(first)[4:7] == ["0.200 → 0.160", "0.200 → 0.160", "0.50 → 1.00"]
    assert cells(first)[8] == "0.010, 1.00"


def test_the_best_group_size_is_where_neither_side_is_better_and_the_table_counts_what_holds() -> None:
    best = allocation.best_value(6000, 0.25, 0.6)
    here, *beside = (allocation.law(v, 0.25, 0.6).reward(6000) for v in (best, best / 1.1, best * 1.1))
    assert here > max(beside) and 4 < best < 64
    row = {"kind": "exact", "budgets": [[8.0, 4.0, 2.0, 6.0], [8.0, 8.0, 4.0, 16.0], [8.0, 16.0, 8.0, 32.0]]}
    lines = [cells(line) for line in allocation.describe({}, [row]).splitlines()[2:]]
    assert [line[3:] for line in lines] == [
        ["0.00", "× 2.00", "× 3.0"], ["1.00", "× 1.00", "× 4.0"], ["1.00", "× 2.00", "× 4.0"],
    ]  # fmt: skip
