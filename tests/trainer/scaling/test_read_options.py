"""Promises of the inputs: options for one input alone, tables of runs, numbers as people write them."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers.logs import groups_of, pairs, reading_of, readings_of, write_jsonl
from test_read_trainers import AIME, verl_rows

from trainer.config import ConfigError


@pytest.fixture
def verl(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "verl.jsonl", verl_rows(0, 8))


@pytest.fixture
def prime(tmp_path: Path) -> Path:
    rows = [{"step": s, "time/step": 720.0, "eval/aime2025/avg@8": s / 32} for s in range(1, 9)]
    return write_jsonl(tmp_path / "prime.jsonl", rows)


def test_each_input_has_its_own_columns_and_devices(verl: Path, prime: Path) -> None:
    groups = groups_of(f"dapo={verl}@devices=10,reward=aime", f"grpo={prime}@devices=20", "--r0", 0.125)
    dapo, grpo = groups["dapo"][0], groups["grpo"][0]
    assert dapo.reward_column == AIME and [p.compute for p in dapo.curve.points] == [2, 4, 6, 8]
    assert grpo.curve.points[-1].compute == 8 * 720 / 3600 * 20
    assert dapo.curve.R0 == grpo.curve.R0 == 0.125  # of all inputs
    (alone,) = readings_of(f"{verl}@reward={AIME}", "--devices", 30)  # the name contains an @
    assert alone.reward_column == AIME and alone.curve.points[-1].compute == 24
    comma = write_jsonl(verl.parent / "a@b.jsonl", [{"step": 1, "eval/acc,mean@8": 0.5}])
    assert reading_of(f"{comma}@reward=acc,mean@8").reward_column == "eval/acc,mean@8"
    assert alone.curve.name == str(verl) and alone.path == verl


def test_options_of_an_input_replace_those_of_all(verl: Path, prime: Path) -> None:
    options = "gpu-hours-per-step=2,reward=aime,reward-range=-1:1"
    one, other = readings_of(f"{verl}@{options}", prime, "--devices", 10)
    assert one.curve.points[-1].compute == 16 and one.curve.points[-1].pass_rate == (0.5 + 1) / 2
    assert other.curve.points[-1].compute == 16 and other.curve.points[-1].pass_rate == 0.25


def test_options_of_all_may_need_those_of_an_input(verl: Path) -> None:
    alone = f"{verl}@devices=10,reward=aime,drop-before=0"
    reading = reading_of(alone, "--time-unit", "min", "--drop-before", 5)
    assert [p.compute for p in reading.curve.points] == [120, 240, 360, 480]
    with pytest.raises(ConfigError, match="--time-unit needs --devices N"):
        reading_of(f"{verl}@reward=aime", "--time-unit", "min")


def test_seeds_of_a_recipe_share_its_options(tmp_path: Path) -> None:
    runs = [write_jsonl(tmp_path / f"s{i}.jsonl", verl_rows(0, 8, gain=i / 64)) for i in range(2)]
    groups = groups_of(f"dapo={runs[0]},{runs[1]}@reward=aime,devices=10")
    assert [r.curve.points[-1].compute for r in groups["dapo"]] == [8, 8]


def test_two_rewards_of_one_file_are_two_curves(verl: Path) -> None:
    one, other = readings_of(f"{verl}@reward=aime", f"{verl}@reward=MATH-500")
    assert one.curve.name == f"{verl} ({AIME})" and other.curve.name != one.curve.name


WRONG = {
    "devices=many": "--devices: invalid float value: 'many'",
    "devices=8,gpu-hours-per-step=2": "expected one of them, as each defines C",
    "time-unit=years": "invalid choice: 'years'",
    "reward=gsm8k": "no column 'gsm8k'",
    "devices=8,rewad=aime": "unknown option 'rewad'; expected one of compute, reward",
    "device=8": "unknown option 'device'; expected one of compute, reward, se, time, compute-column",
}


@pytest.mark.parametrize(("options", "message"), WRONG.items())
def test_a_wrong_option_of_an_input_is_one_line(options: str, message: str, verl: Path) -> None:
    with pytest.raises(ConfigError) as error:
        reading_of(f"{verl}@{options}")
    assert message in str(error.value) and str(verl) in str(error.value) and "\n" not in str(error.value)


def test_a_toml_file_lists_recipes_with_their_options(verl: Path, prime: Path, tmp_path: Path) -> None:
    table = tmp_path / "runs.toml"
    table.write_text(
        'r0 = 0.125\n[recipe.dapo]\nruns = ["verl.jsonl"]\ndevices = 10\nreward = "aime"\n'
        '[recipe."prime rl"]\nruns = "prime.jsonl"\ndevices = 20\nreward-range = [0, 2]\n'
    )
    groups = groups_of(table)
    assert list(groups) == ["dapo", "prime rl"] and groups["dapo"][0].path == verl
    assert groups["dapo"][0].curve.points[-1].compute == 8
    assert groups["prime rl"][0].curve.points[-1].pass_rate == 0.125  # .25 from 0 to 2
    assert groups["prime rl"][0].curve.R0 == 0.0625
    assert [r.path for r in readings_of(table)] == [verl, prime]
    for wrong, message in (
        ("[recipe.a]\ndevices = 1\n", "expected \\[recipe.NAME\\] with runs"),
        ('[recipe.a]\nruns = "verl.jsonl"\ndevice = 1\n', "unknown option 'device'; expected one of"),
        ("recipe = ", "expected a TOML file of runs"),
    ):
        table.write_text(wrong)
        with pytest.raises(ConfigError, match=message):
            groups_of(table)


FORMS = ("30.2%;40 %;99.5%", "0,302;0,4;0,995", "30,2%;40%;99,5 %", ".302;4e-1;.995")


@pytest.mark.parametrize("cells", FORMS)
def test_rewards_are_read_as_people_write_them(cells: str, tmp_path: Path) -> None:
    rows = [f"{c};{r}" for c, r in zip(("1,000", "2,500", "10,000.5"), cells.split(";"), strict=True)]
    (tmp_path / "a.csv").write_text("\n".join(["gpu_hours;reward", *rows]) + "\n")
    reading = reading_of(tmp_path / "a.csv")
    assert pairs(reading.curve) == [(1000, 0.302), (2500, 0.4), (10000.5, 0.995)]
    if "%" in cells:  # the range may be given as well
        assert pairs(reading_of(tmp_path / "a.csv", "--reward-range", 0, 100).curve) == pairs(reading.curve)


@pytest.mark.parametrize("column", ["run", "seed", "Run ID"])
def test_a_column_of_runs_splits_a_table(column: str, tmp_path: Path) -> None:
    rows = [f"{run},{step},{0.1 * run + step / 100}" for step in (1, 2, 3) for run in (1, 2)]
    (tmp_path / "a.csv").write_text("\n".join([f"{column},step,acc", *rows]) + "\n")
    one, other = readings_of(tmp_path / "a.csv")
    names = ["seed 1", "seed 2"] if column == "seed" else ["1", "2"]
    assert [one.curve.name, other.curve.name] == [f"{tmp_path / 'a.csv'}: {name}" for name in names]
    assert pairs(other.curve) == [(1, 0.21), (2, 0.22), (3, 0.23)]
    assert len(groups_of(f"grpo={tmp_path / 'a.csv'}")["grpo"]) == 2
    (tmp_path / "a.csv").write_text(f"{column},step,acc\n1,1,.1\n2,2,.2\n3,3,.3\n")  # one row each: no runs
    assert len(reading_of(tmp_path / "a.csv").curve.points) == 3


def test_the_settings_of_our_runs_are_those_of_their_config(tmp_path: Path) -> None:
    rows = [{"step": s, "eval/pass_rate": s / 8, "eval/hard/pass_rate": s / 16} for s in range(4)]
    write_jsonl(tmp_path / "metrics.jsonl", rows)
    data = {"source": "datasets:gsm8k", "options": {"split": "train"}, "held_out": 100, "held_out_source": ""}
    config = {
        "model": {"path": "smollm2-135m"}, "data": data, "verifier": {"kind": "math"}, "mixture": {},
        "evaluation": {"samples": 4, "sets": {"hard": "datasets:aime"}},
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    expected = {
        "model": "smollm2-135m", "data": "datasets:gsm8k (split train)", "samples per prompt": "4",
        "held-out set": "100 prompts of datasets:gsm8k (split train)", "scorer": "math",
    }  # fmt: skip
    assert reading_of(tmp_path).settings == expected
    hard = reading_of(tmp_path, "--reward-column", "eval/hard/pass_rate")
    assert hard.settings == expected | {"held-out set": "datasets:aime"}
    one = {"data": {"source": "x.jsonl", "held_out": 0}, "verifier": {"kind": "choice"}, "samples": 16}
    config |= {"evaluation": {"samples": 4, "sets": {"hard": one}}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    own = {"held-out set": "all prompts of x.jsonl", "scorer": "choice", "samples per prompt": "16"}
    assert reading_of(tmp_path, "--reward-column", "eval/hard/pass_rate").settings == expected | own
    kinds = {"math": "math", "hard": "code"}
    tasks = {name: {"data": data, "verifier": {"kind": kind}} for name, kind in kinds.items()}
    config |= {"mixture": tasks, "evaluation": {"samples": 4}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    assert reading_of(tmp_path).settings["scorer"] == "math + code"
    assert reading_of(tmp_path, "--reward-column", "hard").settings["scorer"] == "code"


@pytest.mark.parametrize("number", ["pass_rate", "mean_reward", "pass@4"])
def test_the_settings_of_a_later_evaluation_are_its_own(number: str, tmp_path: Path) -> None:
    rows = [{"step": s, "compute/total": s, f"eval/aime/{number}": s / 8} for s in range(4)]
    (tmp_path / "evaluations" / "aime").mkdir(parents=True)
    write_jsonl(tmp_path / "metrics.jsonl", [{"step": 1, "compute/total": 1.0}])
    write_jsonl(tmp_path / "evaluations" / "aime" / "results.jsonl", rows)
    for folder, source in ((tmp_path, "mine.jsonl"), (tmp_path / "evaluations" / "aime", "aime.jsonl")):
        config = {"data": {"source": source, "held_out": 3}, "evaluation": {"samples": 2}}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    settings = reading_of(tmp_path, "--reward-column", f"eval/aime/{number}").settings
    assert settings["held-out set"] == "3 prompts of aime.jsonl"


def test_a_table_is_read_without_libraries_that_take_long_to_load(verl: Path) -> None:
    code = (
        "import sys; from trainer.scaling.reading.read import ReadOptions, read_inputs\n"
        f"read_inputs([{str(verl)!r}], ReadOptions(reward_column='aime'))\n"
        "print({'pandas', 'tensorboard', 'pyarrow', 'yaml', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
