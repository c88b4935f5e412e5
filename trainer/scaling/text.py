"""Conclusions from a fit, and their limits, in sentences for the terminal and the page."""

import math
from typing import NamedTuple

import numpy as np

from trainer.scaling.curve.average import MIN_GAIN
from trainer.scaling.curve.fit import FLAGS, HARMLESS, REPORTED_ERRORS, SURPRISING, Estimate, Fit
from trainer.scaling.curve.shape import UNLIKELY
from trainer.scaling.curve.sigmoid import Curve, fraction_gained
from trainer.scaling.forecast import Backtest, error_at_2x
from trainer.scaling.layout import FORMS, amount, interval, paragraph, percent

DETERMINED = 3.0  # B and C_mid are shown if the ends of their intervals differ by less than this factor
UNDESCRIBED = {"flat", "falling", "poor-fit", "not-sigmoid"}  # flags of runs that no B and C_mid describe
ADVICE = {  # what an unidentified ceiling needs, by flag; any other: a longer run
    "too-few-points": "Evaluate more often or train longer.",
    "flat": "Train until the reward rises.",
    "falling": "Find out why the run fell, and fix that.",
    "last-point-low": "Evaluate the last checkpoint again, by more samples; of a run of this trainer: "
    "python -m trainer.evaluate RUN@STEP --evaluation.samples 64.",
    "poor-fit": "Look at the points: a sigmoid does not describe them.",
    "not-sigmoid": "Look at the points: a sigmoid may not describe them.",
}


def explain(fit: Fit, unit: str) -> str:
    """Several lines for a terminal; `unit` is that of compute."""
    if "too-few-points" in fit.flags:
        return paragraph(why_not(fit))
    known, last = parameters(fit), fit.compute_range[1]
    lines = [f"  ceiling     A     {known['A']}" if fit.identified else paragraph(why_not(fit))]
    if "B" in known:
        lines.append(f"  efficiency  B     {known['B']}")
    if "C_mid" in known:
        lines.append(f"  midpoint    C_mid {known['C_mid']} {unit}")
    if fit.identified and "B-at-bound" in fit.flags:
        limits = f"B (at least {fit.B.low:.2g}) and C_mid (at most {amount(fit.midpoint.high)} {unit})"
        lines.append(paragraph(f"{limits} are not identified: {FLAGS['B-at-bound']}."))
    elif fit.identified:
        cost = amount(compute_for_most(fit).value)
        lines.append(f"  90% of the gain from R0 to A takes about {cost} {unit}")
    if fit.R0_reported is None:
        lines += [
            f"  start       R0    not measured, between {fit.R0.low:.2f} and {fit.R0.high:.2f}",
            "    B and C_mid depend on it: evaluate before step 1, or give it (--r0).",
        ]
    else:
        where = "given" if fit.R0_source == "given" else f"measured before step 1: {fit.R0_reported:.3f}"
        lines.append(f"  start       R0    {fit.R0.value:.3f} ({where})")
    if fit.has_forecast:
        lines.append(paragraph(assumption(fit)))
        for times, e in ((" 2", fit.at_2x), ("10", fit.at_10x)):
            reward = interval(e, "A", fit.identified)
            lines.append(f"  at {times}× the compute ({amount(int(times) * last)} {unit}): {reward}")
        lines.append(paragraph(gain(fit)))
    formula = f"R(C) = R0 + (A − R0) / (1 + (C_mid/C)^B), from {evaluations(fit)}"
    texts = [f"{formula}; R² {r_squared(fit)}; {fit.confidence:.0%} intervals."]
    return "\n".join([*lines, *map(paragraph, [*texts, *noise(fit), *rates(fit, unit)])])


def parameters(fit: Fit) -> dict[str, str]:
    """A, B and C_mid as text, without those of which the data say nothing."""
    described = not UNDESCRIBED & set(fit.flags) and "B-at-bound" not in fit.flags
    texts = {}
    for name in FORMS:
        e = fit.midpoint if name == "C_mid" else getattr(fit, name)
        known = described and (fit.identified or e.high < DETERMINED * e.low)
        if fit.predictable if name == "A" else known:
            texts[name] = interval(e, name, fit.identified)
    return texts


