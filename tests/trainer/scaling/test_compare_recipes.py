"""Promises of compare: verdicts are right as often as said, and crossings are those found by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from simulated import assert_one_line_and_exit_code_2, falling, simulated, write

from trainer.scaling import Curve, EvalPoint, Sigmoid
from trainer.scaling.__main__ import main
from trainer.scaling.budgets import Lead, find_leads, simultaneous_band
from trainer.scaling.compare import (
    DIFFERENT,
    EQUIVALENT,
    INCONCLUSIVE,
    Comparison,
    at_ceiling,
    compare,
    compare_fits,
)
from trainer.scaling.compare_text import (
    budget_sentences,
    extrapolated,
    pair_sentences,
    recipe_sentences,
    reward_at,
    seed_sentence,
)
from trainer.scaling.curve.fit import Fit, fit_curve
from trainer.scaling.plot import plot_recipes
from trainer.scaling.text import amounts

# arXiv 2510.13786: B at the common A = .61 is 2.01 (ScaleRL) and 1.77 (with DAPO's loss); C_mid is Table 1's
SCALERL = Sigmoid(R0=0.30, A=0.61, B=2.01, C_mid=2542)
DAPO_LOSS = Sigmoid(R0=0.30, A=0.61, B=1.77, C_mid=2542)
OFTEN, SELDOM = np.arange(500, 16_001, 500.0), np.arange(1000, 16_001, 1000.0)


def two(a: Sigmoid, b: Sigmoid, sd: float = 0.005, seed: int | None = None) -> Comparison:
    other = None if seed is None else seed + 1000
    return compare({"a": [simulated(a, SELDOM, sd, seed)], "b": [simulated(b, SELDOM, sd, other)]})


def test_the_papers_ceilings_differ_and_those_within_its_margin_do_not() -> None:
    cispo, dapo = Sigmoid(0.3, 0.595, 1.9, 2542), Sigmoid(0.3, 0.52, 1.9, 2542)  # §3: losses compared
    verdicts = [two(cispo, dapo, seed=s).pairs[0].verdict for s in range(4)]
    assert verdicts == [DIFFERENT] * 4
    near = Sigmoid(0.3, 0.605, 2.0, 2600)  # leave-one-out runs all lie within .590–.610: no difference
    verdicts = [two(cispo, near, sd=0.003, seed=s).pairs[0].verdict for s in range(8)]
    assert DIFFERENT not in verdicts and verdicts.count(EQUIVALENT) >= 6


def test_holding_the_ceiling_is_least_squares_with_the_ceiling_held() -> None:
    from scipy.optimize import least_squares

    run = simulated(SCALERL, OFTEN, 0.005, 8)
    recipe = compare({"a": [run], "b": [run]}).recipes[0]
    c, r = np.array([(p.compute, p.pass_rate) for p in run.points]).T
    assert recipe.fits[0].autocorrelated_prob < 0.01  # white noise, as least squares has it
    for A in (0.595, 0.605, 0.615):

        def residuals(x: np.ndarray, A: float = A) -> np.ndarray:
            sigmoid = Sigmoid(x[2], A, np.exp(x[0]), np.exp(x[1]))
            assert isinstance(run.R0, EvalPoint)
            return np.r_[sigmoid.reward(c) - r, x[2] - run.R0.pass_rate]

        exact = least_squares(residuals, [0.6, 7.8, 0.3], x_scale=[0.1, 0.1, 0.01]).x
        draws = recipe.fits[0].draws
        assert draws is not None
        sigmoid, held = at_ceiling(recipe.fits[0].sigmoid, draws, A)
        B, C_mid = np.exp(exact[:2])
        assert (sigmoid.B, sigmoid.C_mid) == (pytest.approx(B, rel=0.01), pytest.approx(C_mid, rel=0.01))
        low, high = np.quantile(held.B, [0.05, 0.95])
        assert low < B < high and set(held.A) == {A}


def test_curves_of_equal_slope_cross_where_algebra_says() -> None:
    # a (1 + (M_b/C)^B) = b (1 + (M_a/C)^B), with a and b the rises: (1/C)^B = (a − b) / (b M_a^B − a M_b^B)
    high, low = Sigmoid(0.3, 0.62, 2.0, 4000), Sigmoid(0.3, 0.55, 2.0, 1500)
    a, b = 0.32, 0.25
    by_hand = ((a - b) / (b * 4000**2 - a * 1500**2)) ** -0.5  # 6,848
    assert by_hand == pytest.approx(float(np.sqrt(3.28e6 / 0.07)), rel=1e-9)
    assert float(high.reward(by_hand)) == pytest.approx(float(low.reward(by_hand)))
    pair = two(high, low, sd=0.002).pairs[0]
    (crossing,) = pair.crossings
    assert crossing.compute.value == pytest.approx(by_hand, rel=0.01) and crossing.winner == "a"
    assert crossing.compute.low < by_hand < crossing.compute.high
    first, then = pair.leads
    assert (first.winner, then.winner) == ("b", "a") and first.high < by_hand < then.low
    assert first.low == pair.searched[0] == 1000 and then.high == pair.searched[1] == 160_000


def test_the_chance_to_be_the_best_is_a_half_at_the_crossing_and_certain_far_from_it() -> None:
    high, low = Sigmoid(0.3, 0.62, 2.0, 4000), Sigmoid(0.3, 0.55, 2.0, 1500)
    runs = {"a": [simulated(high, OFTEN, 0.002, None)], "b": [simulated(low, OFTEN, 0.002, None)]}
    found = compare(runs, [1000.0, 6848.0, 50_000.0])
    chances = [standings[0].best for _, standings in found.budgets]
    assert chances[0] < 0.01 and 0.4 < chances[1] < 0.6 and chances[2] > 0.99
    assert all(sum(s.best for s in standings) == pytest.approx(1) for _, standings in found.budgets)


def fits(
    sigmoid: Sigmoid, seeds: range, at: np.ndarray = OFTEN, sd: float = 0.005
) -> list[tuple[Curve, Fit]]:
    curves = [simulated(sigmoid, at, sd, seed, f"run {seed}") for seed in seeds]
    return [(curve, fit_curve(curve)) for curve in curves]


def test_only_equivalent_ceilings_are_made_one_to_compare_the_rest() -> None:
    law, other = Sigmoid(0.3, 0.58, 1.8, 2000), Sigmoid(0.3, 0.60, 1.8, 2000)
    shares = {EQUIVALENT: 0, INCONCLUSIVE: 0}
    for seed in range(6):
        found = compare_fits(
            {"a": fits(other, range(seed, seed + 1)), "b": fits(law, range(90 + seed, 91 + seed))}
        )
        pair = found.pairs[0]
        shares[pair.verdict] += 1
        text = " ".join(pair_sentences(pair, found, "GPU-hours"))
        assert not pair.B_differs and not pair.C_mid_differs  # the truth: B and C_mid are equal
        if pair.verdict == EQUIVALENT:
            assert pair.common_A is not None and f"both at the ceiling {pair.common_A:.3f}" in text
        else:
            assert pair.common_A is None and "each at its own ceiling" in text
            assert "depend on the ceilings, which cannot be distinguished" in text
    assert shares[INCONCLUSIVE] >= 3


def test_equivalent_recipes_are_compared_at_one_ceiling() -> None:
    pair = two(SCALERL, SCALERL).pairs[0]  # no noise: the ceilings are equal
    assert pair.verdict == EQUIVALENT and pair.common_A == pytest.approx(0.61, abs=0.003)
    assert pair.B[0].value == pytest.approx(2.01, rel=0.01) and pair.B_ratio.value == pytest.approx(1)


def test_two_runs_of_one_recipe_are_not_said_to_differ() -> None:
    rng, alarms, leads = np.random.default_rng(1), 0, 0
    runs = []
    for seed in range(24):
        z = rng.normal(size=3)
        law = Sigmoid(0.3, 0.58 + 0.006 * z[0], 1.8 * np.exp(0.05 * z[1]), 2000 * np.exp(0.07 * z[2]))
        runs += fits(law, range(seed, seed + 1), SELDOM)
    for one, other in zip(runs[::2], runs[1::2], strict=True):
        pair = compare_fits({"a": [one], "b": [other]}).pairs[0]
        alarms += pair.B_differs or pair.C_mid_differs or pair.verdict == DIFFERENT
        leads += bool(pair.leads)
    assert alarms <= 2 and leads <= 3  # of 12 pairs


def test_other_seeds_widen_a_run_by_the_prior_and_more_seeds_narrow_it_again() -> None:
    groups = [fits(Sigmoid(0.3, 0.58, 1.8, 2000), range(3 * i, 3 * i + 3), SELDOM[:8]) for i in range(5)]
    for runs in groups:
        (together,) = compare_fits({"all": runs}).recipes
        alone = compare_fits({str(i): [run] for i, run in enumerate(runs)}).recipes
        widths = [e.high - e.low for e in (recipe.estimate("A") for recipe in alone)]
        A = together.estimate("A")
        assert A.high - A.low <= min(widths)
        fit = runs[0][1]
        assert widths[0] > fit.A.high - fit.A.low  # with the prior of other seeds
        assert not together.doubts or all(recipe.doubts for recipe in alone)


def test_a_seed_that_is_not_identified_does_not_silence_its_recipe() -> None:
    long = fits(SCALERL, range(2))
    short = fits(SCALERL, range(5, 6), np.arange(1500, 4001, 250.0))
    assert short[0][1].flags == ("wide",)
    found = compare_fits({"a": long + short, "b": fits(Sigmoid(0.3, 0.5, 2, 2500), range(7, 9))})
    assert found.recipes[0].used == (0, 1, 2) and not found.recipes[0].doubts
    assert found.pairs[0].verdict == DIFFERENT


def test_an_identified_seed_makes_an_identified_recipe_however_far_the_others_are() -> None:
    long = fits(SCALERL, range(1))
    short = fits(Sigmoid(0.3, 0.85, 2, 2500), range(5, 6), np.arange(1500, 4001, 250.0))
    assert long[0][1].identified and short[0][1].flags == ("wide",)
    recipe = compare_fits({"a": long + short}).recipes[0]
    A = recipe.estimate("A")
    assert not recipe.doubts and A.high - A.low > 0.1


def test_seeds_far_apart_make_no_two_recipes_equivalent() -> None:
    far = [
        fits(Sigmoid(0.3, A, 2, 2500), range(i, i + 1), SELDOM)[0]
        for i, A in enumerate((0.5, 0.6, 0.57, 0.67))
    ]
    pair = compare_fits({"a": far[:2], "b": far[2:]}).pairs[0]
    assert pair.margin == 0.02 and pair.verdict == INCONCLUSIVE
    assert pair.A.high - pair.A.low > 0.15


def test_a_fallen_seed_is_left_out_and_named() -> None:
    fallen = falling()
    found = compare_fits(
        {"a": [*fits(SCALERL, range(2)), (fallen, fit_curve(fallen))], "b": fits(DAPO_LOSS, range(7, 8))}
    )
    alone = compare_fits({"a": fits(SCALERL, range(2)), "b": fits(DAPO_LOSS, range(7, 8))})
    assert found.recipes[0].used == (0, 1)
    assert found.recipes[0].estimate("A") == alone.recipes[0].estimate("A")
    assert "falling is left out of a: the reward has fallen" in recipe_sentences(found)[0]
    nothing = compare_fits({"a": [(fallen, fit_curve(fallen))], "b": fits(DAPO_LOSS, range(7, 8))})
    assert [s.recipe for s in nothing.budgets[0][1]] == ["b"] and not nothing.pairs[0].leads
    text = " ".join(pair_sentences(nothing.pairs[0], nothing, "GPU-hours"))
    assert "not computed. a: the reward has fallen" in text


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
    long, short = fits(SCALERL, range(1)), fits(DAPO_LOSS, range(1, 2), OFTEN[:14])
    pilot = fits(SCALERL, range(5, 6), np.arange(1500, 4001, 250.0))
    assert short[0][1].identified and pilot[0][1].flags == ("wide",)
    found = compare_fits({"a": long, "b": short, "p": pilot}, [4200, 16_000, 70_000, 71_000, 161_000])
    ranked = [[s.recipe for s in standings if s.best is not None] for _, standings in found.budgets]
    assert ranked == [["a", "b", "p"], ["a", "b"], ["a", "b"], [], []]  # one alone is not the best
    for _, standings in found.budgets:
        assert sum(s.best or 0 for s in standings) == pytest.approx(1 if standings[0].best is not None else 0)
    assert [s.times_data for s in found.budgets[1][1]] == pytest.approx([1, 16 / 7, 4])
    texts = [[reward_at(s).count("(") for s in standings] for _, standings in found.budgets]
    assert texts == [[1, 1, 1], [1, 1, 0], [1, 1, 0], [1, 0, 0], [0, 0, 0]]
    assert [extrapolated(s) for s in found.budgets[0][1]] == ["", "", ""]  # p: by 5 %
    assert extrapolated(found.budgets[3][1][1]) == "extrapolated, 10 × its data"
    unsure, further, assumed = budget_sentences(found)
    assert "Not ranked beyond twice its data" in unsure and unsure.endswith(": p.")
    assert further == "Not ranked beyond 10 times its data: a, b."
    assert assumed.startswith("* A forecast, beyond the recipe's data")
    assert len(budget_sentences(compare_fits({"a": long, "b": short}, [7000]))) == 0
    assert [pair.searched[1] for pair in found.pairs] == [70_000, 8400, 8400]


def test_a_lead_that_ends_within_the_range_says_that_the_rest_is_not_known() -> None:
    found = two(SCALERL, DAPO_LOSS)
    pair = replace(found.pairs[0], leads=(Lead("a", 1000, 5000),), crossings=())
    (says,) = pair_sentences(pair, found, "GPU-hours")[-1:]
    end = "(95% over all these budgets together); beyond that it is not known."
    assert says == f"a is ahead up to 5,000 GPU-hours {end}"
    pair = replace(pair, leads=(Lead("a", 2000, 160_000),))
    (says,) = pair_sentences(pair, found, "GPU-hours")[-1:]
    assert says == "a is ahead from 2,000 to 160,000 GPU-hours (95% over all these budgets together)."


def test_several_ceilings_are_named_in_the_plural_and_C_mid_has_the_digits_of_the_table() -> None:
    pilots = {name: fits(SCALERL, range(5, 6), np.arange(1500, 4001, 250.0)) for name in ("p", "q")}
    found = compare_fits(pilots)
    assert pair_sentences(found.pairs[0], found, "h")[1].endswith("those of p and q are not identified.")
    found = two(SCALERL, DAPO_LOSS)
    text = " ".join(pair_sentences(found.pairs[0], found, "GPU-hours"))
    assert f": {amounts(found.pairs[0].C_mid[0])} against" in text


def test_confidence_reaches_every_interval() -> None:
    def widths(confidence: float) -> list[float]:
        runs = {"a": [simulated(SCALERL, OFTEN, 0.005, 1)], "b": [simulated(DAPO_LOSS, OFTEN, 0.005, 2)]}
        found = compare(runs, confidence=confidence)
        pair = found.pairs[0]
        of_all = [found.recipes[0].estimate(k) for k in ("A", "B", "C_mid")]
        of_all += [pair.A, pair.A_runs, *pair.B, pair.B_ratio, *pair.C_mid, pair.C_mid_ratio]
        of_all += [found.spread["A"], found.budgets[0][1][0].reward]
        return [e.high - e.low for e in of_all] + [pair.margin]

    assert all(wide > narrow for wide, narrow in zip(widths(0.95), widths(0.8), strict=True))


def test_of_many_recipes_only_rewards_ceilings_and_leads_are_described() -> None:
    runs = fits(SCALERL, range(4), SELDOM)
    few, many = (compare_fits({str(i): [run] for i, run in enumerate(runs[:n])}) for n in (3, 4))
    assert any("Efficiency B" in s for s in pair_sentences(few.pairs[0], few, "GPU-hours"))
    assert len(pair_sentences(many.pairs[0], many, "GPU-hours")) == 3


def test_the_sentence_on_seeds_says_what_is_assumed_and_what_was_measured() -> None:
    alone = two(SCALERL, DAPO_LOSS)
    assert "±0.02 (the paper's; --margin)" in seed_sentence(alone)
    assert "7%, for which nothing is published" in seed_sentence(alone)
    both = compare_fits({"a": fits(SCALERL, range(2)), "b": fits(DAPO_LOSS, range(7, 8))})
    assert "updated with 3 runs of 2 recipes" in seed_sentence(both)
    assert both.spread["B"].low < 0.07 < both.spread["B"].high


def test_without_an_identified_ceiling_the_verdict_is_inconclusive() -> None:
    short = [simulated(SCALERL, np.arange(1500, 4001, 250.0), 0.005, 1)]
    full = [simulated(DAPO_LOSS, OFTEN, 0.005, 2)]
    for other, flag in ((short, "wide"), ([falling()], "falling")):
        pair = compare({"a": full, "b": other}).pairs[0]
        assert pair.verdict == INCONCLUSIVE and flag in pair.doubts


def test_the_command_prints_plots_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    low = Sigmoid(0.3, 0.52, 1.77, 1800)
    seeds = ",".join(write(Path(f"s{i}.csv"), simulated(SCALERL, OFTEN, 0.005, i)) for i in range(2))
    dapo = write(Path("dapo.csv"), simulated(low, OFTEN, 0.005, 9))
    out, plot = Path("c.json"), Path("e.svg")
    assert (
        main(["compare", f"scalerl={seeds}", dapo, "--at", "8000", "--json", str(out), "--plot", str(plot)])
        == 0
    )
    text = capsys.readouterr().out
    assert (
        "The ceilings differ: A +0.0" in text
        and "scalerl is ahead from" in text
        and "updated with 3 runs of 2 recipes" in " ".join(text.split())
        and "C: 'gpu_hours', in GPU-hours. R: 'pass_rate'." in text
    )
    assert max(map(len, text.splitlines())) <= 80
    content = json.loads(out.read_text())
    assert re.search(r"evaluations +data to \(GPU-hours\)\nscalerl +2 +64 +16,000\n", text)
    assert "extrapolated" not in text and content["recipes"]["scalerl"]["data_to"] == 16_000
    assert content["pairs"][0]["verdict"] == DIFFERENT and content["budgets"][0]["compute"] == 8000
    assert set(content["recipes"]) == {"scalerl", "dapo"} and len(content["recipes"]["scalerl"]["runs"]) == 2
    assert "scalerl (2 runs)" in plot.read_text()


def test_the_level_of_the_command_is_that_of_all_its_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for seed in range(2):
        write(Path(f"s{seed}.csv"), simulated(SCALERL, OFTEN, 0.005, seed))
    argv = ["compare", "s0.csv", "s1.csv", "--confidence", "0.8", "--within", "0.001", "--json", "c.json"]
    assert main(argv) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "(80% intervals" in text and "together with 90%" in text and "(90% over all" in text
    assert "the interval of A reaches further than 0.001 from its value" in text
    content = json.loads(Path("c.json").read_text())
    assert content["confidence"] == content["recipes"]["s0"]["runs"]["s0.csv"]["confidence"] == 0.8


def test_the_picture_of_recipes_is_the_paper_s_with_a_mark_per_recipe_and_no_doubtful_one(
    tmp_path: Path,
) -> None:
    short = np.arange(500, 2001, 250.0)
    runs = {
        "two": [simulated(SCALERL, OFTEN, 0.005, 1), simulated(SCALERL, OFTEN, 0.005, 2)],
        "one": [simulated(DAPO_LOSS, OFTEN, 0.005, 3)],
        "doubtful": [simulated(DAPO_LOSS, OFTEN, 0.005, 4), simulated(DAPO_LOSS, short, 0.005, 5)],
    }
    found = compare(runs)
    plot_recipes(found, tmp_path / "e.svg")
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "e.svg").read_text(encoding="utf-8"))
    B = found.recipes[1].fits[0].B
    assert [text for text in texts if re.match("two|doubtful", text)] == [
        "two (2 runs)",
        "doubtful (2 runs)",
    ]
    assert any(f", B = {B.value:.2f} ({B.low:.2f} to" in text and text[:8] == "one: A =" for text in texts)
    nothing = compare({"a": runs["doubtful"][1:], "b": [simulated(SCALERL, short, 0.005, 6)]})
    plot_recipes(nothing, tmp_path / "none.svg")
    text = (tmp_path / "none.svg").read_text(encoding="utf-8")
    assert text.count('id="axes_') == 1 and "log [(R" not in text  # the curves alone


def test_the_command_says_when_a_ceiling_is_not_identified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = write(tmp_path / "full.csv", simulated(SCALERL, OFTEN, 0.005, 0))
    flat = write(tmp_path / "flat.csv", simulated(Sigmoid(0.3, 0.3, 1, 2000), OFTEN, 0.005, 0))
    assert main(["compare", full, flat, "--plot", str(tmp_path / "e.png")]) == 0
    text = capsys.readouterr().out
    assert "not known: that of flat is not identified" in text and "has not risen" in text
    assert "Efficiency B" not in text and "beyond its data, because it has not risen: flat." in text
    ranked, rewards, best = re.findall(r"^(?: 2 flat +1|flat) +((?:0|under).*)", text, re.M)
    assert re.fullmatch(r"0\.\d{3} \(.*\) +under 1%", ranked)
    assert re.fullmatch(r"(0\.\d{3}±0\.\d{3} +){3}0\.\d{3}–0\.\d{3}\*", rewards)
    assert best.split("  ") == ["under 1%"] * 3


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["full.csv"], "there is only one recipe"),
        (["full.csv", "few.csv"], "few.csv: there are fewer than 5 evaluations"),
        (["full.csv", "=few.csv"], "expected NAME=RUN"),
        (["a=full.csv", "a=few.csv"], "'a' names two groups"),
        (["full.csv", "steps.csv"], "different units"),
        (["full.csv", "few.csv", "--margin", "2"], "--margin 2"),
        (["full.csv", "few.csv", "--at", "0"], "--at 0"),
        (["full.csv", "few.csv", "--plot", "x.txt"], "expected a name ending in"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(
    argv: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("full.csv"), simulated(SCALERL, OFTEN, 0.005, 0))
    write(Path("few.csv"), simulated(SCALERL, OFTEN[:3], 0.005, 0))
    Path("steps.csv").write_text(Path("full.csv").read_text().replace("gpu_hours", "step"))
    assert_one_line_and_exit_code_2(["compare", *argv], says, capsys)
