"""Promises of the inputs: other trainers' files are read as they mean them; what is unclear is refused."""

import json
import math
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from helpers import logs
from helpers.logs import curve_at, pairs, reading_of, readings_of, write_csv, write_events, write_jsonl
from test_read_trainers import AIME

from trainer.config import ConfigError
from trainer.scaling import Curve, EvalPoint, curve_of, fit_curve
from trainer.scaling.reading.read import same_unit

POINTS = [(1.0, 0.25), (2.0, 0.5), (4.0, 0.75)]
COLUMNS = {"gpu_hours": [1.0, 2.0, 4.0], "val_reward": [0.25, 0.5, 0.75]}
ROWS = [dict(zip(COLUMNS, values, strict=True)) for values in zip(*COLUMNS.values(), strict=True)]


def test_a_table_is_read_in_every_format(tmp_path: Path) -> None:
    delimiters = {"a.csv": ",", "a.tsv": "\t", "semicolons.csv": ";", "no_ending": ","}
    files = [write_csv(tmp_path / name, COLUMNS, delimiter) for name, delimiter in delimiters.items()]
    files.append(write_jsonl(tmp_path / "a.jsonl", ROWS))
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    (tmp_path / "columns.json").write_text(json.dumps(COLUMNS))
    pyarrow.parquet.write_table(pyarrow.table(COLUMNS), tmp_path / "a.parquet")
    files += [tmp_path / n for n in ("rows.json", "columns.json", "a.parquet")]
    curves = [reading.curve for reading in readings_of(*files)]
    for curve in curves:
        assert (pairs(curve), curve.unit, curve.R0) == (POINTS, "GPU-hours", None), curve.name
    assert [c.name for c in curves] == [str(f) for f in files]


def test_a_run_of_ours_is_read_in_the_unit_of_its_ledger(tmp_path: Path) -> None:
    rows = [{"step": 0, "compute/total": 0.0, "eval/pass_rate": 0.1, "eval/pass_rate_se": 0.02}]
    rows += [{"step": 5, "compute/total": 0.5, "train/reward": -0.4}]
    rows += [{"step": 10, "compute/total": 1.0, "eval/pass_rate": 0.3, "eval/pass_rate_se": 0.03}]
    rows = [row | {"compute/flops": 1e12 * row["step"]} for row in rows]
    write_jsonl(tmp_path / "metrics.jsonl", rows)
    (tmp_path / "ledger.json").write_text('{"unit": "core-hours"}')
    write_events(tmp_path / "tensorboard", [(10, 1e9, {"compute/total": 1, "eval/pass_rate": 0.5})])
    R0, point = EvalPoint(0, 0.0, 0.1, 0.02), EvalPoint(10, 1.0, 0.3, 0.03, 1e13)
    assert curve_at(tmp_path) == Curve(str(tmp_path), "core-hours", (point,), R0)
    assert curve_at(tmp_path / "metrics.jsonl").unit == "core-hours"
    assert curve_at(tmp_path / "tensorboard").unit == "core-hours"
    assert curve_at(tmp_path, "--compute-column", "step").unit == "steps"
    in_flops = curve_at(tmp_path, "--compute-column", "flops")
    assert (in_flops.unit, in_flops.points[0].compute) == ("FLOPs", 1e13)
    (tmp_path / "ledger.json").unlink()  # as of a tracker
    assert curve_at(tmp_path / "metrics.jsonl").unit == "device-hours"


