"""Promises of a sweep: each run once, whatever is killed; failures recorded; bad input starts nothing."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer.config import ConfigError
from trainer.jsonl import read_lines
from trainer.run_folder import complete
from trainer.sweep import spec
from trainer.sweep.__main__ import main
from trainer.sweep.executors import _locked

HELPERS = Path(__file__).parents[2] / "helpers"
FAKE = (sys.executable, str(HELPERS / "fake_trainer.py"))
ASKED = ["grpo", "scalerl", "--task", "arithmetic", "--seeds", "2"]
PROGRAM = (
    "import sys; from trainer.sweep import spec; from trainer.sweep.__main__ import main\n"
    f"spec.TRAINER = {FAKE!r}\n"
    "from trainer.sweep import __main__\n"
    "__main__.write_results = lambda *_: 'the table'\n"
    "sys.exit(main(sys.argv[1:]))"
)
RUNS = [f"{recipe}-{seed}" for seed in (0, 1) for recipe in ("grpo", "scalerl")]


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(spec, "TRAINER", FAKE)
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("trainer.sweep.schedule.TICK_S", 0.05)
    monkeypatch.setattr("trainer.sweep.__main__.write_results", lambda *_: "the table")
    yield
    for lock in tmp_path.rglob("jobs/*.lock"):  # of a test that failed
        if _locked(lock) and (pid := re.search(r"\d+", lock.read_text())):
            os.kill(int(pid[0]), signal.SIGKILL)


def start(folder: Path, *more: str, **how: Any) -> subprocess.Popen[str]:
    """The sweep as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *ASKED, "--out", str(folder), *more], start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # as in the background of a shell
        env=os.environ | {"FAKE": json.dumps(how), "PYTHONPATH": os.getcwd()},
    )  # fmt: skip


def wait_until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def starts(folder: Path) -> list[str]:
    return [line.split()[0] for line in lines(folder / "starts.txt")]


def steps(folder: Path, run: str) -> list[int]:
    return [r["step"] for r in read_lines(folder / run / "metrics.jsonl") if "eval/pass_rate" in r]


def test_recipe_files_that_differ_in_what_a_task_sets_train_different_runs_and_equal_ones_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, lr in (("low", 1e-4), ("high", 1e-3), ("again", 1e-3)):
        (tmp_path / f"{name}.yaml").write_text(f"{{base: grpo, learner: {{lr: {lr}}}}}")
    low, high, again = (str(tmp_path / f"{name}.yaml") for name in ("low", "high", "again"))
    flags = ["--task", "study", "--seeds", "1", "--dry-run", "--out", str(tmp_path / "out")]
    assert main([low, high, *flags]) == 0
    err = capsys.readouterr().err
    assert "note: low: low.yaml comes after task addition: learner.lr 0.0001 (not 0.0006)" in err
    for recipes, more in (([high, again], []), ([low, high], ["--", "--learner.lr", "2e-3"])):
        assert main([*recipes, *flags, *more]) == 2
        assert "would train the same run on task study" in capsys.readouterr().err


def test_all_runs_train_one_after_the_other_and_a_second_start_trains_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    asked = [*ASKED, "--out", str(folder), "--budget", "1.6", "--", "--learner.lr", "1e-3"]
    assert main(asked) == 0
    assert starts(folder) == RUNS  # the first seed of every recipe comes first
    for run in RUNS:
        assert complete(folder / run, 1.6) and steps(folder, run) == list(range(17))
        assert yaml.safe_load((folder / run / "config.yaml").read_text())["learner"]["lr"] == 1e-3
    resolved = yaml.safe_load((folder / "sweep.yaml").read_text())
    assert resolved["seeds"] == 2 and resolved["overrides"] == ["--learner.lr", "1e-3"]
    assert resolved["differing"]["objective.loss"] == {"grpo": "grpo", "scalerl": "cispo"}
    assert "data.source" not in resolved["differing"]
    assert main(["--out", str(folder)]) == 0 and len(starts(folder)) == 4
    out = capsys.readouterr().out
    assert "4 of 4 runs complete" in out and out.endswith("the table\n")


