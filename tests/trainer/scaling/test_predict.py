"""Promises of predict: budgets and rewards by algebra, intervals that cover, the kernel's factor by hand."""

from pathlib import Path

import numpy as np
import pytest
from helpers.commands import Command
from helpers.logs import write_jsonl
from simulated import simulated, with_rewards, write

from trainer.accounting.kernel_cost import CONSTANTS, MODELS
from trainer.scaling import Curve, Fit, Sigmoid, fit
from trainer.scaling.layout import amount
from trainer.scaling.predict import kernel_shift, predict

LAW = Sigmoid(R0=0.30, A=0.61, B=2.0, C_mid=2500)


def fitted(seed: int | None = None, law: Sigmoid = LAW, last: float = 12_000, sd: float = 0.005) -> Fit:
    c = np.arange(500, last + 1, 500.0)
    noise = 0 if seed is None else np.random.default_rng(seed).normal(0, sd, len(c))
    return fit(c, law.reward(c) + noise, np.full(len(c), sd), R0=law.R0)


def test_budgets_and_rewards_are_those_of_the_sigmoid_by_hand() -> None:
    result = fitted()
    # R(2 C_mid) = R0 + (A − R0) / (1 + 1/4) = .3 + .31 · .8; and three quarters of the rise: C_mid · 3^(1/2)
    assert predict(result, at=[5000]).reached[0].reward.value == pytest.approx(0.548, abs=1e-3)
    (needed,) = predict(result, reach=[0.3 + 0.31 * 0.75]).needed
    assert needed.compute.value == pytest.approx(2500 * 3**0.5, rel=0.01)
    assert predict(result, at=[36_000]).reached[0].ahead == 3
    start, beyond = predict(result, reach=[0.2, 0.9]).needed
    assert start.compute.high == 0 and start.chance == 1
    assert beyond.compute.low == np.inf and beyond.chance == 0


@pytest.mark.slow
def test_intervals_of_rewards_and_budgets_cover_the_truth() -> None:
    fits = [fitted(seed) for seed in range(25)]
    ahead, needed = float(LAW.reward(24_000)), LAW.compute_for(0.59)
    rewards = [f.at(24_000) for f in fits]
    budgets = [f.compute_for(0.59) for f in fits]
    assert 19 <= sum(e.low <= ahead <= e.high for e in rewards) <= 25  # 22.5 expected; under 19: 1 in 100
    assert 19 <= sum(e.low <= needed <= e.high for e in budgets) <= 25


def test_rewards_along_a_curve_are_those_at_each_compute() -> None:
    result, computes = fitted(3), [500.0, 9000.0, 24_000.0]
    assert result.along(computes) == [result.at(c) for c in computes]


def test_a_cheaper_step_moves_the_compute_axis_by_its_factor() -> None:
    result = fitted(3)
    cheaper = predict(result, at=[9000], reach=[0.58], factor=0.9)
    assert cheaper.reached[0].reward == result.at(10_000)
    (plain,), (moved,) = predict(result, reach=[0.58]).needed, cheaper.needed
    assert moved.compute.value == pytest.approx(0.9 * plain.compute.value)
    assert moved.compute.high == pytest.approx(0.9 * plain.compute.high) and moved.chance == plain.chance


def test_the_kernel_s_factor_by_hand() -> None:
    # the paper's step, a fifth of its GPUs trainers, body at .4 of 989 TF/s, heads at 55.6 and 700
    shape, tokens = MODELS["8b"], 768 * 16384
    body = tokens * shape.body_flops(16384) / (0.4 * 989)
    naive, ours = (768 * (16384 - 2048) * 6 * 4096 * 151936 / rate for rate in (55.6, 700))
    by_hand = (4 * (body + naive) + body + ours) / (5 * (body + naive))
    assert CONSTANTS["generators"].value / CONSTANTS["trainers"].value == 4
    assert by_hand == pytest.approx(0.946, abs=1e-3)
    assert kernel_shift("8b", "ours", "naive").factor == pytest.approx(by_hand)
    assert kernel_shift("8b", "ours", "ours").factor == pytest.approx(1)
    assert kernel_shift("8b", "naive", "ours").factor > 1 > kernel_shift("8b", "ours", "peer").factor


def run_of(n: int = 24) -> Curve:
    return simulated(LAW, 500.0 * np.arange(1, n + 1), 0.005, 0)


