"""Promises of the judge, tried as a user tries it: a reward model by folder and one by URL train; when the
server goes away, the run names it and loses nothing."""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from judges import Reply, make_reward_model, says, serve
from small import MAIN, Begin, check_no_group_is_lost, metrics, run, started, steps, until

KEY = "sk-nobody-may-read-this"


@pytest.mark.slow
def test_a_reward_model_by_folder_trains_beside_another_scorer(begin: Begin, tmp_path: Path) -> None:
    judge = make_reward_model(tmp_path / "judge")
    extra = "[{kind: judge, weight: {0: 0.0, 1: 0.5}}]"  # joins at the second step
    flags = ("--verifier.extra", extra, "--verifier.judge.path", str(judge), "--pipeline.steps", "2")
    run(begin(tmp_path / "run", *flags, "--evaluation.every", "100"), tmp_path)
    first, second = metrics(tmp_path / "run", "learner/loss")
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
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    run_dir = tmp_path / "run"
    with ExitStack() as servers:
        server = servers.enter_context(serve(even))
        flags = {
            "--verifier.kind": "judge", "--verifier.judge.url": server.url, "--verifier.judge.model": "m",
            "--verifier.judge.api_key_env": "JUDGE_KEY", "--verifier.judge.deadline_s": 2,
            "--verifier.judge.template": "Question: {question} Completion: {completion}",
            "--pipeline.steps": 100_000,
        }  # fmt: skip
        argv = begin(run_dir, *(str(x) for flag in flags.items() for x in flag))
        with started(argv, tmp_path) as process:
            until(lambda: len(metrics(run_dir)) > 3, process)
            servers.close()
            assert process.wait(60) == 1
    error = (tmp_path / "err.log").read_text()
    assert error.startswith("error: controller: the judge at " + server.url) and error.count("\n") == 1
    assert "for verifier.judge.deadline_s = 2 s" in error and "start its server" in error
    last = steps(run_dir)[-1]
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == [f"step-{last:06d}"]
    assert f"continue from step-{last:06d} with --resume" in error

    with serve(even, int(server.url.rpartition(":")[2])):
        more = ("--resume", "--run-dir", str(run_dir), "--pipeline.steps", str(last + 2))
        (again := tmp_path / "again").mkdir()
        with started([*MAIN, *more], again) as process:
            assert process.wait(60) == 0
    assert steps(run_dir) == list(range(1, last + 3))
    check_no_group_is_lost(run_dir)
    written = [p for p in tmp_path.rglob("*") if p.is_file() and KEY.encode() in p.read_bytes()]
    assert not written  # what the run printed is among the files
    assert all(h["Authorization"] == f"Bearer {KEY}" for h in server.headers)
    assert os.environ["JUDGE_KEY"] == KEY
