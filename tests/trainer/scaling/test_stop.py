"""Promises of `forecast.stop`: a run ends near its ceiling, and neither before nor for another reason."""

import re
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
from simulated import measured

from trainer.cli import parse
from trainer.config import ConfigError
from trainer.config.forecast import StopRule
from trainer.scaling import EvalPoint, Sigmoid
from trainer.scaling.curve.fit import fit_curve
from trainer.scaling.forecast import forecast, reason_to_stop

LAW = Sigmoid(R0=0.11, A=0.70, B=2.4, C_mid=0.05)
SD = 0.005
RULE = StopRule("gain<0.02 per doubling", 0.02, per_doubling=True)
END = 2.0  # planned compute


def points_of(compute: np.ndarray, seed: int = 0, sd: float = SD) -> list[EvalPoint]:
    """R0, and noisy evaluations of the law."""
    rewards = LAW.reward(compute) + np.random.default_rng(seed).normal(0, sd, len(compute))
    return list(measured(compute, rewards, sd, LAW.R0).evaluations)


def reason(points: list[EvalPoint], rule: StopRule = RULE, patience: int = 3, end: float = END) -> str:
    return reason_to_stop(points, forecast(points, end, None), end, "core-hours", rule, patience)


NEAR_THE_CEILING = points_of(np.linspace(0.02, 0.4, 20))


@pytest.fixture(autouse=True, scope="module")
def fits_are_made_once() -> Iterator[None]:
    """Each decision is made from the evaluations alone, so that the fits of their beginnings repeat."""
    fit = cache(fit_curve)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.scaling.forecast.fit_curve", fit)
        yield


def test_a_run_near_its_ceiling_stops_and_says_what_it_forgoes() -> None:
    rule, end = StopRule("gain<0.04 per doubling", 0.04, per_doubling=True), 0.22
    points = points_of(np.linspace(0.01, 0.2, 20))
    text = reason(points, rule, end=end)
    result = re.fullmatch(
        r"a doubling of the compute would probably gain \+(\S+) \(\S+ to \S+\) \[gain<0.04 per doubling for "
        r"3 evaluations in a row\]; forgone until the planned end: \+(\S+) \(\S+ to \S+\), about 0.02 "
        r"core-hours saved",
        text,
    )
    assert result, text
    for number, ahead in zip(result.groups(), (0.4, end), strict=True):  # truly +0.020 and +0.003
        assert float(number) == pytest.approx(float(LAW.reward(ahead) - LAW.reward(0.2)), abs=0.006)
    assert reason(NEAR_THE_CEILING)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_run_that_rises_or_has_too_few_or_too_noisy_evaluations_does_not_stop(seed: int) -> None:
    for points in (
        points_of(np.linspace(0.008, 0.1, 14), seed),  # at the end a doubling still gains .08
        points_of(np.linspace(0.1, 0.4, 4), seed),
        points_of(np.linspace(0.008, 0.1, 14), seed, sd=0.03),
        [EvalPoint(i, 0.02 * i, 0.11 + SD * (i % 3), SD) for i in range(20)],  # it has not risen
        [EvalPoint(i, 0.02 * i, 0.0, 0.0) for i in range(6 * (seed == 0))],
    ):
        assert not any(reason(points[:n], patience=1) for n in range(len(points), 1, -2))


def test_a_run_that_has_fallen_does_not_stop_by_its_forecast() -> None:
    fallen = [EvalPoint(20 + i, 0.4 + 0.02 * i, 0.4 - 0.02 * i, SD) for i in range(1, 6)]
    for n in range(1, 6):  # an alarm at first, then `falling`
        assert not reason([*NEAR_THE_CEILING, *fallen[:n]], patience=1)


def test_a_slow_decline_is_an_alarm_that_needs_two_evaluations_and_no_memory() -> None:
    low = [EvalPoint(20 + i, 0.4 + 0.02 * i, 0.679, SD) for i in (1, 2)]
    assert reason([*NEAR_THE_CEILING, *low[:1]], patience=1)
    now = forecast([*NEAR_THE_CEILING, *low], END, None)  # as after a resume: nothing was predicted
    assert not now.alarm and not now.fit.flags
    assert not reason([*NEAR_THE_CEILING, *low], patience=1)


@pytest.mark.slow
def test_the_forecasts_of_the_last_evaluations_must_all_say_so() -> None:
    alone = {n for n in range(2, 19) if reason(NEAR_THE_CEILING[:n], patience=1)}
    for patience in (2, 4):
        stops = {n for n in range(2, 19) if reason(NEAR_THE_CEILING[:n], patience=patience)}
        assert stops == {n for n in alone if alone.issuperset(range(n - patience + 1, n))} != alone


def test_probably_means_with_a_probability_of_nine_in_ten() -> None:
    compute = NEAR_THE_CEILING[-1].compute
    rewards = forecast(NEAR_THE_CEILING, END, None).fit.forecast.reward([compute, 2 * compute])
    for quantile, stops in ((0.85, False), (0.95, True)):
        gain = float(np.quantile(rewards[:, 1] - rewards[:, 0], quantile))
        assert bool(reason(NEAR_THE_CEILING, StopRule("", gain, per_doubling=True), patience=1)) == stops


def test_until_the_end_means_the_planned_end_and_there_is_nothing_to_stop_at_it() -> None:
    rule = StopRule("gain<0.02 until the end", 0.02, per_doubling=False)
    points = points_of(np.linspace(0.01, 0.15, 20))  # at its end, a doubling gains .04
    assert not reason(points) and not reason(points, rule)
    assert reason(points, rule, end=0.16) and not reason(points, rule, end=0.15)
    assert not reason(NEAR_THE_CEILING, end=0.4)


@pytest.mark.parametrize(
    ("text", "gain", "per_doubling"),
    [("gain<0.005 per doubling", 0.005, True), ("gain < .01 until the end", 0.01, False)],
)
def test_the_rule_is_read_as_it_is_written(text: str, gain: float, per_doubling: bool) -> None:
    assert parse(["--forecast.stop", text]).config.forecast.rule == StopRule(text, gain, per_doubling)
    assert parse([]).config.forecast.rule is None


@pytest.mark.parametrize(
    "text",
    ["0.005", "gain<0.005", "gain<0 per doubling", "gain<0.0 per doubling", "gain<1.5 per doubling",
     "gain<-.1 per doubling", "gain<5% per doubling", "gain>0.005 per doubling", "gain<0.005 per tripling"],
)  # fmt: skip
def test_a_rule_that_cannot_be_read_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as e:
        parse(["--forecast.stop", text])
    assert str(e.value).startswith("forecast.stop: expected 'gain<NUMBER per doubling' or ")
    assert str(e.value).endswith(f"given {text!r}") and "\n" not in str(e.value)
