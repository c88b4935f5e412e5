"""Promises of predict: budgets and rewards by algebra, intervals that cover, the kernel's factor by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from simulated import assert_one_line_and_exit_code_2, falling, simulated, write

from trainer.accounting.kernel_cost import CONSTANTS, MODELS
from trainer.scaling import Curve, Fit, Sigmoid, fit
from trainer.scaling.__main__ import main
from trainer.scaling.layout import amount
from trainer.scaling.predict import kernel_shift, predict

LAW = Sigmoid(R0=0.30, A=0.61, B=2.0, C_mid=2500)
KERNEL = ("run.csv", "--at", "1", "--kernel", "ours", "--measured-with", "peer")


def fitted(seed: int | None = None, law: Sigmoid = LAW, last: float = 12_000, sd: float = 0.005) -> Fit:
    c = np.arange(500, last + 1, 500.0)
    noise = 0 if seed is None else np.random.default_rng(seed).normal(0, sd, len(c))
    return fit(c, law.reward(c) + noise, np.full(len(c), sd), R0=law.R0)


def test_budgets_and_rewards_are_those_of_the_sigmoid_by_hand() -> None:
    result = fitted()
    # R(2 C_mid) = R0 + (A − R0) / (1 + 1/4) = .3 + .31 · .8; and three quarters of the rise: C_mid · 3^(1/2)
    assert predict(result, at=[5000]).reached[0].reward.value == pytest.approx(0.548, abs=1e-3)
    assert predict(result, reach=[0.3 + 0.31 * 0.75]).needed[0].compute.value == pytest.approx(
        2500 * 3**0.5, rel=0.01
    )
    assert predict(result, at=[36_000]).reached[0].ahead == 3
    start, beyond = predict(result, reach=[0.2, 0.9]).needed
    assert start.compute.high == 0 and start.chance == 1
    assert beyond.compute.low == np.inf and beyond.chance == 0


def test_intervals_of_rewards_and_budgets_cover_the_truth() -> None:
    fits = [fitted(seed) for seed in range(25)]
    ahead, needed = float(LAW.reward(24_000)), LAW.compute_for(0.59)
    rewards = [f.at(24_000) for f in fits]
    budgets = [f.compute_for(0.59) for f in fits]
    assert 19 <= sum(e.low <= ahead <= e.high for e in rewards) <= 25  # 22.5 expected; under 19: 1 in 100
    assert 19 <= sum(e.low <= needed <= e.high for e in budgets) <= 25


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
    assert (
        kernel_shift("8b", "ours", "naive").factor == pytest.approx(by_hand) == pytest.approx(0.946, abs=1e-3)
    )
    assert kernel_shift("8b", "ours", "ours").factor == pytest.approx(1)
    assert kernel_shift("8b", "naive", "ours").factor > 1 > kernel_shift("8b", "ours", "peer").factor


def run_of(n: int = 24) -> Curve:
    return simulated(LAW, 500.0 * np.arange(1, n + 1), 0.005, 0)


def test_the_command_prints_rewards_budgets_and_money(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = write(tmp_path / "run.csv", run_of()), tmp_path / "p.json"
    Path(run).write_text(f"{Path(run).read_text()}\n13000,nan,nan\n")
    asked = ["--at", "5000", "--reach", "0.55", "0.9", "0.1", "--price", "2.5"]
    assert main(["predict", run, *asked, "--json", str(out)]) == 0
    text = capsys.readouterr().out
    note = "Evaluations without a finite reward, which are left out: 1."
    assert f"Standard errors: 'pass_rate_se'. {note} Ceiling: " in " ".join(text.split())
    assert "at 5,000 GPU-hours (price: 12,500): reward 0.5" in text
    assert "reward 0.9: not reached (probability under 1%)." in text
    assert "reward 0.1: reached from the start" in text and "reward 0.55: " in text
    assert max(map(len, text.splitlines())) <= 100
    content = json.loads(out.read_text())[run]
    assert content["at"][0]["cost"] == 12_500 and content["kernel"] is None
    reach = content["reach"]
    assert reach[0]["cost"]["value"] == pytest.approx(2.5 * reach[0]["compute"]["value"])
    assert reach[1]["compute"] == {"value": None, "low": None, "high": None} and reach[1]["chance"] < 0.01


def test_rewards_to_reach_are_on_the_scale_of_the_rewards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curve = run_of()
    run, percent = write(tmp_path / "run.csv", curve), tmp_path / "percent.csv"
    rows = "".join(f"{p.compute},{100 * p.pass_rate},{100 * p.pass_rate_se}\n" for p in curve.evaluations)
    percent.write_text(f"gpu_hours,pass_rate,pass_rate_se\n{rows}")
    assert main(["predict", run, "--reach", "0.55"]) == 0
    plain = capsys.readouterr().out.partition("reward 0.55: ")[2]
    assert main(["predict", str(percent), "--reward-range", "0", "100", "--reach", "55"]) == 0
    assert capsys.readouterr().out.partition("reward 0.55 (55 from 0 to 100): ")[2] == plain != ""


def test_an_R0_on_another_scale_than_the_rewards_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "".join(f"{p.compute},{100 * p.pass_rate}\n" for p in run_of().evaluations)
    (tmp_path / "percent.csv").write_text(f"gpu_hours,pass_rate\n{rows}")
    for r0, noticed in (("0.3", True), ("30", False)):
        run = [str(tmp_path / "percent.csv"), "--reward-range", "0", "100", "--r0", r0]
        for command in (["fit", *run], ["predict", *run, "--at", "5000"]):
            assert main(command) == 0
            text = " ".join(capsys.readouterr().out.split())
            assert ("is --r0 30 meant?" in text) == noticed
            assert f"--r0 {r0} replaces the reward measured at compute 0, 0.3" in text


def test_where_the_ceiling_is_not_identified_ranges_stand_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short, out = write(tmp_path / "short.csv", run_of(7)), tmp_path / "p.json"
    assert main(["predict", short, "--at", "50000", "--reach", "0.5", "--json", str(out)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    reached, needed = (json.loads(out.read_text())[short][key][0] for key in ("at", "reach"))
    assert "do not quote a value. Train longer. The data end at 3,500 GPU-hours." in text
    assert text.count("If the run goes on as it did (a sigmoid: ") == 1
    assert f"reward {reached['reward']['low']:.3f} to {reached['reward']['high']:.3f}; 14.3×" in text
    assert f"reward 0.5: {amount(needed['compute']['low'])} to " in text


def test_a_falling_curve_gets_no_forecast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = write(tmp_path / "f.csv", falling()), tmp_path / "p.json"
    assert main(["predict", run, "--at", "50000", "--reach", "0.5", "--json", str(out)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "There is no forecast for such a run." in text and "50,000" not in text
    result = json.loads(out.read_text())[run]
    assert (result["identified"], result["at"], result["reach"]) == (False, [], [])


def test_where_the_last_evaluation_is_low_no_probability_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curve = run_of()
    low = replace(curve.points[-1], pass_rate=0.4)
    run = write(tmp_path / "low.csv", replace(curve, points=(*curve.points[:-1], low)))
    assert main(["predict", run, "--reach", "0.55", "--json", str(tmp_path / "p.json")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Evaluate the last checkpoint again." in text and "is unknown until the last checkpoint" in text
    assert "probability" not in text and "reward 0.55:" not in text
    result = json.loads((tmp_path / "p.json").read_text())[run]
    assert result["flags"] == ["last-point-low"] and result["reach"] == []


def test_the_kernel_shift_is_printed_with_the_source_of_its_rates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write(tmp_path / "run.csv", run_of())
    options = {"rows": 1000, "hidden": 1000, "vocab": 1000, "dtype": "bfloat16"}  # 6e9 FLOP
    suite: list[dict[str, object]] = [
        {"options": options, "commit": "abc", "machine": {"card": "NVIDIA H200"}},
        {"provider": "ours (triton)", "ms": 6 / 650},
        {"provider": "naive FP32", "ms": 6 / 51},
    ]
    (tmp_path / "kernels.jsonl").write_text("".join(json.dumps(line) + "\n" for line in suite))
    rates = ["--kernel-rates", str(tmp_path / "kernels.jsonl")]
    assert main(["predict", run, "--at", "5000", "--kernel", "ours", "--measured-with", "naive", *rates]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "naive FP32 (51 TF/s, MEASURED on NVIDIA H200" in text
    assert "650 TF/s, MEASURED on NVIDIA H200" in text
    suite.pop()  # one card, one account: its rate is never set beside another card's
    (tmp_path / "kernels.jsonl").write_text("".join(json.dumps(line) + "\n" for line in suite))
    assert main(["predict", run, "--at", "5000", "--kernel", "ours", "--measured-with", "naive", *rates]) == 2
    assert "it has no naive FP32 in bfloat16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["run.csv"], "give --at BUDGET"),
        (["few.csv", "--at", "1"], "few.csv: there are fewer than 5"),
        (["run.csv", "--at", "-1"], "--at: -1 is out of range; expected above 0"),
        (
            ["run.csv", "--reach", "55"],
            "--reach 55: expected a reward above 0, up to 1; for rewards",
        ),
        (
            ["run.csv", "--reach", "55", "--reward-range", "-1", "1"],
            "--reach 55: expected a reward above -1, up to 1; the scale of --reward-range",
        ),
        (["run.csv", "--at", "1", "--price", "0"], "--price: 0"),
        (["run.csv", "--at", "1", "--kernel", "ours"], "need each other"),
        (["steps.csv", "--at", "1", "--kernel", "ours", "--measured-with", "naive"], "compute is in steps"),
        (
            ["run.csv", "--at", "1", "--kernel", "ours", "--measured-with", "naive", "--model", "9b"],
            "--model '9b'",
        ),
        (["run.csv", "--at", "1", "--kernel-rates", "run.csv"], "without --kernel"),
        (
            [*KERNEL, "--kernel-rates", "x.json"],
            "expected the --out of `python -m bench kernels.compare`",
        ),
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
    write(Path("run.csv"), run_of())
    write(Path("few.csv"), run_of(2))
    write(Path("steps.csv"), run_of(), compute="step")
    Path("x.json").write_text("{}")
    assert_one_line_and_exit_code_2(["predict", *argv], says, capsys)