def test_runs_side_by_side_share_the_cores(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("there is one core")
    assert main([*ASKED, "--out", str(tmp_path / "s"), "--jobs", "2", "--budget", "0.8"]) == 0
    used = {line.partition(" ")[2] for line in lines(tmp_path / "s" / "starts.txt")}
    half = len(cores) // 2
    assert used == {str(cores[:half]), str(cores[half : 2 * half])}
    assert sorted(os.sched_getaffinity(0)) == cores


@pytest.mark.slow
def test_after_a_kill_of_the_sweep_its_next_start_takes_over_the_run_that_trains(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    sweep = start(folder, tick=0.06)
    wait_until(lambda: len(lines(folder / "steps.txt")) > 2, "no step")
    os.killpg(sweep.pid, signal.SIGKILL)
    sweep.wait()
    assert main([*ASKED, "--out", str(folder)]) == 0
    assert starts(folder) == RUNS  # none was started twice
    made = Counter(lines(folder / "steps.txt"))
    assert len(made) == 4 * 24 and set(made.values()) == {1}  # no step was made twice


@pytest.mark.parametrize(
    ("run", "step"), [("grpo-0", 2), pytest.param("scalerl-0", 6, marks=pytest.mark.slow)]
)
def test_after_a_kill_of_everything_runs_go_on_from_their_checkpoints_or_begin_again(
    tmp_path: Path, run: str, step: int
) -> None:
    folder = tmp_path / "sweep"
    sweep = start(folder, tick=0.05)
    wait_until(lambda: f"{run} {step}" in lines(folder / "steps.txt"), "no step")
    pid = json.loads((folder / "jobs" / f"{run}.lock").read_text())["pid"]
    os.killpg(sweep.pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    sweep.wait()
    assert main([*ASKED, "--out", str(folder)]) == 0
    assert Counter(starts(folder)) == {name: 1 + (name == run) for name in RUNS}
    made = Counter(lines(folder / "steps.txt"))
    assert made[f"{run} 1"] == (2 if step < 4 else 1) and made[f"{run} 20"] == 1  # a checkpoint at 4
    assert all(steps(folder, name) == list(range(25)) for name in RUNS)


@pytest.mark.slow
def test_ctrl_c_stops_the_runs_with_a_checkpoint_and_the_same_command_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    sweep = start(folder, tick=0.2)
    wait_until(lambda: "grpo-0 1" in lines(folder / "steps.txt"), "no step")
    assert main([*ASKED, "--out", str(folder)]) == 2
    assert "is being written by another process; wait for it" in capsys.readouterr().err
    sweep.send_signal(signal.SIGINT)
    _, err = sweep.communicate(timeout=30)
    assert sweep.returncode == 130 and "0 of 4 runs are complete; the same command goes on" in err
    assert [p.name for p in (folder / "grpo-0" / "checkpoints").iterdir()] and starts(folder) == ["grpo-0"]
    assert main([*ASKED, "--out", str(folder)]) == 0
    assert set(Counter(lines(folder / "steps.txt")).values()) == {1}
    assert not json.loads((folder / "status.json").read_text())["errors"]


def test_a_failed_run_is_recorded_stops_no_other_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    asked = [*ASKED, "--out", str(folder), "--budget", "1.2"]
    monkeypatch.setenv("FAKE", json.dumps({"fails": ["grpo-0"]}))
    assert main(asked) == 1
    out, err = capsys.readouterr()
    assert err == f"error: grpo-0: step 3: loss is nan (log: {folder}/logs/grpo-0.log)\n"
    assert "4 of 4" not in out and "1 failed" in out
    assert [run for run in RUNS if complete(folder / run, 1.2)] == RUNS[1:]
    monkeypatch.delenv("FAKE")
    assert main(asked) == 0
    assert Counter(starts(folder)) == {"grpo-0": 2, "scalerl-0": 1, "grpo-1": 1, "scalerl-1": 1}


ON_TASK = "--task arithmetic"


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (f"nope {ON_TASK}", "--recipe nope: no such recipe"),
        ("grpo --task nope", "--task nope: no such task"),
        ("grpo", "expected one or more recipes and a --task"),
        (f"grpo grpo {ON_TASK}", "two recipes are named 'grpo'"),
        (f"grpo {ON_TASK} --seeds 0", "--seeds: 0 is out of range; expected 1 or more"),
        (f"grpo {ON_TASK} --budget -1", "--budget: -1 is out of range; expected 0 or more"),
        (f"grpo {ON_TASK} --budget inf", "--budget: inf is out of range; expected 0 or more, finite"),
        (f"grpo {ON_TASK} --vary learner.lr", "--vary learner.lr: expected KEY=VALUE,VALUE"),
        (f"grpo {ON_TASK} --vary lr=1,2", "unknown key 'lr' (did you mean 'learner.lr'?)"),
        (f"grpo {ON_TASK} --vary seed=1,2", "give --seeds N"),
        (f"grpo {ON_TASK} --vary learner.lr=1", "there is one value; expected two or more"),
        (f"grpo {ON_TASK} --vary learner.lr=1,0", "--vary: learner.lr is 0.0; expected above 0"),
        (f"grpo {ON_TASK} --vary learner.lr=1e-4,0.0001", "0.0001 is there twice"),
        (f"grpo {ON_TASK} --vary learner.lr=1,2 --vary learner.lr=3,4", "learner.lr is there twice"),
        (f"grpo {ON_TASK} --vary pipeline.max_compute=1,2", "max_compute: the sweep sets this for each run"),
        (f"grpo {ON_TASK} --vary learner.lr=1,2 -- --learner.lr=3", "learner.lr is varied, and follows --"),
        (f"grpo {ON_TASK} -- --pipeline.max-compute=2", "max-compute=2: the sweep sets this for each run"),
        (f"grpo {ON_TASK} --vary model.path=a/x,b/x", "two recipes are named 'grpo-path_x'"),
        (
            f"grpo {ON_TASK} --zip --vary learner.lr=1,2 pipeline.steps=1,2,3",
            "--zip: expected two or more --vary, each with as many values; given learner.lr with 2 values, "
            "pipeline.steps with 3 values",
        ),
        (f"grpo {ON_TASK} --zip", "each with as many values; given none"),
        (f"grpo {ON_TASK} --halving", "--halving needs --budget"),
        (
            f"article {ON_TASK} --halving --budget 1",
            "the learning rate of article would fall to its end at each",
        ),
        (f"grpo {ON_TASK} --jobs 999", "--jobs 999, --gpus-per-run 0: this machine has"),
        (f"grpo {ON_TASK} --gpus-per-run 2", "this machine has 0 GPUs"),
        (f"grpo {ON_TASK} --executor-options a=1", "expected KEY=VALUE, with --executor slurm"),
        (f"grpo {ON_TASK} -- --seed 3", "-- --seed: the sweep sets this"),
        (f"grpo {ON_TASK} -- --lr 3", "did you mean 'learner.lr'"),
        ("table", "holds no sweep"),
    ],
)
def test_wrong_input_is_one_line_and_starts_nothing(
    asked: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *more = asked.split()
    argv = ["table", str(tmp_path)] if first == "table" else [first, "--out", str(tmp_path / "s"), *more]
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_more_may_be_added_to_a_sweep_and_another_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    more = ["grpo", "scalerl", "dapo", "--task", "arithmetic", "--seeds", "3"]
    for asked in (ASKED, more):  # recipes and seeds
        assert main([*asked, "--out", str(folder), "--budget", "0.2"]) == 0
    added = starts(folder)
    assert Counter(added) == {f"{r}-{s}": 1 for r in ("grpo", "scalerl", "dapo") for s in (0, 1, 2)}
    for change, says in (
        (["--budget", "0.3"], "of another sweep: its budget is 0.2, given 0.3"),
        (["--budget", "0.2", "--", "--learner.lr", "1"], "of another sweep: its overrides is"),
        (["--budget", "0.2", "--seeds", "2"], "of a sweep with 3 seeds; more may be added, not fewer"),
        (["--budget", "0.2", "--out", str(tmp_path)], "is in use already, and not by a sweep"),
        (["--budget", "0.2", "--out", str(tmp_path), "--dry-run"], "is in use already, and not by a sweep"),
    ):
        capsys.readouterr()
        assert main([*more, "--out", str(folder), *change]) == 2
        err = capsys.readouterr().err
        assert says in err and err.count("\n") == 1 and starts(folder) == added


def test_the_plan_names_the_commands_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    assert main([*ASKED, "--out", str(folder), "--budget", "1", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert out.count("--pipeline.max_compute") == 4 and "--recipe grpo --task arithmetic --seed 1" in out
    assert out.endswith("4 of 4 runs are to be trained.\n") and not folder.exists()


def test_of_two_sweeps_that_begin_at_once_the_second_takes_the_folder_only_with_more(tmp_path: Path) -> None:
    one = spec.Sweep(folder=tmp_path / "sweep", recipes=("scalerl",), task="study", seeds=1, budget=1.0)
    launches = one.check()  # and only then the other begins
    replace(one, seeds=2).claim({}).close()
    with pytest.raises(ConfigError, match="is of a sweep with 2 seeds; more may be added, not fewer"):
        one.claim({name: launch.config for name, launch in launches.items()})
    replace(one, seeds=3).claim({}).close()


@pytest.mark.parametrize(
    ("more", "pairs"),
    [
        ([], [("0.0003", "64"), ("0.0003", "256"), ("1e-05", "64"), ("1e-05", "256")]),
        (["--zip"], [("0.0003", "64"), ("1e-05", "256")]),
    ],
)
def test_each_recipe_is_trained_with_every_combination_or_pair_of_the_axes_values(
    more: list[str], pairs: list[tuple[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    axes = ["--vary", "learner.lr=3e-4,1e-5", "--vary", "pipeline.prompts-per-step=64,256"]
    assert main([*ASKED, *axes, *more, "--out", str(tmp_path / "s"), "--dry-run"]) == 0
    *commands, _ = capsys.readouterr().out.splitlines()
    keys = "--learner.lr={0} --pipeline.prompts_per_step={1}"
    parts = re.compile(".*--recipe (.*) --task.*--seed (.) (.*) --run-dir .*/(.*)")
    assert {match.groups() for c in commands if (match := parts.fullmatch(c))} == {
        (recipe, seed, keys.format(*pair), f"{recipe}-lr_{pair[0]}-prompts_per_step_{pair[1]}-{seed}")
        for recipe in ("grpo", "scalerl") for seed in "01" for pair in pairs
    }  # fmt: skip


@pytest.mark.parametrize(
    ("axis", "flags"),
    [
        ("pipeline.max_lag=1,8", ["--pipeline.max_lag=1", "--pipeline.max_lag=8"]),
        (
            "verifier.extra=[{kind: exact}, {kind: math, weight: 0}],[{kind: exact}]",
            [
                "'--verifier.extra=[{kind: exact}, {kind: math, weight: 0}]'",
                "'--verifier.extra=[{kind: exact}]'",
            ],
        ),
    ],
)
def test_any_key_is_varied_also_one_that_holds_lists_of_mappings(
    axis: str, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["grpo", "--task", "arithmetic", "--seeds", "1", "--out", str(tmp_path / "s"), "--dry-run"]
    assert main([*argv, "--vary", axis]) == 0
    *commands, _ = capsys.readouterr().out.splitlines()
    assert [flag in command for flag, command in zip(flags, commands, strict=True)] == [True, True]


def test_values_may_be_added_to_an_axis_and_none_taken_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    asked = [
        "grpo",
        "--task",
        "arithmetic",
        "--seeds",
        "1",
        "--budget",
        "0.2",
        "--out",
        str(folder),
        "--vary",
    ]
    for axis in ("evaluation.pass_at=[1,2],[2]", "evaluation.pass_at=[2],[1,2],[]"):
        assert main([*asked, axis]) == 0
    runs = [f"grpo-pass_at_{value}-0" for value in ("1_2", "2", "")]
    assert starts(folder) == runs  # each once
    config = yaml.safe_load((folder / runs[0] / "config.yaml").read_text())
    assert config["evaluation"]["pass_at"] == [1, 2]
    assert main([*asked, "evaluation.pass_at=[1,2],[2]"]) == 2
    assert "is of a sweep with recipe grpo-pass_at_; more may be added" in capsys.readouterr().err
    assert main(["--out", str(folder)]) == 0 and starts(folder) == runs


@pytest.mark.slow
def test_jobs_of_submitit_stop_by_the_stop_file_and_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    more = ["--seeds", "1", "--executor", "local", "--executor-options", "timeout_min=5"]
    sweep = start(folder, *more, tick=0.3)
    wait_until(lambda: {"grpo-0 1", "scalerl-0 1"} <= set(lines(folder / "steps.txt")), "no step")
    sweep.send_signal(signal.SIGINT)
    sweep.communicate(timeout=60)
    assert sweep.returncode == 130 and sorted(starts(folder)) == ["grpo-0", "scalerl-0"]
    assert all((folder / run / "checkpoints").is_dir() for run in ("grpo-0", "scalerl-0"))
    assert main([*ASKED, "--out", str(folder), *more]) == 0
    assert all(steps(folder, run) == list(range(25)) for run in ("grpo-0", "scalerl-0"))
    assert set(Counter(lines(folder / "steps.txt")).values()) == {1}