REWARDS = {
    # verl: val-core holds mean@k, best@k and maj@k; val-aux much more
    "val-core/aime/acc/mean@16": "training/global_step val-core/aime/acc/best@16/mean critic/rewards/mean "
    "val-core/aime/acc/maj@16/mean val-aux/aime/reward/mean@16 critic/score/mean",
    "val-core/gsm8k/reward/mean_at_8": "critic/rewards/mean",
    AIME: "critic/rewards/mean",
    # TRL (TensorBoard and trainer_state.json)
    "eval/reward": "train/reward eval/rewards/format/mean eval/reward_std",
    "eval_reward": "reward rewards/accuracy_reward/mean eval_loss reward_std",
    # prime-rl
    "eval/math500/avg@4": "step eval/math500/pass@4 eval/math500/reward/mean reward/mean",
    # OpenRLHF
    "eval/eval_default_pass1": "train/reward eval/eval_default_pass4",
    "eval/eval_aime_pass1": "train/reward eval/eval_aime_pass4",
    "test/env/all/reward/total": "env/all/reward/total env/all/correct optim/entropy",  # tinker-cookbook
    "validation/accuracy": "train/reward",
    "Accuracy": "gpu_hours accuracy_std format_accuracy",
}
SETTINGS = {
    "val-core/aime/acc/mean@16": {"held-out set": "aime", "samples per prompt": "16"},
    "val-core/gsm8k/reward/mean_at_8": {"held-out set": "gsm8k", "samples per prompt": "8"},
    AIME: {"held-out set": "aime_2024", "samples per prompt": "32"},
    "eval/math500/avg@4": {"held-out set": "math500", "samples per prompt": "4"},
    "eval/eval_aime_pass1": {"held-out set": "aime"},
}


@pytest.mark.parametrize(("reward", "others"), REWARDS.items())
def test_the_held_out_reward_is_found_under_the_names_of_other_trainers_with_what_they_say_of_it(
    reward: str, others: str, tmp_path: Path
) -> None:
    row = {"step": 1.0} | dict.fromkeys(others.split(), 0.125) | {reward: 0.5}
    reading = reading_of(write_jsonl(tmp_path / "m.jsonl", [row]))
    assert reading.reward == repr(reward) and reading.curve.points[0].pass_rate == 0.5
    assert reading.settings == SETTINGS.get(reward, {})


UNCLEAR = {
    "val-core/aime/acc/mean@16 val-core/math/acc/mean@16":
        "--reward-column to one of val-core/aime/acc/mean@16, val-core/math/acc/mean@16",
    "eval/reward eval/accuracy": "several columns could be the reward",
    "train/reward loss": "no column is recognized as a held-out reward",
    "critic/rewards/mean loss": "--reward-column to one of critic/rewards/mean",
    "loss": "no column is recognized as a reward; set --reward-column to one of loss, step",
    "format_accuracy answer_accuracy": "several columns could be the reward; set --reward-column to one of "
        "answer_accuracy, format_accuracy",
    "env/all/reward/total loss": "of the training batches, set --reward-column to one of env/all",
    "eval_mean_token_accuracy loss": "no column is recognized as a reward; set",
    "answer_accuracy loss": "if you mean that of the training batches, set --reward-column to one of answer_",
}  # fmt: skip


@pytest.mark.parametrize(("columns", "says"), UNCLEAR.items())
def test_where_the_reward_is_not_clear_the_candidates_are_named(
    columns: str, says: str, tmp_path: Path
) -> None:
    first, *_ = names = columns.split()
    path = write_jsonl(tmp_path / "m.jsonl", [{"step": 1, **dict.fromkeys(names, 0.5)}])
    with pytest.raises(ConfigError) as error:
        curve_at(path)
    assert says in str(error.value)
    assert curve_at(path, "--reward-column", first).points[0].pass_rate == 0.5


UNITS = {
    "GPU-hours": ("GPU hours", "Total GPU hours", "train/gpu_hours"), "core-hours": ("core-hours",),
    "FLOPs": ("total_flos", "FLOPs"), "steps": ("_step", "train/global_step", "grpo_step"),
    "compute": ("compute",),
}  # fmt: skip


@pytest.mark.parametrize(("unit", "column"), [(unit, name) for unit in UNITS for name in UNITS[unit]])
def test_the_unit_of_compute_follows_from_its_name(column: str, unit: str, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "m.csv", {column: [1, 2], "reward": [0.1, 0.2]})
    assert curve_at(path).unit == unit
    assert curve_at(path, "--unit", "gpu_hours").unit == "GPU-hours"
    assert curve_at(path, "--unit", "tokens").unit == "tokens"


