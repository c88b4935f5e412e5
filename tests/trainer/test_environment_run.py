"""Promises of a run on an environment: it resumes and replays bit for bit, and is evaluated and looked at."""

from pathlib import Path

import pytest
from small import MAIN, learned, metrics, run

from trainer.controller.journal import records
from trainer.evaluate.__main__ import main as evaluate
from trainer.jsonl import read_lines

STEPS = 4
FLAGS = f"""--recipe tiny --task guess --pipeline.steps {STEPS} --pipeline.prompts_per_step 8
--data.held_out 4 --pipeline.completions_per_prompt 4 --evaluation.every 2 --data.size 64
--logging.checkpoint_every 2 --logging.keep_checkpoints 9 --objective.zero_variance keep --pipeline.max_lag"""


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment")
    run([*MAIN, *FLAGS.split(), "0", "--run-dir", str(folder / "run")], folder)
    return folder / "run"


def test_episodes_are_in_metrics_samples_and_journal(unbroken: Path) -> None:
    steps = metrics(unbroken, "learner/loss")
    assert all(1 <= row["environment/turns"] <= 3 and row["environment/error"] == 0 for row in steps)
    assert [row["step"] for row in metrics(unbroken, "eval/pass_rate")] == [0, 2, 4]
    turns = next(read_lines(unbroken / "samples.jsonl"))["completions"][0]["turns"]
    assert [turn["role"] for turn in turns[:2]] == ["assistant", "user"]
    finished = [r for r in records(unbroken / "journal") if "finished" in r]
    assert len(finished) == STEPS * 8 and all(len(r["episode"]) == 4 for r in finished)


def test_pages_of_run_and_evaluation_show_episodes_turn_by_turn(unbroken: Path, tmp_path: Path) -> None:
    asked = [*MAIN, f"{unbroken}@{STEPS}", "--out", str(tmp_path / "again")]
    run(asked, tmp_path, main=evaluate)
    for page in (unbroken / "report.html", tmp_path / "again" / "report.html"):
        assert '<div class="injected"><small>environment</small><pre>' in page.read_text()


@pytest.mark.slow
def test_a_branch_and_a_replay_are_bit_for_bit_the_run(unbroken: Path, tmp_path: Path) -> None:
    run([*MAIN, "--run-dir", str(tmp_path / "branch"), "--branch-from", f"{unbroken}@2"], tmp_path)
    assert learned(tmp_path / "branch") == learned(unbroken)
    said, _ = run([*MAIN, "--run-dir", str(tmp_path / "again"), "--replay", str(unbroken)], tmp_path)
    assert f"the losses up to step {STEPS} are bit for bit those of the replayed run" in said


@pytest.mark.slow
def test_a_run_with_lag_replays_bit_for_bit(tmp_path: Path) -> None:
    run([*MAIN, *FLAGS.split(), "2", "--run-dir", str(tmp_path / "run")], tmp_path)
    assert max(row["lag/max"] for row in metrics(tmp_path / "run", "lag/max")) <= 2
    said, _ = run([*MAIN, "--run-dir", str(tmp_path / "again"), "--replay", str(tmp_path / "run")], tmp_path)
    assert f"the losses up to step {STEPS} are bit for bit those of the replayed run" in said


def test_what_cannot_go_with_an_environment_is_refused_in_one_line(tmp_path: Path) -> None:
    for flags, text in {
        "--environment.turn_s 300": "environment.turn_s is 300; expected less than pipeline.deadline_s, 300",
        "--verifier.kind number": "verifier: with environment.kind the rewards are the environment's",
        "--environment.kind trainer.config:Config": "it has no start; expected a class with start(row)",
        "--environment.kind nowhere:Class": "environment.kind nowhere:Class: cannot import it",
        "--evaluation.maj_at [2]": "evaluation.maj_at: episodes have no answers to compare",
        "--data.source nowhere:rows": "data.source nowhere:rows: cannot import it",
    }.items():
        folder = ["--run-dir", str(tmp_path / "run"), "--dry-run"]
        command = [*MAIN, *FLAGS.split(), "0", *folder, *flags.split()]
        _, error = run(command, tmp_path, code=2)
        assert text in error and error.count("\n") == 1, error
