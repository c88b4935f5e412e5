"""Promises of comparing rewards at budgets and costs of rewards, for curves that are no sigmoids."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import Command
from simulated import falling, write

from trainer.scaling import Curve, curve
from trainer.scaling.budgets import Curves, costs, recipe_curves
from trainer.scaling.compare import Comparison, compare_fits
from trainer.scaling.curve.fit import Fit, fit_curve
from trainer.scaling.tables import answer, pair_sentences, ranges, reward_seed_sentence

pytestmark = pytest.mark.slow

C = np.linspace(0, 8000, 21)
SD = 0.006
Law = tuple[float, float]  # of logit R = −1.5 + (C / τ)^p: τ and p
FAST: Law = (4000.0, 0.6)
SLOW: Law = (3600.0, 1.2)
CROSSING = (4000.0**0.6 / 3600.0**1.2) ** (1 / (0.6 - 1.2))  # 3,240


def reward(law: Law, compute: np.ndarray | float) -> np.ndarray:
    tau, p = law
    return np.asarray(1 / (1 + np.exp(1.5 - (np.asarray(compute) / tau) ** p)))


@cache
def run(law: Law, seed: int, seed_sd: float = 0.0) -> tuple[Curve, Fit]:
    """A fitted run; `seed_sd`: by how much its logit deviates, as a share of its rise."""
    rng = np.random.default_rng([seed, round(law[0])])
    tau = law[0] * np.exp(-rng.normal(0, seed_sd) / law[1])
    measured = np.clip(reward((tau, law[1]), C) + rng.normal(0, SD, len(C)), 0, 1)
    one = curve(C, measured, np.full(len(C), SD), name=f"run {seed}", unit="GPU-hours")
    return one, fit_curve(one)


def group(law: Law, seeds: range, seed_sd: float = 0.0) -> list[tuple[Curve, Fit]]:
    return [run(law, seed, seed_sd) for seed in seeds]


@cache
def crossing() -> Comparison:
    return compare_fits({"fast": group(FAST, range(2)), "late": group(SLOW, range(2))})


def test_the_better_recipe_is_found_at_each_budget_although_neither_is_a_sigmoid() -> None:
    result = crossing()
    assert [budget for budget, _ in result.budgets] == [2000, 4000, 8000, 16_000]
    best = [{s.recipe: s.best for s in row} for _, row in result.budgets]
    assert best[0]["fast"] > 0.98 and best[2]["late"] > 0.98 and best[3]["late"] > 0.9
    for budget, row in result.budgets[:3]:
        for s, law in zip(row, (FAST, SLOW), strict=True):
            assert s.reward.value == pytest.approx(reward(law, budget), abs=0.012)
    (pair,) = result.pairs
    assert pair.ahead == "late" and result.end is not None and result.end[1][0].recipe == "late"
    assert pair.reward and pair.reward.low < reward(FAST, 8000) - reward(SLOW, 8000) < pair.reward.high
    assert [lead.winner for lead in pair.leads] == ["fast", "late"]
    assert pair.crossings[0].compute.value == pytest.approx(CROSSING, rel=0.1)


def test_the_compute_of_a_reward_and_its_ratio_are_those_of_the_laws() -> None:
    result = crossing()
    assert len(result.costs) == 2
    for target, rows in result.costs:
        logit = 1.5 + np.log(target / (1 - target))
        fast, late = (tau * logit ** (1 / p) for tau, p in (FAST, SLOW))
        for row, true in zip(rows, (fast, late), strict=True):
            assert row.compute.value == pytest.approx(true, rel=0.1) and row.compute.low < row.compute.high
            assert row.compute.low * 0.97 < true < row.compute.high * 1.03
        assert rows[0].ratio and rows[0].ratio.value == pytest.approx(fast / late, rel=0.12)
        assert rows[1].ratio is None  # the leader
    ends = [float(reward(law, 8000)) for law in (FAST, SLOW)]
    assert 0.18 < result.costs[0][0] < result.costs[1][0] <= min(ends) + 0.01


def test_a_reward_that_is_never_reached_costs_infinitely_much() -> None:
    flat = 0.19 + 0.1 * (1 - np.exp(-C / 1000))
    low = curve(C, flat + np.random.default_rng(0).normal(0, SD, len(C)), np.full(len(C), SD), name="low")
    runs = {str(i): group(FAST, range(i, i + 1)) for i in range(4)} | {"low": [(low, fit_curve(low))]}
    result = compare_fits(runs)
    target, rows = result.costs[1]
    cost = {row.recipe: row for row in rows}["low"]
    assert target > 0.45 and cost.ratio and cost.compute.value == cost.ratio.value == np.inf


def test_the_cost_is_exact_on_a_line_and_infinite_far_beyond_the_data() -> None:
    compute = np.geomspace(10, 100_000, 5)
    line = np.linspace(0.1, 0.5, 5)  # + 0.1 a decade
    rewards = {"a": line[None], "b": np.minimum(line, 0.35)[None]}
    last = dict.fromkeys(rewards, 1000.0)
    curves = Curves(compute, rewards, last, last, (), 1000.0, 0.9)
    a, b = costs(curves, 0.33, "a")
    assert (a.compute.value, b.compute.value) == pytest.approx((10**3.3, 10 ** (3 + 0.3 / 0.5)))
    assert [c.compute.value for c in costs(curves, 0.45, "a")] == [np.inf, np.inf]


def test_the_cost_of_a_reward_reached_before_the_first_evaluation_is_anywhere_before_it() -> None:
    rewards = dict.fromkeys("ab", np.repeat([[0.3, 0.4]], 1000, axis=0))
    last = dict.fromkeys(rewards, 100.0)
    curves = Curves(np.array([10.0, 100.0]), rewards, last, last, (), 100.0, 0.9)
    cost, other = costs(curves, 0.2, "a")
    assert other.ratio and other.ratio.low < 0.3 and other.ratio.high > 3  # nothing is known of it
    assert (cost.compute.low, cost.compute.high) == pytest.approx((0.5, 9.5), abs=0.2)


def test_forecasts_of_two_recipes_err_independently() -> None:
    groups = [[fit.forecast for _, fit in group(FAST, seeds)] for seeds in (range(2), range(2, 4))]
    (a, b), _ = recipe_curves(groups, np.array([8000.0, 16_000.0]))
    assert abs(np.corrcoef(a[:, 1], b[:, 1])[0, 1]) < 0.1


def test_equal_recipes_are_not_told_apart() -> None:
    many = {f"r{i}": group(FAST, range(10 * i, 10 * i + 2), 0.05) for i in range(4)}
    result = compare_fits(many)
    assert not any(pair.ahead or pair.leads for pair in result.pairs)
    for _, row in result.budgets:
        assert max(s.best or 0 for s in row) < 0.9
    assert answer(result, "h").endswith("%; not distinguished from r1, r2, r3.")
    (says, *_) = pair_sentences(result.pairs[0], result, "h")
    assert re.fullmatch(r"Reward at 8,000 h, to which all have data: not distinguished, r0 less r1 .*", says)


def test_the_interval_of_a_reward_at_a_budget_holds_that_of_the_recipe() -> None:
    inside = []
    for first in range(0, 40, 2):
        result = compare_fits({"a": group(FAST, range(first, first + 2), 0.05)})
        for budget, (s,) in result.budgets[:3]:
            inside.append(s.reward.low <= reward(FAST, budget) <= s.reward.high)
    share = np.reshape(inside, (20, 3)).mean(0)
    assert (share >= 0.8).all()  # of intervals of 90 %


def test_more_runs_make_an_interval_within_the_data_narrower_and_none_of_a_forecast() -> None:
    runs = group(FAST, range(4))
    ((_, (alone,)),) = compare_fits({"a": runs[:1]}, [4000]).budgets
    ((_, (now,)), (_, (later,))) = compare_fits({"a": runs}, [4000, 16_000]).budgets
    width = float(np.median([e.high - e.low for e in (fit.at(16_000) for _, fit in runs)]))
    assert now.reward.high - now.reward.low < 0.5 * (alone.reward.high - alone.reward.low)
    assert later.reward.high - later.reward.low > 0.85 * width


def test_the_margin_between_seeds_is_that_of_the_runs_given() -> None:
    alone = compare_fits({str(i): group(FAST, range(i, i + 1)) for i in range(3)})
    exact = compare_fits({str(i): group(FAST, range(10 * i, 10 * i + 2)) for i in range(4)})
    apart = compare_fits({str(i): group(FAST, range(10 * i, 10 * i + 2), 0.2) for i in range(4)})
    sd = 0.2 * float(np.gradient(reward(FAST, C), np.log(np.maximum(C, 1)))[-1])  # ~ of the reward at the end
    assert alone.spread["reward"].value > 0.012  # 7 % of compute, where the curve is steep
    assert exact.reward_margin < alone.reward_margin < apart.reward_margin
    assert apart.spread["reward"].low < sd < apart.spread["reward"].high
    assert reward_seed_sentence(alone, "h").startswith("There is one run of each recipe")
    assert "Measured with 8 runs of 4 recipes" in reward_seed_sentence(apart, "h")


def test_a_recipe_that_has_fallen_is_not_ranked_and_the_others_are() -> None:
    fallen = falling()
    rising = {"a": group(FAST, range(1)), "b": group(SLOW, range(1))}
    result = compare_fits(rising | {"c": [(fallen, fit_curve(fallen))]})
    assert result.end is not None and [s.recipe for s in result.end[1]] == ["b", "a"]
    assert [pair.reward is None for pair in result.pairs] == [False, True, True]
    nothing = compare_fits({"c": [(fallen, fit_curve(fallen))]})
    assert nothing.end is None and nothing.budgets == () and not answer(nothing, "h")


def test_a_recipe_that_was_stopped_early_is_shown_and_not_ranked_where_the_others_end() -> None:
    whole, other = group(FAST, range(1)), group(SLOW, range(1))
    points = tuple(p for p in other[0][0].points if p.compute <= 2000)
    early = replace(other[0][0], points=points)
    result = compare_fits({"a": whole, "b": other, "c": [(early, fit_curve(early))]}, end=8000)
    assert result.end is not None and [budget for budget, _ in result.budgets] == [2000, 4000, 8000, 16_000]
    assert [(s.recipe, s.best is None) for s in result.end[1]] == [("b", False), ("a", False), ("c", True)]
    assert answer(result, "h").startswith("At 8,000 h: b, reward 0.7")
    assert answer(result, "h").endswith("; surely ahead of a.")
    assert [pair.ahead for pair in result.pairs] == ["b", "", ""]
    assert [pair.reward is None for pair in result.pairs] == [False, True, True]


def test_of_many_recipes_the_command_prints_one_ranking_and_no_paragraph_a_pair(command: Command) -> None:
    laws = {"fast": FAST, "again": FAST, "late": SLOW, "scalerl-sample-average": (30_000.0, 0.6)}
    for i, (name, law) in enumerate(laws.items()):
        write(Path(f"{name}.csv"), run(law, 50 + i)[0])
    line = "compare " + " ".join(f"{name}.csv" for name in laws)
    text = command(line)
    assert text.startswith("At 8,000 GPU-hours, to which all have data: late, reward 0.7")
    assert re.search(r"^ 1 late +1 +0\.7\d\d \(.*\) +over 99% +2–4$", text, re.M)
    assert re.search(r"^ 4 scalerl-sample-average +1 +0\.\d{3} \(.*\) +under 1%$", text, re.M)
    assert max(map(len, text.splitlines())) <= 79 and " against " not in text
    assert command(f"{line} --details").count(" against ") >= 6


def test_places_are_shortened_to_ranges() -> None:
    assert ranges([5, 1, 3, 4]) == "1, 3–5" and ranges([]) == ""
