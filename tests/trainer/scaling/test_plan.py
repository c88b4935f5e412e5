"""Promises of plan: what identifies a ceiling and what does not, costs by hand, the same every time."""

import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import Command
from simulated import PAPER, with_rewards, write

from trainer.gpus import cpu_cores
from trainer.scaling import Curve, EvalPoint, Sigmoid
from trainer.scaling.__main__ import COMMANDS, main
from trainer.scaling.plan import Cell, after_pilot, cheapest, like_pilots, prior, simulate
from trainer.scaling.simulate import autocorrelated
from trainer.scaling.simulate import simulated as simulate_run

C_MID = (2542.0, 2542.0)
ITS_OWN = {"A": (0.61, 0.61), "B": (1.92, 1.92)}


def pilot(last: float, n: int, sd: float = 0.005, reported: bool = True, law: Sigmoid = PAPER) -> Curve:
    c, noise = np.linspace(0, last, n + 1), np.random.default_rng(4).normal(0, sd, n + 1)
    return simulate_run(law.reward, c, noise, sd * reported, "pilot")


def wandering(last: float, n: int, rho: float) -> Curve:
    """A pilot with correlated errors."""
    noise = autocorrelated(np.random.default_rng(1).normal(0, 0.01, n), rho, 0.0)
    return with_rewards(pilot(last, n), dict(enumerate(PAPER.reward(np.linspace(last / n, last, n)) + noise)))


def test_the_papers_curve_is_identified_from_16k_gpu_hours_and_not_from_4k() -> None:
    # facts: simulated with noise .003–.006, sd(A) = .03–.065 from fits up to 4k; it is .002–.005 up to 8k
    short, long = simulate(prior(C_MID, 0.3, 0.003, 8, **ITS_OWN), [4000, 16_000], [32])
    assert short.chance == 0 and long.chance >= 0.75
    assert long.error < 0.01 and (long.budget, long.evaluations, long.cost) == (16_000, 32, 16_000)


def test_less_noise_and_more_evaluations_make_it_known_sooner() -> None:
    few, many = simulate(prior(C_MID, 0.3, 0.01, 8, **ITS_OWN), [10_000], [8, 48])
    (exact,) = simulate(prior(C_MID, 0.3, 0.001, 8, **ITS_OWN), [10_000], [8])
    assert few.chance <= many.chance and few.chance < exact.chance and few.error > 4 * exact.error


def test_what_is_called_known_is_true_as_often_as_its_interval_says() -> None:
    from trainer.scaling.plan import _trial

    prospect = prior(C_MID, 0.3, 0.003, 16)
    outcomes = [_trial((prospect, i, 15_000.0, 24, 0.02)) for i in range(16)]
    errors = [error for known, error in outcomes if known]
    assert len(errors) >= 8 and np.mean(np.array(errors) <= 0.02) >= 0.9


def test_the_prior_covers_its_ranges_evenly_and_is_the_same_every_time() -> None:
    laws = prior((100, 100), 0.2, 0.01, 40, (0.5, 0.7), (1.0, 3.0)).sigmoids
    assert laws == prior((100, 100), 0.2, 0.01, 40, (0.5, 0.7), (1.0, 3.0)).sigmoids
    A, B = (np.sort([getattr(law, name) for law in laws]) for name in ("A", "B"))
    assert np.all(np.abs(A - np.linspace(0.5025, 0.6975, 40)) <= 0.0026)  # one in each of 40 equal parts
    assert np.all(np.abs(B - np.linspace(1.025, 2.975, 40)) <= 0.026)
    assert {law.C_mid for law in laws} == {100.0}
    ranged = prior((100, 10_000), 0.2, 0.01, 40)
    mid = np.sort([np.log10(law.C_mid) for law in ranged.sigmoids])  # uniform in the logarithm
    assert np.all(np.abs(mid - np.linspace(2.025, 3.975, 40)) <= 0.026) and ranged.C_mid == 1000


def test_correlated_evaluations_say_less_of_the_ceiling() -> None:
    apart, together = (
        simulate(prior(C_MID, 0.3, 0.005, 10, autocorrelation=rho), [12_000], [40])[0] for rho in (0.0, 0.8)
    )
    assert together.error > 1.2 * apart.error and together.chance < apart.chance