TABLES = [
    # GPU-hours are preferred to steps, and any column can be given
    ("step,gpu_hours,x,reward / 1,8,5,0 / 2,16,6,1", "", "8:0 16:1"),
    ("step,gpu_hours,x,reward / 1,8,5,0 / 2,16,6,1", "--compute-column x --reward-column reward", "5:0 6:1"),
    # a clock is time since step 0
    ("global_step,_runtime,acc / 0,600,.1 / 10,4200,.2 / 20,7800,.3", "--devices 4", "0:.1 4:.2 8:.3"),
    ("step,at,acc / 0,600,.1 / 10,4200,.2", "--devices 4 --time-column at --time-unit s", "0:.1 4:.2"),
    # a date before which steps were made is no start
    ("step,Wall time,Value / 10,1760000000,.1 / 20,1760003600,.2 / 40,1760010800,.4", "--devices 2",
     "2:.1 4:.2 8:.4"),
    # a long run in milliseconds is no date
    ("time_ms,acc / 2e9,.1 / 4e9,.2", "--devices 18", "10000:.1 20000:.2"),
    # a unit that no name gives, and one that replaces that of the name
    ("t,acc / 0,.1 / .5,.2 / 1,.3", "--devices 8 --time-column t --time-unit h", "0:.1 4:.2 8:.3"),
    ("hours,acc / 0,.1 / 30,.2 / 60,.3", "--devices 8 --time-unit min", "0:.1 4:.2 8:.3"),
    # early points are dropped and R0 stays; another R0
    ("gpu_hours,reward / 0,.1 / 1,.9 / 2,.2 / 3,.3", "--drop-before 2", "0:.1 2:.2 3:.3"),
    ("gpu_hours,reward / 0,.1 / 1,.9 / 2,.2 / 3,.3", "--r0 .15", "0:.15 1:.9 2:.2 3:.3"),
    # another scale of rewards
    ("step,reward / 1,-.5 / 2,1", "--reward-range -1 1 --r0 -.8", "0:.1 1:.25 2:1"),
    # order does not matter, equal rows are one, and a half-written last line is left out
    ("gpu_hours,reward / 4,.75 / 1,.25 / 2,.5 / 2,.5", "", "1:.25 2:.5 4:.75"),
    ("gpu_hours,reward,se / 1,.25,.1 / 2,.5", "", "1:.25"),
    # a sum of single precision may lie beyond 1 by rounding
    ("step,reward / 1,-1e-9 / 2,1.0000001", "--samples 10", "1:0 2:1"),
    # W&B's history may log rewards and steps in turn
    ("_step,train/global_step,train/reward,eval/eval_default_pass1,eval/eval_other / 3,10,.2,, / 4,,,.3, / "
     "7,20,.2,, / 8,,,.4,", "", "10:.3 20:.4"),
    # an old checkpoint, evaluated again at the end
    ("step,acc / 0,.1 / 5,.4 / 9,.6 / 5,.5", "", "0:.1 5:.45 9:.6"),
]  # fmt: skip


