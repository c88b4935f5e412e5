"""Promises of the backtest: it uses the first half only, and predicts a run that follows a sigmoid."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import Command
from simulated import measured, simulated, write

from trainer.scaling import Curve, Sigmoid
from trainer.scaling.forecast import Backtest, backtest, error_at_2x, summarize
from trainer.scaling.text import describe_backtest

LAW = Sigmoid(R0=0.11, A=0.90, B=2.4, C_mid=0.05)
AT = np.linspace(0.01, 0.3, 30)


def run(rewards: np.ndarray) -> Curve:
    return measured(AT, rewards, 0.01, LAW.R0)


def backtested(rewards: np.ndarray) -> Backtest:
    result = backtest(run(rewards))
    assert result is not None
    return result


def text(rewards: np.ndarray) -> str:
    return " ".join(describe_backtest(backtested(rewards), "h").split())


@pytest.mark.slow
def test_a_run_that_follows_the_curve_ends_as_its_first_half_predicts() -> None:
    hits = []
    for seed in range(8):
        noise = np.random.default_rng(seed).normal(0, 0.01, 30)
        result = backtested(LAW.reward(AT) + noise)
        assert result.seen == pytest.approx(0.15)
        hits.append(result.end.predicted.low <= float(LAW.reward(0.3)) <= result.end.predicted.high)
        assert abs(result.end.error) < 0.06
    assert sum(hits) >= 6


def test_the_second_half_does_not_change_the_prediction() -> None:
    rewards = LAW.reward(AT)
    one, two = backtested(rewards), backtested(np.r_[rewards[:-10], np.full(10, 0.2)])
    assert one.end.predicted == two.end.predicted
    assert two.end.measured == 0.2 and two.end.error < -0.6


def test_too_few_points_in_the_first_half_give_no_backtest() -> None:
    whole = run(LAW.reward(AT))
    for points in (whole.points[:3], ()):
        assert backtest(replace(whole, points=points)) is None
    assert describe_backtest(None, "h") == ""


def test_a_fit_without_a_forecast_has_no_error_at_twice_the_compute() -> None:
    test = backtested(LAW.reward(AT))
    assert error_at_2x(test) == test.end.error
    assert error_at_2x(replace(test, predictable=False)) is None and error_at_2x(None) is None


def test_the_text_says_whether_the_first_half_identified_the_ceiling_and_predicted_the_end() -> None:
    assert "(ceiling not identified) predicts" in text(LAW.reward(AT / 8))
    missed = text(LAW.reward(AT) + np.where(0.6 * max(AT) < AT, 0.2, 0.0))
    assert "outside the interval. The first half did not predict the end, so do not rely" in missed
    assert "inside the interval: the first half predicted the end." in text(LAW.reward(AT))


def test_fit_prints_and_writes_the_backtest(command: Command) -> None:
    write(Path("run.csv"), run(LAW.reward(AT)), "core_hours")
    text = command("fit run.csv --json fit.json")
    result = text.json["run.csv"]
    end = result["backtest"]["end"]
    assert result["backtest"]["identified"]
    assert result["error_at_2x"] == pytest.approx(end["measured"] - end["predicted"]["value"])
    assert "Backtest: a fit of the first 0.15 core-hours alone (ceiling identified) predicts" in text.words
    assert f"Error at twice the compute: {result['error_at_2x']:+.3f}." in text.words
    assert end["measured"] == pytest.approx(float(LAW.reward(0.3)), abs=1e-4)
    assert end["predicted"]["value"] == pytest.approx(float(LAW.reward(0.3)), abs=0.01)


def test_the_command_forecasts_the_last_quarter_of_each_run_from_a_share_or_an_amount(
    command: Command,
) -> None:
    for name, law in (("a", LAW), ("b", Sigmoid(0.2, 0.7, 1.8, 0.04))):
        write(Path(f"{name}.csv"), simulated(law, AT, 0.001, None))
    text = command("backtest a.csv b.csv --fit-until 50% 0.2 5% --json test.json")
    half, amount, little = (text.json[until] for until in ("50%", "0.2", "5%"))
    a = half["runs"]["a.csv"]
    assert (a["seen"], a["points"]) == (pytest.approx(0.15), 15)
    assert amount["runs"]["a.csv"]["seen"] == pytest.approx(0.2)
    assert [s["compute"] for s in a["last_quarter"]] == pytest.approx([c for c in AT if c >= 0.225])
    for scored in a["last_quarter"]:
        assert scored["measured"] == pytest.approx(float(LAW.reward(scored["compute"])), abs=1e-5)
    assert little["runs"] == {"a.csv": None, "b.csv": None} and little["summary"]["forecast"] == 0
    assert half["summary"]["error"] < 0.005 and half["summary"]["coverage"] == 1
    assert "2 of 2" in text
    details = command("backtest a.csv --fit-until 50% --details")
    assert ("* outside the interval" in details) == (" *" in details.replace("(* outside", ""))


def test_the_errors_of_several_runs_are_summarized() -> None:
    test = backtested(LAW.reward(AT))
    predicted = replace(test.end.predicted, value=0.9, low=0.84, high=0.93)

    def with_error(error: float) -> Backtest:
        end = replace(test.end, predicted=predicted, measured=0.9 + error)
        level = replace(test.level, predicted=predicted, measured=0.9 - 2 * error)
        return replace(test, end=end, level=level, carried=0.7)

    result = summarize([*map(with_error, (0.01, -0.02, 0.05)), None, replace(test, predictable=False)])
    assert (result["runs"], result["forecast"]) == (5, 3)
    assert (result["error"], result["bias"]) == (pytest.approx(0.02), pytest.approx(0.01))
    assert result["width"] == pytest.approx(0.09) and result["coverage"] == pytest.approx(2 / 3)
    assert (result["level_error"], result["carried_error"]) == (pytest.approx(0.04), pytest.approx(0.18))
    assert result["level_coverage"] == pytest.approx(1 / 3)