def test_after_a_pilot_the_sigmoids_are_its_draws_and_the_noise_is_its_own() -> None:
    for reported in (True, False):
        prospect, fit = after_pilot(pilot(8000, 32, sd=0.006, reported=reported), 200)
        A = [law.A for law in prospect.sigmoids]
        assert np.quantile(A, [0.05, 0.95]) == pytest.approx([fit.A.low, fit.A.high], abs=1e-3)
        assert 0.0045 < prospect.noise < 0.0078 and prospect.reported_se == pytest.approx(0.006 * reported)
    assert after_pilot(pilot(8000, 32), 5, noise=0.02)[0].noise == 0.02


def test_one_evaluation_far_off_is_not_a_pilot_s_noise() -> None:
    for reported in (True, False):
        plain = pilot(8000, 32, reported=reported)
        with_outlier = with_rewards(plain, {20: 0.05})
        assert after_pilot(with_outlier, 5)[0].noise == pytest.approx(after_pilot(plain, 5)[0].noise, rel=0.2)


@pytest.mark.slow
def test_simulated_perfect_scores_have_the_error_that_the_fit_assumes() -> None:
    rewards = np.clip(Sigmoid(0.3, 1.0, 4.0, 500).reward(np.arange(250, 4001, 250.0)), 0, 1)
    rewards[3:] = 1.0  # whose binomial error is 0
    sd = np.sqrt(rewards * (1 - rewards) / 400)
    points = [EvalPoint(i, 250.0 * i, r, s) for i, (r, s) in enumerate(zip(rewards, sd, strict=True), 1)]
    prospect, fit = after_pilot(Curve("perfect", "GPU-hours", tuple(points), 0.3), 6)
    assert prospect.reported_se == pytest.approx(sd[:3].min()) and prospect.noise >= prospect.reported_se
    few, many = simulate(prospect, [8000], [2, 40])
    assert few.chance <= many.chance and many.error < 0.01 and fit.A.high >= 0.99


@pytest.mark.slow
def test_after_a_pilot_with_correlated_errors_the_simulated_ones_are_correlated() -> None:
    prospect, fit = after_pilot(wandering(4000, 40, 0.93), 12)
    assert after_pilot(pilot(4000, 40), 12)[0].correlation_length == 0 < prospect.correlation_length
    assert np.exp(-100 / prospect.correlation_length) == pytest.approx(fit.autocorrelation)
    assert fit.autocorrelation > 0.7
    alone = replace(prospect, correlation_length=0.0)
    (together,), (apart,) = (simulate(x, [6000], [40]) for x in (prospect, alone))
    assert together.error > 1.2 * apart.error and together.chance <= apart.chance


def test_a_dense_pilot_is_planned_on_from_as_its_fit_sees_it() -> None:
    prospect, fit = after_pilot(wandering(6000, 1500, 0.99), 12)  # averaged by tens
    assert len(prospect.seen.points) == 150
    assert np.exp(-40 / prospect.correlation_length) == pytest.approx(fit.autocorrelation)


def test_a_pilot_s_points_count() -> None:
    prospect, _ = after_pilot(pilot(40_000, 40), 6)
    (cell,) = simulate(prospect, [50_000], [1], eval_cost=100)
    assert cell.chance == 1 and cell.cost == 10_000 + 100


def test_a_new_run_like_several_pilots_differs_as_they_do_and_starts_without_points() -> None:
    low, high = (pilot(8000, 32, law=replace(PAPER, A=A)) for A in (0.55, 0.7))
    prospect, fits = like_pilots([low, high], 10)
    assert fits[0].A.value < 0.6 < fits[1].A.value
    ceilings = [sigmoid.A for sigmoid in prospect.sigmoids]
    assert len(ceilings) == 10 and sum(A > 0.62 for A in ceilings) == 5
    assert prospect.seen.points == () and prospect.noise == pytest.approx(0.005, rel=0.4)
    alone = after_pilot(low, 5)[0].sigmoids
    assert [sigmoid for sigmoid in prospect.sigmoids if sigmoid.A < 0.62] == list(alone)