@pytest.mark.parametrize(("table", "options", "points"), TABLES)
def test_a_table_is_read_as_R0_and_points(table: str, options: str, points: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(table.replace(" / ", "\n"))
    curve = curve_at(tmp_path / "a.csv", *options.split())
    expected = [tuple(map(float, point.split(":"))) for point in points.split()]
    first = [] if logs.start_of(curve) is None else [(0, pytest.approx(logs.start_of(curve)))]
    assert first + pairs(curve) == expected


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
    one, two = readings_of(tmp_path)
    assert (one.curve.name, two.curve.name) == (f"{tmp_path}: one/eval", f"{tmp_path}: two/eval")


def test_a_wandb_chart_is_a_curve_for_each_run(tmp_path: Path) -> None:
    metric = "val-core/aime/acc/mean@16"
    table: dict[str, list[object]] = {"Step": [0, 100, 200, 300]}
    for run, values in {"grpo - seed 1": [0.1, 0.2, "", 0.3], "cispo": ["", 0.4, 0.5, ""]}.items():
        for ending in ("", "__MIN", "__MAX"):
            table[f"{run} - {metric}{ending}"] = values
        table |= {f"{run} - _step{ending}": table["Step"] for ending in ("", "__MIN", "__MAX")}
    path = write_csv(tmp_path / "wandb.csv", table)
    first, second = (reading.curve for reading in readings_of(path))
    assert (first.name, pairs(first)) == (f"{path}: grpo - seed 1", [(100, 0.2), (300, 0.3)])
    assert isinstance(first.R0, EvalPoint) and first.unit == "steps"
    assert (second.name, pairs(second), second.R0) == (f"{path}: cispo", [(100, 0.4), (200, 0.5)], None)


def test_the_error_is_found_given_or_binomial(tmp_path: Path) -> None:
    row = {"gpu_hours": [1], "reward": [0.2], "reward_stderr": [0.03], "sd": [0.5]}
    path = write_csv(tmp_path / "a.csv", row)
    assert curve_at(path).points[0].pass_rate_se == 0.03
    assert curve_at(path, "--se-column", "sd").points[0].pass_rate_se == 0.5
    binomial = reading_of(path, "--samples", 1600)
    assert binomial.curve.points[0].pass_rate_se == pytest.approx(0.01)  # sqrt(.2 × .8 / 1600)
    assert "1600 samples" in binomial.error
    never = write_csv(tmp_path / "never.csv", {"step": [1, 2], "reward": [0.0, 1.0]})
    errors = [p.pass_rate_se for p in curve_at(never, "--samples", 62).points]
    assert errors == pytest.approx([math.sqrt(1 / 64 * 63 / 64 / 62)] * 2)  # (k + 1) / (n + 2)
    path = write_csv(tmp_path / "b.csv", {"gpu_hours": [1], "reward": [0.2], "reward_std": [0.3]})
    assert curve_at(path).points[0].pass_rate_se == 0.0  # a deviation of samples is no error of their mean
    path = write_csv(tmp_path / "c.csv", {"step": [1, 2], "reward": [-0.5, 1.0], "se": [0.1, 0.0]})
    scaled = reading_of(path, "--reward-range", -1, 1)
    assert scaled.curve.points[0].pass_rate_se == 0.05
    assert "(-1 to 1, rescaled to 0 to 1)" in scaled.reward
    assert "without 1 before 2" in reading_of(path, "--reward-range", -1, 1, "--drop-before", 2).compute


def test_a_half_written_last_line_is_left_out(tmp_path: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "a.jsonl").write_text(lines[:-9])
    assert pairs(curve_at(tmp_path / "a.jsonl")) == POINTS[:2]


WRONG: list[tuple[str, str | bytes, list[object], str]] = [
    ("a.csv", "", [], "a.csv is empty"),
    ("a.csv", "gpu_hours,reward\n", [], "a.csv is empty"),
    ("a.jsonl", "", [], "a.jsonl is empty"),
    ("a.json", "[]", [], "a.json is empty"),
    ("a.csv", "a,reward\n1,.2\n", [], "no column is recognized as compute; set --compute-column to"),
    ("a.csv", "step,b\n1,2\n", [], "no column is recognized as a reward"),
    ("a.csv", "1,10,.1\n2,20,2e-1\n", [], "its first line is 1, 10, .1; expected the names of the columns"),
    ("a.csv", "i,my score,x,loss\n1,-.5,a,.2\n2,2.5,a,.1\n", [], "set --reward-column to one of my score, "
     "i, loss, x; all that it needs at once, such as --reward-column 'my score' --compute-column i "
     "--reward-range -1 3"),
    ("a.csv", "i,reward,loss\n1,20,.2\n2,30,.1\n", ["--reward-column", "reward"], "set --compute-column to "
     "one of i, loss; all that it needs at once, such as --compute-column i --reward-range 0 100"),
    ("a.csv", "once,i,reward,loss\n5,1,20,.2\n,2,30,.1\n", ["--reward-column", "reward"],
     "all that it needs at once, such as --compute-column i --reward-range 0 100"),
    ("a.csv", "_runtime,x_score\n1,.2\n2,.3\n", [], "--reward-column x_score --devices N"),
    ("a.csv", "step,reward\n1,.2\n", ["--reward-column", "r"], "no column 'r'; set --reward-column to"),
    ("a.csv", "step,reward\n1,.2\n", ["--compute-column", "c"], "no column 'c'; set --compute-column to"),
    ("a.csv", "step,reward\n1,.2\n", ["--se-column", "e"], "no column 'e'; set --se-column to one"),
    ("a.csv", "step,reward\n1,.2\n", ["--devices", 8], "no column of time, which --devices N needs"),
    ("a.csv", "step,wall,update\n1,2,.2\n", ["--reward-column", "update", "--devices", 8],
     "no column of time"),
    ("a.csv", "step,acc,x_time\n1,.2,3\n", ["--devices", 8], "--time-column to one of x_time, acc"),
    ("a.csv", "b,acc,val-core,x_step\n1,.2,3,3\n", [], "--compute-column to one of x_step, b, val-core"),
    ("a.csv", "step,eval/aime/acc\n1,.2\n", ["--reward-column", "aimr"],
     "no column 'aimr' (did you mean 'eval/aime/acc'?); set"),
    ("a.csv", "step,acc,hours\n1,.2,3\n", ["--devices", 8, "--time-column", "houts"], "mean 'hours'?"),
    ("a.csv", "step,acc\n1,.2\n", ["--compute-column", "stpe"], "'stpe' (did you mean 'step'?)"),
    ("a.md", "# Title\n\nText\n", [], "a.md: it is neither a table nor a log with lines of"),
    ("a.txt", "a\nb, c\n", [], "a.txt: it is neither a table nor a log"),
    ("a.csv", "step,reward\n1,nan\n", [], "no row holds 'reward'"),
    ("a.csv", "step,reward\nx,.2\n", [], "row 1: 'step' is 'x'; expected a number"),
    ("a.csv", "step,reward\n1,nan\n2,x\n", [], "row 2: 'reward' is 'x'; expected a number"),
    ("a.csv", "time,acc\n1760000000,.1\n", ["--devices", 2], "no column counts steps"),
    ("a.csv", "step,reward\n-1,.2\n", [], "row 1: compute is -1; expected at least 0"),
    ("a.csv", "step,reward\n,.2\n,.3\n1,.4\n", [], "row 1 has a reward, but no row up to it has 'step'"),
    ("a.csv", "step,reward,se\n1,.2,-1\n", [], "row 1: 'se' is '-1'; expected a standard error"),
    ("a.csv", "step,reward,se\n1,.2,\n2,.2,.1\n", [], "row 1: 'se' is ''"),
    ("a.csv", "step,reward\n1,.2\n2,-.5\n", [], "row 2: 'reward' is -.5; expected 0 to 1; it goes "
     "from -0.5 to 0.2: give the lowest and the highest reward that are possible, --reward-range LOW HIGH, "
     "such as -1 1"),
    ("a.csv", "step,reward\n1,20\n", [], "give --reward-range 0 100 (it goes up to 20)"),
    ("a.csv", "step,reward\n1,-1.5\n2,2.5\n", [], "row 1: 'reward' is -1.5; expected 0 to 1; it goes from "
     "-1.5 to 2.5: give the lowest and the highest reward that are possible, --reward-range LOW HIGH, such "
     "as -2 3"),
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
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "options", "says"), WRONG)
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


@pytest.mark.parametrize("last", [math.nan, -1])
def test_what_is_no_compute_is_not_dropped_in_silence(last: float) -> None:
    points = [EvalPoint(i, c, 0.1 * i, 0.0) for i, c in enumerate((0, 1, last))]
    with pytest.raises(ConfigError, match=f"step 2: compute is {last}; expected a number of at least 0"):
        curve_of("", "h", points)


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
    assert same_unit([curve_at(a), curve_at(a)]) == "GPU-hours"
    with pytest.raises(ConfigError, match=r"GPU-hours \(.*a\.csv\), steps \(.*b\.csv\)") as error:
        same_unit([curve_at(a), curve_at(b)])
    assert "--gpu-hours-per-step" in str(error.value)
