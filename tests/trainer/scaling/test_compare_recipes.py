"""Promises of compare: verdicts are right as often as said, and crossings are those found by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from simulated import assert_one_line_and_exit_code_2, falling, simulated, write

from trainer.scaling import EvalPoint, Sigmoid
from trainer.scaling.__main__ import main
from trainer.scaling.compare import (
    DIFFERENT,
    EQUIVALENT,
    INCONCLUSIVE,
    Comparison,
    at_ceiling,
    compare,
    seed_variance,
)
from trainer.scaling.plot import plot_recipes

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


def test_the_papers_efficiencies_differ_at_a_common_ceiling_if_the_noise_is_small() -> None:
    def apart(sd: float) -> int:
        ratios = [two(SCALERL, DAPO_LOSS, sd, seed=s).pairs[0].B_held_ratio for s in range(8)]
        return sum(r.low > 1 for r in ratios)

    assert apart(0.003) >= 7 and apart(0.02) <= 5


def test_equal_efficiencies_differ_in_at_most_one_comparison_of_ten() -> None:
    ratios = [two(SCALERL, SCALERL, seed=s).pairs[0].B_ratio for s in range(12)]
    assert sum(r.low > 1 or r.high < 1 for r in ratios) <= 4  # 1.2 expected; more than 4: 1 in 200


def test_a_run_beside_itself_gets_an_interval_as_wide_as_two_runs_make() -> None:
    found = two(SCALERL, SCALERL)
    A, gap = found.recipes[0].mean("A"), found.pairs[0].A
    assert gap.value == 0 and gap.low < 0 < gap.high
    assert (gap.high - gap.low) / (A.high - A.low) == pytest.approx(2**0.5, rel=0.08)


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
        sigmoid, held = at_ceiling(recipe.fits[0].sigmoid, recipe.draws[0], A)
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
    assert crossing.compute.low < by_hand < crossing.compute.high and crossing.share > 0.99
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


def test_single_runs_have_the_margin_that_is_given_and_seeds_correct_it() -> None:
    for margin in (0.02, 0.05):
        assert seed_variance([[(0.6, 1e-5)], [(0.5, 1e-5)]], margin).margin(1, 1, 0.9) == pytest.approx(
            margin, rel=2e-3
        )
    alike = seed_variance([[(0.600, 1e-6), (0.601, 1e-6), (0.602, 1e-6)]] * 3)
    apart = seed_variance([[(0.55, 1e-6), (0.60, 1e-6), (0.65, 1e-6)]] * 3)
    assert alike.margin(1, 1, 0.9) < 0.008 and 0.09 < apart.margin(1, 1, 0.9) < 0.15  # 1.64 √2 · .05 = .116
    assert alike.margin(4, 4, 0.9) == pytest.approx(alike.margin(1, 1, 0.9) / 2)


def test_seeds_that_differ_by_the_fits_errors_alone_make_no_spread() -> None:
    rng = np.random.default_rng(0)
    runs = [[(0.6 + rng.normal(0, 0.02), 0.02**2) for _ in range(4)] for _ in range(3)]
    assert seed_variance(runs).margin(1, 1, 0.9) < 0.025


def test_with_seeds_the_interval_of_a_difference_covers_it_as_often_as_said() -> None:
    """Random effects without fits: A_run = A_recipe + N(0, τ) + N(0, fit), three seeds against two."""
    rng, hits, trials = np.random.default_rng(2), 0, 300
    for _ in range(trials):
        tau = 0.02 / 3.3117 * 2 ** rng.normal()
        runs = [
            [(0.6 + rng.normal(0, tau) + rng.normal(0, 0.003), 0.003**2) for _ in range(n)] for n in (3, 2)
        ]
        margin = seed_variance(runs).margin(3, 2, 0.9)
        fits = 1.645 * 0.003 * (1 / 3 + 1 / 2) ** 0.5
        gap = np.mean([A for A, _ in runs[0]]) - np.mean([A for A, _ in runs[1]])
        hits += abs(gap) <= np.hypot(margin, fits)
    assert 0.86 <= hits / trials <= 0.95


def test_without_an_identified_ceiling_the_verdict_is_inconclusive() -> None:
    short = [simulated(SCALERL, np.arange(1500, 4001, 250.0), 0.005, 1)]
    full = [simulated(DAPO_LOSS, OFTEN, 0.005, 2)]
    for other, flag in ((short, "wide"), ([falling()], "falling")):
        pair = compare({"a": full, "b": other}).pairs[0]
        assert pair.verdict == INCONCLUSIVE and flag in pair.doubts


def test_the_command_prints_plots_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    low = Sigmoid(0.3, 0.52, 1.77, 1800)
    seeds = ",".join(write(tmp_path / f"s{i}.csv", simulated(SCALERL, OFTEN, 0.005, i)) for i in range(2))
    dapo = write(tmp_path / "dapo.csv", simulated(low, OFTEN, 0.005, 9))
    out, plot = tmp_path / "c.json", tmp_path / "e.svg"
    assert (
        main(["compare", f"scalerl={seeds}", dapo, "--at", "8000", "--json", str(out), "--plot", str(plot)])
        == 0
    )
    text = capsys.readouterr().out
    assert (
        "The ceilings differ: A +0.0" in text
        and "scalerl overtakes at" in text
        and "updated with 3 runs of 2 recipes" in " ".join(text.split())
    )
    assert max(map(len, text.splitlines())) <= 80
    content = json.loads(out.read_text())
    assert content["pairs"][0]["verdict"] == DIFFERENT and content["budgets"][0]["compute"] == 8000
    assert set(content["recipes"]) == {"scalerl", "dapo"} and len(content["recipes"]["scalerl"]["runs"]) == 2
    assert "scalerl (2 runs)" in plot.read_text()


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
    assert any(re.match(rf"one: B = {B.value:.2f} \({B.low:.2f} to", text) for text in texts)
    assert "Efficiency, each at its own ceiling" in texts
    nothing = compare({"a": runs["doubtful"][1:], "b": runs["doubtful"]})
    plot_recipes(nothing, tmp_path / "none.svg")
    assert "no ceiling is identified" in (tmp_path / "none.svg").read_text(encoding="utf-8")


def test_the_command_says_when_a_ceiling_is_not_identified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = write(tmp_path / "full.csv", simulated(SCALERL, OFTEN, 0.005, 0))
    flat = write(tmp_path / "flat.csv", simulated(Sigmoid(0.3, 0.3, 1, 2000), OFTEN, 0.005, 0))
    assert main(["compare", full, flat, "--plot", str(tmp_path / "e.png")]) == 0
    text = capsys.readouterr().out
    assert "not known: that of flat is not identified" in text and "has not risen" in text
    assert "Efficiency" not in text and "beyond the data these are guesses" in text


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