def test_the_cheapest_plan_is_good_and_stays_good_with_more_compute() -> None:
    def cell(budget: float, n: int, chance: float) -> Cell:
        return Cell(budget, n, budget + 50 * n, chance, 0.08, 0.01)

    lucky, short, long = cell(1000, 10, 0.85), cell(2000, 10, 0.6), cell(4000, 10, 0.9)  # 1,000 was luck
    often, oftener = cell(2000, 40, 0.82), cell(4000, 40, 0.99)
    assert cheapest([lucky, short, long, often, oftener]) == often  # 4,000 against 4,500
    assert cheapest([lucky, short]) is None


def test_two_processes_find_what_one_finds() -> None:
    prospect = prior(C_MID, 0.3, 0.005, 3)
    seen = []
    both = simulate(prospect, [9000], [8], workers=2, progress=lambda: seen.append(1))
    assert both == simulate(prospect, [9000], [8]) and len(seen) == 3


@pytest.mark.slow
@pytest.mark.skipif(len(cpu_cores()) < 2, reason="on one core it starts no processes")
def test_without_a_terminal_it_says_how_long_it_takes_and_a_signal_ends_its_processes_too() -> None:
    line = shlex.split(f"{sys.executable} -m trainer plan --c-mid 2500 --r0 0.3 --runs 30")
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stderr is not None
        assert re.fullmatch(r"90 of 630 runs simulated, \d+\.\d min left\n", process.stderr.readline())
        process.terminate()
        rest = process.communicate(timeout=60)[1]  # until the last of its processes has ended
        assert process.returncode == 143 and re.fullmatch("(\\d+ of 630 .* left\n)*", rest), rest
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_the_command_prints_the_table_and_the_cheapest_plan(command: Command) -> None:
    assumed = "--c-mid 2542 --r0 0.3 --noise 0.002 --a .61 .61 --budgets 1 8 --budgets 8 --evaluations 24"
    text = command(f"plan {assumed} --runs 5 --eval-cost 10 --json plan.json")
    cheapest = "The cheapest plan that reaches 80%: up to 20,340 GPU-hours (8 × C_mid, 20,600"
    assert "2,542 1 0%" in text.words and cheapest in text.words
    assert max(map(len, text.splitlines())) <= 80
    plans = text.json["plans"]
    margin = 1.645 * max(plan["chance_se"] for plan in plans)
    assert f"are known to ±{margin:.0%} (90% intervals). That plan is the first whose share" in text.words
    assert text.json["cheapest"]["cost"] == 8 * 2542 + 240 and len(plans) == 2


def test_the_command_plans_on_from_a_pilot_until_it_identifies_the_ceiling(command: Command) -> None:
    write(Path("pilot.csv"), pilot(4000, 16))
    text = command("plan pilot.csv --budgets 1.1 --evaluations 2 --runs 5").words
    assert "16 evaluations up to 4,000 GPU-hours" in text and "4,400 1.1 0%" in text
    assert "None of these plans reaches 80%" in text
    write(Path("long.csv"), pilot(40_000, 40))
    known = command("plan long.csv --json plan.json")
    assert "The pilot already identifies A to ±0.02: no more is needed" in known.words
    assert known.json["known"] and known.json["plans"] == [] and known.json["cheapest"] is None


def test_assumptions_are_printed_with_what_the_precision_means(command: Command) -> None:
    plans = "--budgets 4 --evaluations 10 --runs 5"
    text = command(f"plan --c-mid 1250 5000 --r0 0.4 --autocorrelation 0.5 {plans}").words
    assert "C_mid from 1,250 to 5,000 (the multiples below are of 2,500)" in text
    assert "correlated by 0.5. ±0.02 is 20% of a rise of 0.10" in text and "10,000 4 " in text
    assert "of a rise of" not in command(f"plan --c-mid 9 --r0 0.1 {plans}").words


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_explains_every_option_and_ends_with_an_example(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")  # an option a line
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    usage, _, options = text.partition("\n\n")
    for option in re.findall(r"--[\w-]+", usage):
        assert re.search(
            rf"^ +{option}\b.*  +\w.*$|^ +{option}\b[^\n]*\n {{20,}}\w", options, re.MULTILINE
        ), option
    assert not re.search(r"\(\d[\d.]*, ", text)  # no tuple of Python
    assert text.rstrip().splitlines()[-1].startswith(f"  python -m trainer.scaling {command} ")


def test_the_help_lists_the_commands_with_an_example_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for command, about in COMMANDS.items():
        assert about.split(":")[0] in " ".join(text.split())
        assert f"  python -m trainer.scaling {command} " in text
