"""Promises of compare: verdicts are right as often as said, and crossings are those found by hand."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import Command
from simulated import falling, simulated, write

from trainer.scaling import Curve, EvalPoint, Sigmoid, compare, tables
from trainer.scaling.budgets import Lead, find_leads, simultaneous_band
from trainer.scaling.compare import DIFFERENT, EQUIVALENT, INCONCLUSIVE, Comparison, at_ceiling, compare_fits
from trainer.scaling.curve.fit import Fit, fit_curve
from trainer.scaling.layout import interval

# arXiv 2510.13786: B at the common A = .61 is 2.01 (ScaleRL) and 1.77 (with DAPO's loss); C_mid is Table 1's
SCALERL = Sigmoid(R0=0.30, A=0.61, B=2.01, C_mid=2542)
DAPO_LOSS = Sigmoid(R0=0.30, A=0.61, B=1.77, C_mid=2542)
OFTEN, SELDOM = np.arange(500, 16_001, 500.0), np.arange(1000, 16_001, 1000.0)
PILOT = np.arange(1500, 4001, 250.0)  # too short for a ceiling
UNIT = "GPU-hours"


@cache
def fitted(law: Sigmoid, seed: int | None, at: tuple[float, ...], sd: float) -> tuple[Curve, Fit]:
    curve = simulated(law, np.array(at), sd, seed, f"run {seed}")
    return curve, fit_curve(curve)


def fits(
    law: Sigmoid, *seeds: int | None, at: np.ndarray = OFTEN, sd: float = 0.005
) -> list[tuple[Curve, Fit]]:
    """Runs of one recipe; the same run is fitted once in this file."""
    return [fitted(law, seed, tuple(at), sd) for seed in seeds]


def two(a: Sigmoid, b: Sigmoid, sd: float = 0.005, seed: int | None = None) -> Comparison:
    other = None if seed is None else seed + 1000
    return compare_fits({"a": fits(a, seed, at=SELDOM, sd=sd), "b": fits(b, other, at=SELDOM, sd=sd)})


def said(comparison: Comparison) -> str:
    """The sentences on the first two recipes."""
    return " ".join(tables.pair_sentences(comparison.pairs[0], comparison, UNIT))


@pytest.mark.slow
def test_the_papers_ceilings_differ_and_those_within_its_margin_do_not() -> None:
    cispo, dapo = Sigmoid(0.3, 0.595, 1.9, 2542), Sigmoid(0.3, 0.52, 1.9, 2542)  # §3: losses compared
    assert [two(cispo, dapo, seed=s).pairs[0].verdict for s in range(2)] == [DIFFERENT] * 2
    near = Sigmoid(0.3, 0.605, 2.0, 2600)  # leave-one-out runs all lie within .590–.610: no difference
    verdicts = [two(cispo, near, sd=0.003, seed=s).pairs[0].verdict for s in range(4)]
    assert DIFFERENT not in verdicts and verdicts.count(EQUIVALENT) >= 3


def test_holding_the_ceiling_is_least_squares_with_the_ceiling_held() -> None:
    from scipy.optimize import least_squares

    run, fit = fits(SCALERL, 8)[0]
    c, r = np.array([(p.compute, p.pass_rate) for p in run.points]).T
    assert fit.draws is not None and fit.autocorrelated_prob < 0.01  # white noise, as least squares has it
    for A in (0.595, 0.605, 0.615):

        def residuals(x: np.ndarray, A: float = A) -> np.ndarray:
            sigmoid = Sigmoid(x[2], A, np.exp(x[0]), np.exp(x[1]))
            assert isinstance(run.R0, EvalPoint)
            return np.r_[sigmoid.reward(c) - r, x[2] - run.R0.pass_rate]

        exact = least_squares(residuals, [0.6, 7.8, 0.3], x_scale=[0.1, 0.1, 0.01]).x
        sigmoid, fixed = at_ceiling(fit.sigmoid, fit.draws, A)
        B, C_mid = np.exp(exact[:2])
        assert (sigmoid.B, sigmoid.C_mid) == (pytest.approx(B, rel=0.01), pytest.approx(C_mid, rel=0.01))
        low, high = np.quantile(fixed.B, [0.05, 0.95])
        assert low < B < high and set(fixed.A) == {A}


def test_curves_of_equal_slope_cross_where_algebra_says_and_there_each_may_be_the_best() -> None:
    # a (1 + (M_b/C)^B) = b (1 + (M_a/C)^B), with a and b the rises: (1/C)^B = (a − b) / (b M_a^B − a M_b^B)
    high, low = Sigmoid(0.3, 0.62, 2.0, 4000), Sigmoid(0.3, 0.55, 2.0, 1500)
    a, b = 0.32, 0.25
    by_hand = ((a - b) / (b * 4000**2 - a * 1500**2)) ** -0.5  # 6,845
    assert float(high.reward(by_hand)) == pytest.approx(float(low.reward(by_hand)))
    runs = {name: fits(law, None, at=SELDOM, sd=0.002) for name, law in (("a", high), ("b", low))}
    result = compare_fits(runs, [1000.0, by_hand, 50_000.0])
    (pair,) = result.pairs
    (crossing,) = pair.crossings
    assert crossing.compute.value == pytest.approx(by_hand, rel=0.01) and crossing.winner == "a"
    assert crossing.compute.low < by_hand < crossing.compute.high
    first, then = pair.leads
    assert (first.winner, then.winner) == ("b", "a") and first.high < by_hand < then.low
    assert first.low == pair.searched[0] == 1000 and then.high == pair.searched[1] == 160_000
    chances = [standings[0].best for _, standings in result.budgets]
    assert chances[0] < 0.01 and 0.4 < chances[1] < 0.6 and chances[2] > 0.99
    assert all(sum(s.best for s in standings) == pytest.approx(1) for _, standings in result.budgets)


@pytest.mark.slow
def test_only_equivalent_ceilings_are_made_one_to_compare_the_rest() -> None:
    law, other = Sigmoid(0.3, 0.58, 1.8, 2000), Sigmoid(0.3, 0.60, 1.8, 2000)
    for result in (two(SCALERL, SCALERL), *(two(other, law, seed=seed) for seed in range(3))):
        (pair,) = result.pairs
        text = said(result)
        assert not pair.B_differs and not pair.C_mid_differs  # the truth: B and C_mid are equal
        if pair.verdict == EQUIVALENT:
            assert pair.common_A is not None and f"both at the ceiling {pair.common_A:.3f}" in text
        else:
            assert pair.common_A is None and "each at its own ceiling" in text
            assert "depend on the ceilings, which cannot be distinguished" in text
    assert pair.verdict == INCONCLUSIVE
    pair = two(SCALERL, SCALERL).pairs[0]  # no noise: the ceilings are equal
    assert pair.verdict == EQUIVALENT and pair.common_A == pytest.approx(0.61, abs=0.003)
    assert pair.B[0].value == pytest.approx(2.01, rel=0.01) and pair.B_ratio.value == pytest.approx(1)


@pytest.mark.parametrize("pairs", [3, pytest.param(12, marks=pytest.mark.slow)])
def test_two_runs_of_one_recipe_are_not_said_to_differ(pairs: int) -> None:
    rng, alarms, leads = np.random.default_rng(1), 0, 0
    runs = []
    for seed in range(2 * pairs):
        z = rng.normal(size=3)
        law = Sigmoid(0.3, 0.58 + 0.006 * z[0], 1.8 * np.exp(0.05 * z[1]), 2000 * np.exp(0.07 * z[2]))
        runs += fits(law, seed, at=SELDOM)
    for one, other in zip(runs[::2], runs[1::2], strict=True):
        pair = compare_fits({"a": [one], "b": [other]}).pairs[0]
        alarms += pair.B_differs or pair.C_mid_differs or pair.verdict == DIFFERENT
        leads += bool(pair.leads)
    assert alarms <= pairs // 6 and leads <= pairs // 4


@pytest.mark.slow
def test_other_seeds_widen_a_run_by_the_prior_and_more_seeds_narrow_it_again() -> None:
    for first in (0, 3):
        runs = fits(Sigmoid(0.3, 0.58, 1.8, 2000), *range(first, first + 3), at=SELDOM[:8])
        (together,) = compare_fits({"all": runs}).recipes
        alone = compare_fits({str(i): [run] for i, run in enumerate(runs)}).recipes
        widths = [e.high - e.low for e in (recipe.estimate("A") for recipe in alone)]
        A, fit = together.estimate("A"), runs[0][1]
        assert A.high - A.low <= min(widths)
        assert widths[0] > fit.A.high - fit.A.low  # with the prior of other seeds
        assert not together.doubts or all(recipe.doubts for recipe in alone)


def test_an_identified_seed_makes_an_identified_recipe_however_far_the_others_are() -> None:
    long, short = fits(SCALERL, 0, 1), fits(SCALERL, 5, at=PILOT)
    assert long[0][1].identified and short[0][1].flags == ("wide",)
    result = compare_fits({"a": long + short, "b": fits(Sigmoid(0.3, 0.5, 2, 2500), 7)})
    assert result.recipes[0].used == (0, 1, 2) and not result.recipes[0].doubts
    assert result.pairs[0].verdict == DIFFERENT
    far = fits(Sigmoid(0.3, 0.85, 2, 2500), 5, at=PILOT)
    assert far[0][1].flags == ("wide",)
    (recipe,) = compare_fits({"a": long[:1] + far}).recipes
    A = recipe.estimate("A")
    assert not recipe.doubts and A.high - A.low > 0.1


def test_seeds_far_apart_make_no_two_recipes_equivalent() -> None:
    far = [fits(Sigmoid(0.3, A, 2, 2500), i, at=SELDOM)[0] for i, A in enumerate((0.5, 0.6, 0.57, 0.67))]
    pair = compare_fits({"a": far[:2], "b": far[2:]}).pairs[0]
    assert pair.margin == 0.02 and pair.verdict == INCONCLUSIVE
    assert pair.A.high - pair.A.low > 0.15


def test_a_fallen_seed_is_left_out_and_named() -> None:
    fallen = falling()
    runs, others = fits(SCALERL, 0, 1), fits(DAPO_LOSS, 7)
    result = compare_fits({"a": [*runs, (fallen, fit_curve(fallen))], "b": others})
    alone = compare_fits({"a": runs, "b": others})
    assert result.recipes[0].used == (0, 1)
    assert result.recipes[0].estimate("A") == alone.recipes[0].estimate("A")
    assert "falling is left out of a: the reward has fallen" in tables.recipe_sentences(result)[0]
    nothing = compare_fits({"a": [(fallen, fit_curve(fallen))], "b": others})
    assert [s.recipe for s in nothing.budgets[0][1]] == ["b"] and not nothing.pairs[0].leads
    assert "not computed. a: the reward has fallen" in said(nothing)


def test_the_band_holds_curves_everywhere_as_often_as_said() -> None:
    rng = np.random.default_rng(0)
    x = np.linspace(0, 1, 50)

    def curves(n: int) -> np.ndarray:
        a, b = rng.normal(size=(2, n, 1))
        return 1 + a * x + 0.3 * b

    low, high = simultaneous_band(curves(20_000), 0.9)
    inside = np.mean([((low <= c) & (c <= high)).all() for c in curves(5000)])
    assert inside == pytest.approx(0.9, abs=0.015)
    one, other = simultaneous_band(rng.normal(size=(20_000, 1)), 0.9)  # one column: the usual interval
    assert (one[0], other[0]) == (pytest.approx(-1.645, abs=0.05), pytest.approx(1.645, abs=0.05))


def test_a_lead_spans_half_as_much_compute_again() -> None:
    compute = np.array([1.0, 1.2, 1.4, 2.0, 3.0, 4.0])
    low = np.array([-1, 1, 1, -1, -3, -3.0])  # ahead from 1.2 to 1.4 only: too short
    high = np.array([1, 2, 2, 1, -1, -1.0])  # behind from 3 to 4: not long enough either
    assert find_leads(("a", "b"), compute, low, high) == ()
    high[3] = -1
    assert find_leads(("a", "b"), compute, low, high) == (Lead("b", 2.0, 4.0),)


def test_beyond_its_data_a_recipe_is_ranked_up_to_ten_times_or_not_at_all() -> None:
    long, short, pilot = fits(SCALERL, 0), fits(DAPO_LOSS, 1, at=OFTEN[:14]), fits(SCALERL, 5, at=PILOT)
    assert short[0][1].identified and pilot[0][1].flags == ("wide",)
    result = compare_fits({"a": long, "b": short, "p": pilot}, [4200, 16_000, 70_000, 71_000, 161_000])
    ranked = [[s.recipe for s in standings if s.best is not None] for _, standings in result.budgets]
    assert ranked == [["a", "b", "p"], ["a", "b"], ["a", "b"], [], []]  # one alone is not the best
    for _, standings in result.budgets:
        assert sum(s.best or 0 for s in standings) == pytest.approx(1 if standings[0].best is not None else 0)
    assert [s.times_data for s in result.budgets[1][1]] == pytest.approx([1, 16 / 7, 4])
    rows = {row[0]: row[1:] for row in next(tables.at_budgets(result, UNIT)).rows[1:]}
    alone = {name: ["–" in cell for cell in row] for name, row in rows.items()}
    assert [sum(column) for column in zip(*alone.values(), strict=True)] == [0, 1, 1, 2, 3]
    starred = {name: [cell.endswith("*") for cell in row] for name, row in rows.items()}
    assert not any(row[0] for row in starred.values())  # p: by 5 %
    assert starred["b"] == [False, True, True, True, True]
    unsure, further, assumed = tables.budget_sentences(result)
    assert "Not ranked beyond twice its data" in unsure and unsure.endswith(": p.")
    assert further == "Not ranked beyond 10 times its data: a, b."
    assert assumed.startswith("* A forecast, beyond the recipe's data")
    assert len(tables.budget_sentences(compare_fits({"a": long, "b": short}, [7000]))) == 0
    assert [pair.searched[1] for pair in result.pairs] == [70_000, 8400, 8400]


def test_leads_and_ceilings_in_words() -> None:
    result = two(SCALERL, DAPO_LOSS)
    sure = "GPU-hours (95% over all these budgets together)"
    for lead, says in (
        (Lead("a", 1000, 5000), f"a is ahead up to 5,000 {sure}; beyond that it is not known."),
        (Lead("a", 2000, 160_000), f"a is ahead from 2,000 to 160,000 {sure}."),
    ):
        pair = replace(result.pairs[0], leads=(lead,), crossings=())
        assert tables.pair_sentences(pair, result, UNIT)[-1] == says
    assert f": {interval(result.pairs[0].C_mid[0])} against" in said(result)
    pilots = compare_fits({name: fits(SCALERL, 5, at=PILOT) for name in ("p", "q")})
    assert tables.pair_sentences(pilots.pairs[0], pilots, UNIT)[1].endswith(
        "those of p and q are not identified."
    )


def test_confidence_reaches_every_interval() -> None:
    def widths(confidence: float) -> list[float]:
        runs = {"a": [simulated(SCALERL, SELDOM, 0.005, 1)], "b": [simulated(DAPO_LOSS, SELDOM, 0.005, 2)]}
        result = compare(runs, confidence=confidence)
        pair = result.pairs[0]
        of_all = [result.recipes[0].estimate(k) for k in ("A", "B", "C_mid")]
        of_all += [pair.A, pair.A_runs, *pair.B, pair.B_ratio, *pair.C_mid, pair.C_mid_ratio]
        of_all += [result.spread["A"], result.budgets[0][1][0].reward]
        return [e.high - e.low for e in of_all] + [pair.margin]

    assert all(wide > narrow for wide, narrow in zip(widths(0.95), widths(0.8), strict=True))


def test_of_many_recipes_only_rewards_ceilings_and_leads_are_described() -> None:
    runs = fits(SCALERL, *range(4), at=SELDOM)
    few, many = (compare_fits({str(i): [run] for i, run in enumerate(runs[:n])}) for n in (3, 4))
    assert any("Efficiency B" in s for s in tables.pair_sentences(few.pairs[0], few, UNIT))
    assert len(tables.pair_sentences(many.pairs[0], many, UNIT)) == 3


def test_the_sentence_on_seeds_says_what_is_assumed_and_what_was_measured() -> None:
    alone = tables.seed_sentence(two(SCALERL, DAPO_LOSS))
    assert "±0.02 (the paper's)" in alone and "7%, for which nothing is published" in alone
    both = compare_fits({"a": fits(SCALERL, 0, 1), "b": fits(DAPO_LOSS, 7)})
    assert "updated with 3 runs of 2 recipes" in tables.seed_sentence(both)
    assert both.spread["B"].low < 0.07 < both.spread["B"].high


def test_without_an_identified_ceiling_the_verdict_is_inconclusive() -> None:
    fallen = falling()
    for other, flag in ((fits(SCALERL, 5, at=PILOT)[0], "wide"), ((fallen, fit_curve(fallen)), "falling")):
        pair = compare_fits({"a": fits(DAPO_LOSS, 7), "b": [other]}).pairs[0]
        assert pair.verdict == INCONCLUSIVE and flag in pair.doubts


def test_the_command_prints_plots_and_writes(command: Command) -> None:
    seeds = ",".join(write(Path(f"s{i}.csv"), simulated(SCALERL, SELDOM, 0.005, i)) for i in range(2))
    write(Path("dapo.csv"), simulated(Sigmoid(0.3, 0.52, 1.77, 1800), SELDOM, 0.005, 9))
    text = command(f"compare scalerl={seeds} dapo.csv --at 8000 --json c.json --plot e.svg")
    for says in ("The ceilings differ: A +0.0", "scalerl is ahead from", "updated with 3 runs of 2 recipes"):
        assert says in text.words
    assert "C: 'gpu_hours', in GPU-hours. R: 'pass_rate'." in text
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"evaluations +data to \(GPU-hours\)\nscalerl +2 +32 +16,000\n", text)
    content, recipes = text.json, text.json["recipes"]
    assert "extrapolated" not in text and recipes["scalerl"]["data_to"] == 16_000
    assert content["pairs"][0]["verdict"] == DIFFERENT and content["budgets"][0]["compute"] == 8000
    assert set(recipes) == {"scalerl", "dapo"} and len(recipes["scalerl"]["runs"]) == 2
    spread = content["spread_over_seeds"]
    assert (spread["seeds"], spread["margin"]) == (1, 0.02)  # runs beyond the first of each; the paper's
    assert "scalerl (2 runs)" in Path("e.svg").read_text()


def test_the_level_of_the_command_is_that_of_all_its_intervals(command: Command) -> None:
    for seed in range(2):
        write(Path(f"s{seed}.csv"), simulated(SCALERL, SELDOM, 0.005, seed))
    text = command("compare s0.csv s1.csv --confidence 0.8 --within 0.001 --json c.json")
    assert "(80% intervals" in text.words and "together with 90%" in text.words
    assert "(90% over all" in text.words
    assert "the interval of A reaches further than 0.001 from its value" in text.words
    of_the_run = text.json["recipes"]["s0"]["runs"]["s0.csv"]
    assert text.json["confidence"] == of_the_run["confidence"] == 0.8


def test_the_command_says_when_a_ceiling_is_not_identified(command: Command) -> None:
    write(Path("full.csv"), simulated(SCALERL, OFTEN, 0.005, 0))
    write(Path("flat.csv"), simulated(Sigmoid(0.3, 0.3, 1, 2000), OFTEN, 0.005, 0))
    text = command("compare full.csv flat.csv --plot e.png")
    assert "not known: that of flat is not identified" in text and "has not risen" in text
    assert "Efficiency B" not in text and "beyond its data, because it has not risen: flat." in text
    ranked, rewards, best = re.findall(r"^(?: 2 flat +1|flat) +((?:0|under).*)", text, re.M)
    assert re.fullmatch(r"0\.\d{3} \(.*\) +under 1%", ranked)
    assert re.fullmatch(r"(0\.\d{3}±0\.\d{3} +){3}0\.\d{3}–0\.\d{3}\*", rewards)
    assert best.split("  ") == ["under 1%"] * 3
