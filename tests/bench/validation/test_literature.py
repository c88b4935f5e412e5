"""Promises of the comparison of laws: they are those of the literature, sources are left out and drawn."""

import math

import numpy as np
import pytest

from bench.harness import Row
from bench.validation import literature
from bench.validation.sources import GAINS, SHARES
from trainer.scaling import Sigmoid
from trainer.scaling.curve.points import checked
from trainer.scaling.simulate import simulated


def test_an_oscillator_starts_at_rest_swings_below_a_damping_of_1_and_is_an_exponential_far_above() -> None:
    t = np.linspace(0, 20, 20001)
    for zeta in (0.2, 1.0, 4.0):
        s = literature.oscillator(t, np.array(zeta), np.array(1.0))
        v = np.gradient(s, t)
        assert s[0] == pytest.approx(0, abs=1e-6) and v[0] == pytest.approx(0, abs=1e-3)
        inside = slice(2, -2)
        rest = np.gradient(v, t) + 2 * zeta * v + s - 1
        assert np.abs(rest[inside]).max() < 1e-3
        overshoot = math.exp(-math.pi * zeta / math.sqrt(1 - zeta**2)) if zeta < 1 else 0.0
        assert s.max() == pytest.approx(1 + overshoot, abs=0.1 if zeta > 1 else 1e-3)
    slow = literature.oscillator(t, np.array(50.0), np.array(0.05))
    assert slow == pytest.approx(1 - np.exp(-t / 5), abs=1e-3)


def test_every_law_starts_at_R0_and_two_sigmoids_have_a_plateau_between() -> None:
    run = simulated(Sigmoid(0.1, 0.8, 2.0, 4.0).reward, np.arange(0.0, 25.0), 0.0, 0.01)
    for family in literature.literature(checked(run)):
        theta = [math.sqrt(axis.low * axis.high) for axis in family.axes]
        assert family.reward(0.0, 0.2, 0.9, *theta) == pytest.approx(0.2, abs=1e-6)
    s = [float(literature.two_sigmoids(c, 4.0, 1.0, 100.0, 0.3)) for c in (0.1, 10.0, 1e4)]
    assert s == pytest.approx([0, 0.3, 1], abs=1e-3)


@pytest.fixture(scope="module")
def falling() -> Row:
    """A run that is lost again as the law says, seen until it is at its highest."""
    c = np.arange(0.0, 41.0)

    def reward(x: np.ndarray) -> np.ndarray:
        return 0.1 + 0.8 * literature.decline(x, 7.0, 100.0)

    return literature.measure("a", simulated(reward, c, 0.0, 1e-3), 0.5)


def test_the_right_law_forecasts_best_and_changes_the_average_it_is_added_to(falling: Row) -> None:
    truth, values, averages = falling["truth"], falling["values"], falling["averages"]
    assert values["decline, least squares"] == pytest.approx(truth, abs=0.02)
    assert values["decline"] == pytest.approx(truth, abs=0.05)
    others = [name for name in values if "decline" not in name]
    assert len(others) == 14 and min(abs(values[name] - truth) for name in others) > 0.05
    assert abs(averages["with decline"][0][0] - truth) < abs(averages[literature.AVERAGE][0][0] - truth)
    assert all(len(scores) == len(GAINS) for scores in averages.values())
    assert {f"without {law}" for law in literature.LAWS} < set(averages)


def test_quantiles_and_the_crps_count_weights() -> None:
    x, weight = np.array([3.0, 1.0, 2.0]), np.array([1.0, 2.0, 0.0])
    assert literature.quantiles(x, weight, [0.5, 0.95]) == [1.0, 3.0]
    value, low, high, crps = literature.scored(x, x, weight, 1.0)
    assert (value, low, high) == (1.0, 1.0, 3.0)
    assert crps == pytest.approx(2 / 3 - 0.5 * 2 * 2 / 9 * 2)  # E|x − 1| − E|x − x'| / 2


def test_the_interval_is_one_of_sources() -> None:
    one = literature.bootstrapped([[0.1, 0.1], [0.1]])
    assert one == pytest.approx(np.full(literature.BOOTSTRAPS, 0.1))
    two = literature.bootstrapped([[0.0] * 50, [1.0]])
    assert sorted(set(two.round(6).tolist())) == [0.0, 0.5, 1.0] and np.mean(two) == pytest.approx(
        0.5, abs=0.03
    )


def test_the_table_has_each_average_by_the_weight_of_the_other_sources() -> None:
    """The first weight is right for a, the last for b; a is forecast by half of that. b's interval misses."""
    rows = []
    for source, best in (("a", 0), ("b", len(GAINS) - 1)):
        scores = [
            [0.5 + 0.01 * abs(i - best), 0.4, 0.6 - best / 80, abs(i - best)] for i in range(len(GAINS))
        ]
        averages = {literature.AVERAGE: scores, "with decline": [[0.5, 0.5, 0.5, 0.0]] * len(GAINS)}
        values = {literature.CARRIED: 0.3}
        rows += [
            {"source": source, "share": x, "truth": 0.5, "values": values, "averages": averages}
            for x in SHARES
        ]
    lines = [
        [x.strip() for x in line.split("|")[1:-1]] for line in literature.describe({}, rows).splitlines()
    ]
    assert ["carried on", "25%", "2", "0.200", "0.200", "+0.080 (+0.040 to +0.120)", "–"] in lines
    assert [literature.AVERAGE, "50%", "2", "0.120", "0.120", "–", "0.50"] in lines
    assert ["with decline", "50%", "2", "0.000", "0.000", "-0.120 (-0.160 to -0.080)", "1.00"] in lines