def evaluations(fit: Fit) -> str:
    """The number of evaluations as text; the one that is R0 does not count."""
    return f"{fit.points} evaluations" + (" after the start" if fit.R0_source == "measured" else "")


def why_not(fit: Fit) -> str:
    """The reasons why the ceiling is not identified, what can be said of it nevertheless, and what to do."""
    text = f"The ceiling A is not identified: {fit.reasons}."
    if fit.draws is not None and not fit.has_forecast:
        text += " There is no forecast for such a run."
    elif fit.predictable:
        low = "If it is a bad evaluation, " if "last-point-low" in fit.flags else ""
        text += f" {low}A could be anywhere from {fit.A.low:.2f} to {fit.A.high:.2f}: do not quote a value."
    elif fit.draws is not None:  # flat
        now = interval(fit.at(fit.compute_range[1]), "A")
        text += f" Its level is {now}; what is ahead allows for a late rise, as most flat runs had."
    text += f" {next((ADVICE[flag] for flag in fit.flags if flag in ADVICE), 'Train longer.')}"
    assumes = fit.predictable and not {"not-sigmoid", "other-shape"}.isdisjoint(fit.flags)
    return f"{text} This range assumes a sigmoid." if assumes else text


def assumption(fit: Fit) -> str:
    """The sentence that stands above every forecast."""
    low = "the last evaluation is a bad one and " if "last-point-low" in fit.flags else ""
    law = f" (a sigmoid: {percent(fit.sigmoid_prob)} probable, or another law)"
    unsaid = math.isnan(fit.sigmoid_prob) or "not-sigmoid" in fit.flags  # of the laws that are averaged
    return f"If {low}the run goes on as it did{'' if unsaid else law}:"


def gain(fit: Fit) -> str:
    """The probability that twice the compute is worth it."""
    last = fit.compute_range[1]
    probability = float((np.diff(fit.forecast.reward([last, 2 * last]))[:, 0] >= MIN_GAIN).mean())
    stays = "It stays as it is: " if probability < UNLIKELY else ""
    twice = "twice" if stays else "Twice"
    return (
        f"{stays}{twice} the compute gains {MIN_GAIN:g} or more with a probability of {percent(probability)}."
    )


def r_squared(fit: Fit) -> str:
    """The share of the variance that the sigmoid explains."""
    return "–" if math.isnan(fit.r2) else f"{round(fit.r2, 3) + 0.0:.3f}"


def compute_for_most(fit: Fit) -> Estimate:
    """The compute at which 90% of A − R0 is gained: that of a C of C_mid · 9^(1/B)."""
    draws = fit.draws
    assert draws is not None  # the ceiling is identified
    return fit.compute_of(fit.C_mid.value * 9 ** (1 / fit.B.value), draws.C_mid * 9 ** (1 / draws.B))


def noise(fit: Fit) -> list[str]:
    """Sentences about the scatter of the points."""
    sentences = []
    if fit.outliers:
        points = "1 point is an outlier and counts" if fit.outliers == 1 else None
        sentences.append(f"{points or f'{fit.outliers} points are outliers and count'} for little.")
    if fit.noise == REPORTED_ERRORS and fit.overdispersion > SURPRISING:
        sentences.append(
            f"The points scatter {fit.overdispersion:.1f} times as much as their standard errors say; the "
            "intervals allow for that."
        )
    if fit.autocorrelated_prob > 0.9 and fit.overdispersion > 0.5:
        sentences.append(
            "The errors of neighbouring points are correlated, or the run follows no sigmoid; the "
            "intervals allow for correlated errors of a sigmoid."
        )
    return sentences