def test_the_command_prints_rewards_budgets_and_money(command: Command) -> None:
    write(Path("run.csv"), run_of())
    Path("run.csv").write_text(f"{Path('run.csv').read_text()}\n13000,nan,nan\n")
    text = command("predict run.csv --at 5000 --reach 0.55 0.9 0.1 --price 2.5 --json p.json")
    note = "Evaluations without a finite reward, which are left out: 1."
    assert f"Standard errors: 'pass_rate_se'. {note} Ceiling: " in text.words
    assert "at 5,000 GPU-hours (price: 12,500): reward 0.5" in text
    assert "reward 0.9: not reached (probability under 1%)." in text
    assert "reward 0.1: reached from the start" in text and "reward 0.55: " in text
    assert max(map(len, text.splitlines())) <= 100
    content = text.json["run.csv"]
    assert content["at"][0]["cost"] == 12_500 and content["kernel"] is None
    near, far, _ = content["reach"]
    assert near["cost"]["value"] == pytest.approx(2.5 * near["compute"]["value"])
    assert far["compute"] == {"value": None, "low": None, "high": None} and far["chance"] < 0.01


def write_percent(curve: Curve) -> None:
    names = ("gpu_hours", "acc", "acc_se")
    rows = [(p.compute, 100 * p.pass_rate, 100 * p.pass_rate_se) for p in curve.evaluations]
    write_jsonl(Path("percent.jsonl"), [dict(zip(names, row, strict=True)) for row in rows])


def test_rewards_to_reach_are_on_the_scale_of_the_rewards(command: Command) -> None:
    write(Path("run.csv"), run_of())
    write_percent(run_of())
    plain = command("predict run.csv --reach 0.55").partition("reward 0.55: ")[2]
    percent = command("predict percent.jsonl --reward-range 0 100 --reach 55")
    assert percent.partition("reward 0.55 (55 from 0 to 100): ")[2] == plain != ""


@pytest.mark.parametrize(("r0", "noticed"), [("0.3", True), ("30", False)])
def test_an_R0_on_another_scale_than_the_rewards_is_noticed(r0: str, noticed: bool, command: Command) -> None:
    write_percent(run_of())
    for line in ("fit percent.jsonl", "predict percent.jsonl --at 5000"):
        text = command(f"{line} --reward-range 0 100 --r0 {r0}").words
        assert ("is --r0 30 meant?" in text) == noticed
        assert f"--r0 {r0} replaces the reward measured at compute 0, 0.3" in text


def test_where_the_ceiling_is_not_identified_ranges_stand_alone(command: Command) -> None:
    write(Path("short.csv"), run_of(7))
    text = command("predict short.csv --at 50000 --reach 0.5 --json p.json")
    reached, needed = (text.json["short.csv"][key][0] for key in ("at", "reach"))
    assert "do not quote a value. Train longer. The data end at 3,500 GPU-hours." in text.words
    assert text.words.count("If the run goes on as it did (a sigmoid: ") == 1
    reward = reached["reward"]
    assert f"reward {reward['low']:.3f} to {reward['high']:.3f}; 14.3×" in text.words
    assert f"reward 0.5: {amount(needed['compute']['low'])} to " in text.words


def test_where_the_last_evaluation_is_low_no_probability_is_given(command: Command) -> None:
    write(Path("low.csv"), with_rewards(run_of(), {23: 0.4}))
    text = command("predict low.csv --reach 0.55 --json p.json")
    assert "Evaluate the last checkpoint again, by more samples;" in text.words
    assert "python -m trainer.evaluate RUN@STEP" in text.words
    assert "is unknown until the last checkpoint" in text.words
    assert "probability" not in text and "reward 0.55:" not in text
    result = text.json["low.csv"]
    assert result["flags"] == ["last-point-low"] and result["reach"] == []
    for line in ("fit low.csv", "predict low.csv --at 16000"):
        assert "below the curve: a collapse, or a bad evaluation" in command(line).words


def test_the_kernel_shift_is_printed_with_the_source_of_its_rates(command: Command) -> None:
    write(Path("run.csv"), run_of())
    options = {"rows": 1000, "hidden": 1000, "vocab": 1000, "dtype": "bfloat16"}  # 6e9 FLOP
    suite: list[dict[str, object]] = [
        {"options": options, "commit": "abc", "machine": {"card": "NVIDIA H200"}},
        {"provider": "ours (triton)", "ms": 6 / 650},
        {"provider": "naive FP32", "ms": 6 / 51},
    ]
    rates = write_jsonl(Path("kernels.jsonl"), suite)
    line = f"predict run.csv --at 5000 --kernel ours --measured-with naive --kernel-rates {rates}"
    text = command(line).words
    assert "naive FP32 (51 TF/s, MEASURED on NVIDIA H200" in text
    assert "650 TF/s, MEASURED on NVIDIA H200" in text
    write_jsonl(rates, suite[:-1])  # one card, one account: its rate is never set beside another card's
    assert "it has no naive FP32 in bfloat16" in command(line, exit_code=2)
