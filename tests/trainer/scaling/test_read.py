"""Promises of the inputs: other trainers' files are read as they mean them; what is unclear is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from helpers.logs import curve_at, pairs, reading_of, readings_of, write_csv, write_events, write_jsonl

from trainer.config import ConfigError
from trainer.scaling import Curve, EvalPoint, curve_of, fit_curve
from trainer.scaling.reading.read import same_unit


def curves_at(*argv: object) -> list[Curve]:
    return [reading.curve for reading in readings_of(*argv)]


POINTS = [(1.0, 0.25), (2.0, 0.5), (4.0, 0.75)]
COLUMNS = {"gpu_hours": [1.0, 2.0, 4.0], "val_reward": [0.25, 0.5, 0.75]}
ROWS = [dict(zip(COLUMNS, values, strict=True)) for values in zip(*COLUMNS.values(), strict=True)]


def test_a_table_is_read_in_every_format(tmp_path: Path) -> None:
    files = [
        write_csv(tmp_path / "a.csv", COLUMNS),
        write_csv(tmp_path / "a.tsv", COLUMNS, "\t"),
        write_csv(tmp_path / "semicolons.csv", COLUMNS, ";"),
        write_csv(tmp_path / "no_ending", COLUMNS),
        write_jsonl(tmp_path / "a.jsonl", ROWS),
    ]
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    (tmp_path / "columns.json").write_text(json.dumps(COLUMNS))
    pyarrow.parquet.write_table(pyarrow.table(COLUMNS), tmp_path / "a.parquet")
    files += [tmp_path / n for n in ("rows.json", "columns.json", "a.parquet")]
    for curve in curves_at(*files):
        assert (pairs(curve), curve.unit, curve.R0) == (POINTS, "GPU-hours", None), curve.name
    assert [c.name for c in curves_at(*files)] == [str(f) for f in files]


def test_a_run_of_ours_is_read_in_the_unit_of_its_ledger(tmp_path: Path) -> None:
    rows = [{"step": 0, "compute/total": 0.0, "eval/pass_rate": 0.1, "eval/pass_rate_se": 0.02}]
    rows += [{"step": 5, "compute/total": 0.5, "train/reward": -0.4}]
    rows += [{"step": 10, "compute/total": 1.0, "eval/pass_rate": 0.3, "eval/pass_rate_se": 0.03}]
    rows = [row | {"compute/flops": 1e12 * row["step"]} for row in rows]
    write_jsonl(tmp_path / "metrics.jsonl", rows)
    (tmp_path / "ledger.json").write_text('{"unit": "core-hours"}')
    write_events(tmp_path / "tensorboard", [(10, 1e9, {"compute/total": 1, "eval/pass_rate": 0.5})])
    expected = Curve(
        str(tmp_path), "core-hours", (EvalPoint(10, 1.0, 0.3, 0.03),), EvalPoint(0, 0.0, 0.1, 0.02)
    )
    assert curve_at(tmp_path) == expected
    assert curve_at(tmp_path / "metrics.jsonl").unit == "core-hours"
    assert curve_at(tmp_path / "tensorboard").unit == "core-hours"
    assert curve_at(tmp_path, "--compute-column", "step").unit == "steps"
    in_flops = curve_at(tmp_path, "--compute-column", "flops")
    assert (in_flops.unit, in_flops.points[0].compute) == ("FLOPs", 1e13)


@pytest.mark.parametrize(
    ("columns", "reward"),
    [
        # verl: val-core holds mean@k, best@k and maj@k; val-aux much more
        (
            [
                "training/global_step", "val-core/aime/acc/mean@16", "val-core/aime/acc/best@16/mean",
                "val-core/aime/acc/maj@16/mean", "val-aux/aime/reward/mean@16", "critic/rewards/mean",
                "critic/score/mean",
            ],
            "val-core/aime/acc/mean@16",
        ),
        # TRL (TensorBoard and trainer_state.json)
        (["train/reward", "eval/reward", "eval/rewards/format/mean", "eval/reward_std"], "eval/reward"),
        (["reward", "eval_reward", "rewards/accuracy_reward/mean", "eval_loss", "reward_std"], "eval_reward"),
        # prime-rl
        (["step", "eval/math500/avg@4", "eval/math500/pass@4", "eval/math500/reward/mean", "reward/mean"],
         "eval/math500/avg@4"),
        # OpenRLHF
        (["train/reward", "eval/eval_default_pass1", "eval/eval_default_pass4"], "eval/eval_default_pass1"),
        (["gpu_hours", "Accuracy", "accuracy_std"], "Accuracy"),
    ],
)  # fmt: skip
def test_the_held_out_reward_is_found_under_the_names_of_other_trainers(
    columns: list[str], reward: str, tmp_path: Path
) -> None:
    row = {"step": 1.0} | {name: 0.125 for name in columns} | {reward: 0.5}
    reading = reading_of(write_jsonl(tmp_path / "m.jsonl", [row]))
    assert reading.reward == repr(reward) and reading.curve.points[0].pass_rate == 0.5


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        (
            ["val-core/aime/acc/mean@16", "val-core/math/acc/mean@16"],
            "--reward-column to one of val-core/aime/acc/mean@16, val-core/math/acc/mean@16",
        ),
        (["eval/reward", "eval/accuracy"], "several columns could be the reward"),
        (["train/reward", "loss"], "no column is recognized as a held-out reward"),
        (["critic/rewards/mean", "loss"], "--reward-column to one of critic/rewards/mean"),
        (["loss"], "no column is recognized as a reward; set --reward-column to one of loss, step"),
    ],
)
def test_where_the_reward_is_not_clear_the_candidates_are_named(
    columns: list[str], says: str, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "m.jsonl", [{"step": 1, **dict.fromkeys(columns, 0.5)}])
    with pytest.raises(ConfigError) as error:
        curve_at(path)
    assert says in str(error.value)
    assert curve_at(path, "--reward-column", columns[0]).points[0].pass_rate == 0.5


@pytest.mark.parametrize(
    ("column", "unit"),
    [
        ("GPU hours", "GPU-hours"), ("Total GPU hours", "GPU-hours"), ("train/gpu_hours", "GPU-hours"),
        ("core-hours", "core-hours"),
        ("total_flos", "FLOPs"), ("FLOPs", "FLOPs"), ("_step", "steps"), ("train/global_step", "steps"),
        ("compute", "compute"),
    ],
)  # fmt: skip
def test_the_unit_of_compute_follows_from_its_name(column: str, unit: str, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "m.csv", {column: [1, 2], "reward": [0.1, 0.2]})
    assert curve_at(path).unit == unit
    assert curve_at(path, "--unit", "gpu_hours").unit == "GPU-hours"
    assert curve_at(path, "--unit", "tokens").unit == "tokens"


def test_gpu_hours_are_preferred_to_steps_and_any_column_can_be_given(tmp_path: Path) -> None:
    path = write_csv(
        tmp_path / "m.csv", {"step": [1, 2], "gpu_hours": [8, 16], "x": [5, 6], "reward": [0, 1]}
    )
    assert pairs(curve_at(path)) == [(8, 0), (16, 1)]
    reading = curve_at(path, "--compute-column", "x", "--reward-column", "reward")
    assert (pairs(reading), reading.unit) == ([(5, 0), (6, 1)], "x")
    assert [p.step for p in reading.points] == [1, 2]


def test_verls_file_logger_is_read_and_the_time_of_its_steps_added_up(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"step": 0, "data": {"val-core/aime/acc/mean@16": 0.1}}]
    for step, seconds in ((1, 3600), (2, 1800), (3, 1800)):
        rows.append({"step": step, "data": {"timing_s/step": seconds}})
    rows[-1]["data"]["val-core/aime/acc/mean@16"] = 0.3
    rows.append({"step": 5, "data": {"timing_s/step": 1800, "val-core/aime/acc/mean@16": 0.4}})
    path = write_jsonl(tmp_path / "verl.jsonl", rows)
    curve = curve_at(path, "--devices", 8)
    # 3600 + 1800 + 1800 s = 2 h; step 4 was not logged and is taken to have taken as long as step 5
    assert (pairs(curve), curve.unit) == ([(16.0, 0.3), (24.0, 0.4)], "GPU-hours")
    assert reading_of(path, "--devices", 8).compute == "the sum of 'timing_s/step' × 8 devices"
    assert EvalPoint(0, 0.0, 0.1, 0.0) == curve.R0
    assert pairs(curve_at(path)) == [(3, 0.3), (5, 0.4)]
    assert pairs(curve_at(path, "--gpu-hours-per-step", 0.5)) == [(1.5, 0.3), (2.5, 0.4)]


def test_a_clock_is_time_since_step_0(tmp_path: Path) -> None:
    table = {"global_step": [0, 10, 20], "_runtime": [600, 4200, 7800], "eval/reward": [0.1, 0.2, 0.3]}
    curve = curve_at(write_csv(tmp_path / "a.csv", table), "--devices", 4)
    assert pairs(curve) == [(4.0, 0.2), (8.0, 0.3)] and isinstance(curve.R0, EvalPoint)
    del table["_runtime"]
    table["seconds"] = [600, 4200, 7800]
    path = write_csv(tmp_path / "b.csv", table)
    assert pairs(curve_at(path, "--devices", 4, "--time-column", "seconds")) == pairs(curve)


def test_a_date_before_which_steps_were_made_is_no_start(tmp_path: Path) -> None:
    start = 1_760_000_000
    table = {
        "step": [10, 20, 40],
        "Wall time": [start, start + 3600, start + 10800],
        "Value": [0.1, 0.2, 0.4],
    }
    curve = curve_at(write_csv(tmp_path / "a.csv", table), "--devices", 2)
    assert pairs(curve) == [(2.0, 0.1), (4.0, 0.2), (8.0, 0.4)] and curve.R0 is None
    del table["step"]
    with pytest.raises(ConfigError, match="no column counts steps"):
        curve_at(write_csv(tmp_path / "b.csv", table), "--devices", 2)


@pytest.mark.parametrize("tensors", [False, True])
def test_tensorboard_events_are_read_by_tag_step_or_time(tensors: bool, tmp_path: Path) -> None:
    start = 1_760_000_000.0
    rows = [(0, start - 30, {"loss": 3.0}), (0, start, {"eval/reward": 0.125})]
    rows += [(s, start + 360 * s, {"loss": 2.0, "flops": 1e20 * s}) for s in range(1, 21)]
    rows += [(s, start + 360 * s + 60, {"eval/reward": s / 32}) for s in (10, 20)]
    folder = write_events(tmp_path / "run", rows, tensors=tensors)
    by_flops = curve_at(folder)
    assert by_flops.unit == "FLOPs" and [p.pass_rate for p in by_flops.points] == [10 / 32, 20 / 32]
    assert [p.compute for p in by_flops.points] == pytest.approx([1e21, 2e21])  # logged at the same steps
    by_step = curve_at(next(folder.iterdir()), "--compute-column", "step")
    assert pairs(by_step) == [(10, 10 / 32), (20, 20 / 32)] and isinstance(by_step.R0, EvalPoint)
    by_time = curve_at(tmp_path, "--devices", 16)
    assert [p.compute for p in by_time.points] == pytest.approx([16 * 3660 / 3600, 16 * 7260 / 3600])


def test_tensorboard_folders_are_runs_and_those_without_the_reward_are_left_out(tmp_path: Path) -> None:
    for run in ("one", "two"):
        write_events(tmp_path / run / "eval", [(1, 1e9, {"eval/reward": 0.5})])
        write_events(tmp_path / run / "train", [(1, 1e9, {"loss": 0.5})])
    curves = curves_at(tmp_path)
    assert [c.name for c in curves] == [f"{tmp_path}: one/eval", f"{tmp_path}: two/eval"]


def test_a_wandb_chart_is_a_curve_for_each_run(tmp_path: Path) -> None:
    metric = "val-core/aime/acc/mean@16"
    table: dict[str, list[object]] = {"Step": [0, 100, 200, 300]}
    for run, values in {"grpo - seed 1": [0.1, 0.2, "", 0.3], "cispo": ["", 0.4, 0.5, ""]}.items():
        for ending in ("", "__MIN", "__MAX"):
            table[f"{run} - {metric}{ending}"] = values
        table |= {f"{run} - _step{ending}": table["Step"] for ending in ("", "__MIN", "__MAX")}
    path = write_csv(tmp_path / "wandb.csv", table)
    first, second = curves_at(path)
    assert (first.name, pairs(first)) == (f"{path}: grpo - seed 1", [(100, 0.2), (300, 0.3)])
    assert isinstance(first.R0, EvalPoint) and first.unit == "steps"
    assert (second.name, pairs(second), second.R0) == (f"{path}: cispo", [(100, 0.4), (200, 0.5)], None)


def test_wandb_history_may_log_rewards_and_steps_in_turn(tmp_path: Path) -> None:
    rows = [
        {"_step": 3, "train/global_step": 10, "train/reward": 0.2},
        {"_step": 4, "eval/eval_default_pass1": 0.3, "eval/eval_other": None},
        {"_step": 7, "train/global_step": 20, "train/reward": 0.2},
        {"_step": 8, "eval/eval_default_pass1": 0.4},
    ]
    assert pairs(curve_at(write_jsonl(tmp_path / "h.jsonl", rows))) == [(10, 0.3), (20, 0.4)]


def test_the_log_history_of_transformers_is_read(tmp_path: Path) -> None:
    history = [
        {"step": 10, "loss": 0.1, "reward": 0.2, "epoch": 0.1},
        {"step": 10, "eval_reward": 0.25, "eval_runtime": 9.5, "epoch": 0.1},
    ]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history, "global_step": 10}))
    assert pairs(curve_at(tmp_path / "trainer_state.json")) == [(10, 0.25)]


def test_the_error_is_found_given_or_binomial(tmp_path: Path) -> None:
    path = write_csv(
        tmp_path / "a.csv", {"gpu_hours": [1], "reward": [0.2], "reward_stderr": [0.03], "sd": [0.5]}
    )
    assert curve_at(path).points[0].pass_rate_se == 0.03
    assert curve_at(path, "--se-column", "sd").points[0].pass_rate_se == 0.5
    binomial = reading_of(path, "--samples", 1600)
    assert binomial.curve.points[0].pass_rate_se == pytest.approx(0.01)  # sqrt(.2 × .8 / 1600)
    assert "1600 samples" in binomial.error
    path = write_csv(tmp_path / "b.csv", {"gpu_hours": [1], "reward": [0.2], "reward_std": [0.3]})
    assert curve_at(path).points[0].pass_rate_se == 0.0  # a deviation of samples is no error of their mean


def test_another_scale_of_rewards_is_mapped_with_its_errors_and_r0(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", {"step": [1, 2], "reward": [-0.5, 1.0], "se": [0.1, 0.0]})
    curve = curve_at(path, "--reward-range", -1, 1, "--r0", -0.8)
    assert pairs(curve) == [(1, 0.25), (2, 1.0)] and curve.points[0].pass_rate_se == 0.05
    assert "(-1 to 1, rescaled to 0 to 1)" in reading_of(path, "--reward-range", -1, 1).reward
    assert pytest.approx(0.1) == curve.R0


def test_early_points_are_dropped_by_hand_and_r0_stays(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", {"gpu_hours": [0, 1, 2, 3], "reward": [0.1, 0.9, 0.2, 0.3]})
    curve = curve_at(path, "--drop-before", 2)
    assert pairs(curve) == [(2, 0.2), (3, 0.3)] and EvalPoint(1, 0.0, 0.1, 0.0) == curve.R0
    assert "without 1 before 2" in reading_of(path, "--drop-before", 2).compute
    reading = curve_at(path, "--r0", 0.15)
    assert reading.R0 == 0.15 and len(reading.points) == 3


def test_order_does_not_matter_and_equal_rows_are_one(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", {"gpu_hours": [4, 1, 2, 2], "reward": [0.75, 0.25, 0.5, 0.5]})
    assert pairs(curve_at(path)) == POINTS


def test_a_half_written_last_line_is_left_out(tmp_path: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "a.jsonl").write_text(lines[:-9])
    assert pairs(curve_at(tmp_path / "a.jsonl")) == POINTS[:2]
    (tmp_path / "a.csv").write_text("gpu_hours,reward,se\n1,.25,.1\n2,.5")
    assert pairs(curve_at(tmp_path / "a.csv")) == POINTS[:1]


@pytest.mark.parametrize(
    ("name", "content", "options", "says"),
    [
        ("a.csv", "", [], "a.csv is empty"),
        ("a.csv", "gpu_hours,reward\n", [], "a.csv is empty"),
        ("a.jsonl", "", [], "a.jsonl is empty"),
        ("a.json", "[]", [], "a.json is empty"),
        ("a.csv", "a,reward\n1,.2\n", [], "no column is recognized as compute; set --compute-column to"),
        ("a.csv", "step,b\n1,2\n", [], "no column is recognized as a reward"),
        ("a.csv", "step,reward\n1,.2\n", ["--reward-column", "r"], "no column 'r'; set --reward-column to"),
        ("a.csv", "step,reward\n1,.2\n", ["--compute-column", "c"], "no column 'c'; set --compute-column to"),
        ("a.csv", "step,reward\n1,.2\n", ["--se-column", "e"], "no column 'e'; set --se-column to one"),
        ("a.csv", "step,reward\n1,.2\n", ["--devices", 8], "no column of time, which --devices N needs"),
        ("a.csv", "step,wall,update\n1,2,.2\n", ["--reward-column", "update", "--devices", 8],
         "no column of time"),
        ("a.csv", "step,acc,x_time\n1,.2,3\n", ["--devices", 8], "--time-column to one of x_time, acc"),
        ("a.csv", "b,acc,val-core,x_step\n1,.2,3,3\n", [], "--compute-column to one of x_step, acc, b"),
        ("a.csv", "step,eval/aime/acc\n1,.2\n", ["--reward-column", "aimr"],
         "no column 'aimr' (did you mean 'eval/aime/acc'?); set"),
        ("a.csv", "step,acc,hours\n1,.2,3\n", ["--devices", 8, "--time-column", "houts"], "mean 'hours'?"),
        ("a.csv", "step,acc\n1,.2\n", ["--compute-column", "stpe"], "'stpe' (did you mean 'step'?)"),
        ("a.md", "# Title\n\nText\n", [], "a.md: it is neither a table nor a log with lines of"),
        ("a.txt", "a\nb, c\n", [], "a.txt: it is neither a table nor a log"),
        ("a.csv", "step,reward\n1,nan\n", [], "no row holds 'reward'"),
        ("a.csv", "step,reward\nx,.2\n", [], "row 1: 'step' is 'x'; expected a number"),
        ("a.csv", "step,reward\n-1,.2\n", [], "row 1: compute is -1; expected at least 0"),
        ("a.csv", "step,reward\n,.2\n,.3\n1,.4\n", [], "row 1 has a reward, but no row up to it has 'step'"),
        ("a.csv", "step,reward,se\n1,.2,-1\n", [], "row 1: 'se' is '-1'; expected a standard error"),
        ("a.csv", "step,reward,se\n1,.2,\n2,.2,.1\n", [], "row 1: 'se' is ''"),
        ("a.csv", "step,reward\n1,.2\n2,-.5\n", [], "row 2: 'reward' is -.5; expected 0 to 1; if it is on "
         "another scale, give --reward-range -1 1"),
        ("a.csv", "step,reward\n1,20\n", [], "give --reward-range 0 100"),
        ("a.csv", "step,reward\n1,2\n", ["--reward-range", -1, 1], "row 1: 'reward' is 2; expected -1 to 1"),
        ("a.csv", "step,reward\n1,.2\n", ["--reward-range", 1, 0], "expected the lowest reward, then"),
        ("a.csv", "step,reward\n1,.2\n", ["--r0", 2], "--r0 2: expected a reward from 0 to 1"),
        ("a.csv", "step,reward\n1,.2\n", ["--drop-before", 5], "no row holds 'reward' from compute 5 on"),
        ("a.csv", "step,reward,reward\n1,.2,.3\n", [], "two columns are named 'reward'"),
        ("a.csv", "step,reward\n1,.2,7\n", [], "line 2 has more cells than the header"),
        ("a.jsonl", "{\n{}\n", [], "line 1 is not JSON"),
        ("a.jsonl", "[1]\n", [], "a row is not an object"),
        ("a.json", '{"a": 1}', [], "neither a list of objects nor lists by column"),
        ("a.json", '{"step": [1], "reward": [1, 2]}', [], "its columns have different lengths"),
        ("a.csv", b"\x89PNG\r\n\x1a\n\x00\xff", [], "a.csv is not text"),
        ("a.jsonl", b"PK\x03\x04\x00\x00", [], "it is not text"),
        ("a.parquet", b"PAR1 no", [], "not parquet"),
        ("events.out.tfevents.1", b"rubbish" * 9, [], "is empty"),
        ("a.csv", "step,reward\n1,.2\n", ["--time-column", "s"], "--time-column needs --devices"),
        ("a.csv", "step,reward\n1,.2\n", ["--devices", 8, "--gpu-hours-per-step", 1], "expected one of them"),
        ("a.csv", "step,reward\n1,.2\n", ["--samples", 8, "--se-column", "s"], "expected one"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_clear_line(
    name: str, content: str | bytes, options: list[object], says: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as error:
        curve_at(tmp_path / name, *options)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_run_whose_steps_are_faster_than_its_books_has_a_curve(tmp_path: Path) -> None:
    points = [EvalPoint(i, 0.1 * (i // 2), 0.1 * i, 0.02) for i in range(8)]
    curve = curve_of("", "h", points)
    assert [p.step for p in curve.points] == [2, 3, 4, 5, 6, 7]
    assert isinstance(curve.R0, EvalPoint)
    assert (curve.R0.pass_rate, curve.R0.pass_rate_se) == pytest.approx((0.05, 0.02 / 2**0.5))
    assert fit_curve(curve).points == 6
    table = tmp_path / "a.csv"
    rows = [f"{p.step},{p.compute},{p.pass_rate}" for p in points[1:]]
    table.write_text("\n".join(["step,gpu_hours,reward", *rows]))
    assert len(curve_at(table).points) == 6


@pytest.mark.parametrize(
    ("compute", "says"),
    [
        ([0, 1, math.nan], "step 2: compute is nan; expected a number of at least 0"),
        ([0, 1, -1], "step 2: compute is -1; expected a number of at least 0"),
    ],
)
def test_what_is_no_compute_is_not_dropped_in_silence(compute: list[float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        curve_of("", "h", [EvalPoint(i, c, 0.1 * i, 0.0) for i, c in enumerate(compute)])


def test_wrong_folders_are_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist; expected a run folder"):
        curve_at(tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"holds no metrics.jsonl, trainer_state.json or TensorBoard"):
        curve_at(tmp_path)
    (tmp_path / "run-0").mkdir()
    (tmp_path / "run-0" / "events.out.tfevents.1").touch()
    (tmp_path / "a.csv").touch()
    with pytest.raises(ConfigError, match=r"is a folder of several logs; give one: a\.csv, run-0$"):
        curve_at(tmp_path)
    write_jsonl(tmp_path / "run-0" / "metrics.jsonl", [{"step": 1}])
    with pytest.raises(ConfigError, match=r"a folder of 1 runs \(run-0 …\); give"):
        curve_at(tmp_path)
    write_jsonl(tmp_path / "run-0" / "metrics.jsonl", [{"compute/total": 1, "eval/pass_rate": 0.5}])
    (tmp_path / "run-0" / "ledger.json").write_text("{")
    with pytest.raises(ConfigError, match=r"ledger\.json has no unit"):
        curve_at(tmp_path / "run-0")


def test_computes_of_different_units_do_not_compare(tmp_path: Path) -> None:
    a = write_csv(tmp_path / "a.csv", COLUMNS)
    b = write_csv(tmp_path / "b.csv", {"step": [1, 2], "reward": [0.1, 0.2]})
    assert same_unit(curves_at(a, a)) == "GPU-hours"
    with pytest.raises(ConfigError, match=r"GPU-hours \(.*a\.csv\), steps \(.*b\.csv\)") as error:
        same_unit(curves_at(a, b))
    assert "--gpu-hours-per-step" in str(error.value)


def test_a_sum_of_single_precision_may_lie_beyond_1_by_rounding(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", {"step": [1, 2], "reward": [-1e-9, 1.0000001]})
    assert pairs(curve_at(path)) == [(1, 0.0), (2, 1.0)]
    assert not math.isnan(curve_at(path, "--samples", 10).points[1].pass_rate_se)