def rates(fit: Fit, unit: str) -> list[str]:
    """A sentence where the curve is one of FLOPs, because what a device-hour does has drifted."""
    if fit.axis is None:
        return []
    done, now, hour = fit.axis.rates, fit.axis.rate_ahead(fit.confidence), unit.removesuffix("s")
    return [
        f"FLOPs per {hour} were {done.min():.2f} to {done.max():.2f} times the mean, so the curve is fitted "
        f"to FLOPs, written as {unit} at that mean. Ahead, a {hour} is taken to do {now.value:.2f} times the "
        f"mean's work ({now.low:.2f} to {now.high:.2f})."
    ]


def cautions(fit: Fit, unit: str) -> str:
    """Warnings about a fit besides the reasons why its ceiling is not identified."""
    harmless = (fit.describe(flag) for flag in fit.flags if flag in HARMLESS)
    return " ".join([*(f"{text[0].upper()}{text[1:]}." for text in harmless), *noise(fit), *rates(fit, unit)])


class Answer(NamedTuple):
    """A question, its answer as a number, and what the number means."""

    question: str
    short: str
    meaning: str


def answers(curve: Curve, fit: Fit) -> list[Answer]:
    """The first screen of a report: how high a run will end, how certain that is, and at what cost."""
    unit, last = curve.unit, curve.evaluations[-1]
    error = f" ± {last.pass_rate_se:.3f}" if last.pass_rate_se else ""
    low = "last-point-low" in fit.flags
    twice, spent = "", f"The {amount(fit.compute_range[1])} {unit} so far"
    if fit.predictable and not low:
        ahead = interval(fit.at_2x, "A", fit.identified)
        twice = f"If the run goes on as it did, twice the compute gives {ahead}."
    if fit.identified:
        high, sure = f"{fit.A.value:.3f}", f"{fit.A.low:.3f} to {fit.A.high:.3f}"
        certain = f"The {fit.confidence:.0%} interval, from {evaluations(fit)}. {cautions(fit, unit)}"
        cost = compute_for_most(fit)
        share = float(fraction_gained(fit.compute_range[1], fit.B.value, fit.C_mid.value))
        price, range_ = f"{amount(cost.value)} {unit}", f"{amount(cost.low)} to {amount(cost.high)}"
        if "B-at-bound" in fit.flags:  # the data give no lower end
            price, range_ = f"at most {amount(cost.high)} {unit}", "they were over before the evaluations"
        gained = f"{share:.0%}" if share < 0.995 else "over 99%"
        gain = f"For 90% of the way from R0 to A ({range_}). {spent} have gained {gained}."
    else:
        high = "unknown" if fit.draws is None or low else "no forecast"
        if twice:
            high = f"{fit.A.low:.2f} to {fit.A.high:.2f}"
        sure, certain, price = "not identified", why_not(fit), "cannot be said"
        gain = f"{spent} do not identify the ceiling. The command plan shows how much longer a run must be."
    return [
        Answer("How high will it end?", high, f"The ceiling A. Last measured: {last.pass_rate:.3f}{error}."),
        Answer("How certain is that?", sure, certain.strip()),
        Answer("At what cost?", price, f"{gain} {twice}".strip()),
    ]


def describe_backtest(test: Backtest | None, unit: str) -> str:
    """The backtest as text for a terminal; empty if there was no test."""
    if test is None or (error := error_at_2x(test)) is None:
        return ""
    end, inside = test.end, test.end.inside
    outcome = "inside the interval: the first half predicted the end."
    if not test.identified:
        outcome = "inside the interval, which confirms little where the ceiling is not identified."
    if not inside:
        outcome = (
            "outside the interval. The first half did not predict the end, so do not rely on a forecast of "
            "this run, unless you know the cause. (By chance, about 1 run in 10 misses.)"
        )
    return paragraph(
        f"Backtest: a fit of the first {amount(test.seen)} {unit} alone (ceiling "
        f"{'' if test.identified else 'not '}identified) predicts "
        f"{interval(end.predicted, '.3f', test.identified)} for the last evaluation; measured: "
        f"{end.measured:.3f}, {outcome} Error at twice the compute: {error:+.3f}."
    )
