"""Promises of the judge, tried as a user tries it: a reward model by folder and one by URL train; when the
server goes away, the run names it and loses nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from judges import Reply, make_reward_model, says, serve
from small import command, environment, make_data, make_model
from test_end_to_end import lines, run, until

from trainer.controller.journal import records

KEY = "sk-nobody-may-read-this"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.mark.slow
def test_a_reward_model_by_folder_trains_beside_another_scorer(
    model_dir: Path, data: Path, tmp_path: Path
) -> None:
    judge = make_reward_model(tmp_path / "judge")
    extra = "[{kind: judge, weight: {0: 0.0, 1: 0.5}}]"  # joins at the second step
    flags = ("--verifier.extra", extra, "--verifier.judge.path", str(judge), "--pipeline.steps", "2")
    done = run(command(model_dir, data, tmp_path / "run", *flags, "--evaluation.every", "100"), tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = (r for r in lines(tmp_path / "run") if "learner/loss" in r)
    assert "reward/judge" not in first and first["train/reward"] == 2 * first["train/pass_rate"] - 1
    main, extra_score = second["reward/tests_reward:first_digit_even"], second["reward/judge"]
    assert second["train/reward"] == pytest.approx(main + 0.5 * extra_score)
    assert extra_score != 0


def even(route: str, body: Any) -> Reply:
    """A judge that likes completions whose first digit is even."""
    digits = [c for c in body["messages"][0]["content"].rpartition("Completion:")[2] if c.isdigit()]
    return says(f"I give {float(bool(digits) and int(digits[0]) % 2 == 0)}")


@pytest.mark.slow
def test_a_judge_by_url_trains_and_when_it_is_away_nothing_is_lost(
    model_dir: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    run_dir = tmp_path / "run"
    with serve(even) as server:
        flags = {
            "--verifier.kind": "judge", "--verifier.judge.url": server.url, "--verifier.judge.model": "m",
            "--verifier.judge.api_key_env": "JUDGE_KEY", "--verifier.judge.deadline_s": 2,
            "--verifier.judge.template": "Question: {question} Completion: {completion}",
            "--pipeline.steps": 100_000,
        }  # fmt: skip
        argv = command(model_dir, data, run_dir, *(str(x) for flag in flags.items() for x in flag))
        process = subprocess.Popen(
            argv, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            until(lambda: (run_dir / "metrics.jsonl").exists() and len(lines(run_dir)) > 3, process)
        except BaseException:
            process.kill()
            raise
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    error = err.decode()
    assert error.startswith("error: controller: the judge at " + server.url) and error.count("\n") == 1
    assert "for verifier.judge.deadline_s = 2 s" in error and "start its server" in error
    steps = [r["step"] for r in lines(run_dir) if "learner/loss" in r]
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == [f"step-{steps[-1]:06d}"]
    assert f"continue from step-{steps[-1]:06d} with --resume" in error

    with serve(even, int(server.url.rpartition(":")[2])):
        more = ("--resume", "--run-dir", str(run_dir), "--pipeline.steps", str(steps[-1] + 2))
        done = run([*argv[:3], *more], tmp_path)
    assert done.returncode == 0, done.stderr
    assert [r["step"] for r in lines(run_dir) if "learner/loss" in r] == list(range(1, steps[-1] + 3))
    rows = list(records(run_dir / "journal"))
    batches = [(r["first"], r["last"]) for r in rows if "trained" in r]
    assert [first for first, _ in batches] == [0, *(last + 1 for _, last in batches[:-1])]
    written = [p for p in run_dir.rglob("*") if p.is_file() and KEY.encode() in p.read_bytes()]
    assert not written and KEY not in out.decode() + error + done.stdout
    assert all(h["Authorization"] == f"Bearer {KEY}" for h in server.headers)
    assert os.environ["JUDGE_KEY"] == KEY
