"""Promises of runs that go on from another one's state: bit for bit what the unbroken run does, at k = 0."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from small import command, environment, make_data, make_model

from trainer.controller.recorded import Recorded
from trainer.jsonl import read_lines

pytestmark = pytest.mark.slow
STEPS = 8
MAIN = [sys.executable, "-m", "trainer.main"]


def run(argv: list[str], tmp: Path) -> str:
    done = subprocess.run(argv, env=environment(tmp), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(argv: list[str], tmp: Path) -> str:
    """The one line of a command that is wrong."""
    done = subprocess.run(argv, env=environment(tmp), capture_output=True, text=True, timeout=400)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def losses(run_dir: Path) -> dict[int, float]:
    rows = read_lines(run_dir / "metrics.jsonl")
    return {row["step"]: row["learner/loss"] for row in rows if "learner/loss" in row}


def weights(run_dir: Path, step: int = STEPS) -> dict[str, bytes]:
    file = run_dir / "checkpoints" / f"step-{step:06d}" / "model.safetensors"
    return {name: array.tobytes() for name, array in load_file(file).items()}


@pytest.fixture(scope="module")
def begin(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """The command of a run at k = 0 with a checkpoint every second step."""
    folder = tmp_path_factory.mktemp("inputs")
    model_dir, data = make_model(folder), make_data(folder)
    settings = {"pipeline.max_lag": 0, "pipeline.steps": STEPS, "evaluation.every": 4}
    settings |= {"logging.checkpoint_every": 2, "logging.keep_checkpoints": 9}
    flags = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
    return lambda run_dir, *more: command(model_dir, data, run_dir, *flags, *more)


@pytest.fixture(scope="module")
def unbroken(begin: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    run(begin(folder / "run"), folder)
    return folder / "run"


def test_a_branch_goes_on_bit_for_bit_and_its_compute_and_curve_with_it(
    unbroken: Path, begin: Callable[..., list[str]], tmp_path: Path
) -> None:
    branches = [tmp_path / "a", tmp_path / "b"]
    for folder in branches:
        said = run([*MAIN, "--branch-from", f"{unbroken}@4", "--run-dir", str(folder)], tmp_path)
        assert f"branched from {unbroken}@4, at " in said
        assert losses(folder) == losses(unbroken) and len(losses(folder)) == STEPS
        assert weights(folder) == weights(unbroken)
        ours, theirs = ([r for r in read_lines(d / "metrics.jsonl")] for d in (folder, unbroken))
        count = sum(row["step"] <= 4 for row in theirs)
        assert ours[:count] == theirs[:count] and [r["step"] for r in ours] == [r["step"] for r in theirs]
        compute = [row["compute/total"] for row in ours]
        assert compute == sorted(compute) and compute[count] > compute[count - 1]
        books = json.loads((folder / "ledger.json").read_text())
        for role in ("learner", "engine"):
            states, wall = books["roles"][role], books["wall_s"]
            assert sum(states["seconds"].values()) == pytest.approx(wall, rel=0.01)
        assert "branched from" in (folder / "report.html").read_text()

    other = tmp_path / "other"
    run([*begin(other), "--learner.lr", "1e-2", "--branch-from", f"{branches[0]}@6"], tmp_path)
    assert losses(other)[6] == losses(unbroken)[6] and losses(other)[8] != losses(unbroken)[8]
    assert "lr: 0.01" in (other / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--branch-from", "{run}@3"], "has no checkpoint of step 3; it has those of 2, 4, 6, 8"),
        (["--branch-from", "{run}/none@2"], "none holds no run (no config.yaml)"),
        (["--branch-from", "{run}"], "expected RUN@STEP, such as"),
        (["--branch-from", "{run}@2", "--model.path", "tiny"], "model.path is tiny, that of "),
        (["--branch-from", "{run}@2", "--resume"], "expected one of --resume, --branch-from and --replay"),
        (["--branch-from", "{run}@2", "--run-dir", "{run}"], "is in use already"),
    ],
)
def test_a_branch_that_cannot_be_is_refused_in_one_line(
    more: list[str], says: str, unbroken: Path, tmp_path: Path
) -> None:
    argv = [*MAIN, "--run-dir", str(tmp_path / "new"), *(text.format(run=unbroken) for text in more)]
    assert says in refused(argv, tmp_path)
    assert "needs a --run-dir" in refused([*MAIN, "--branch-from", f"{unbroken}@2"], tmp_path)


def test_a_replay_has_the_losses_of_the_run_and_says_what_it_changes(unbroken: Path, tmp_path: Path) -> None:
    same, other = tmp_path / "same", tmp_path / "other"
    said = run([*MAIN, "--replay", str(unbroken), "--run-dir", str(same)], tmp_path)
    assert f"the losses up to step {STEPS} are bit for bit those of the replayed run" in said
    assert losses(same) == losses(unbroken) and weights(same) == weights(unbroken)
    rows = list(read_lines(same / "metrics.jsonl"))
    assert [row["replay/off_policy"] for row in rows] == [0] * STEPS
    assert json.loads((same / "pids.json").read_text()).keys() == {"learner", "controller"}
    assert json.loads((same / "ledger.json").read_text())["compute"]["total"] > 0
    said = run([*MAIN, "--replay", str(unbroken), "--run-dir", str(other), "--learner.lr", "5e-4"], tmp_path)
    assert said.count("off-policy: its samples are not those of a policy with another learner.lr") == 2
    assert "the loss of step 2 is the first that is not bit for bit the replayed run's" in said
    assert losses(other)[1] == losses(unbroken)[1] and losses(other)[8] != losses(unbroken)[8]
    assert {row["replay/off_policy"] for row in read_lines(other / "metrics.jsonl")} == {1}
    resumed = refused([*MAIN, "--resume", "--run-dir", str(same)], tmp_path)
    assert f"is a replay of {unbroken}" in resumed


def test_a_replay_begins_where_the_journal_does(unbroken: Path, tmp_path: Path) -> None:
    pruned, journal = tmp_path / "pruned", tmp_path / "pruned" / "journal" / "000000.jsonl"
    shutil.copytree(unbroken, pruned)
    kinds = ("issued", "finished", "first")
    later = [r for r in read_lines(journal) if min(r.get(kind, 99) for kind in kinds) > 14]
    journal.write_text("".join(json.dumps(record) + "\n" for record in later))
    said = run([*MAIN, "--replay", str(pruned), "--run-dir", str(tmp_path / "new")], tmp_path)
    assert f"replay of {pruned} after step 4: its journal holds no step before, up to step {STEPS}" in said
    assert losses(tmp_path / "new") == {s: x for s, x in losses(unbroken).items() if s > 4}
    journal.write_text("")
    said = refused([*MAIN, "--replay", str(pruned), "--run-dir", str(tmp_path / "none")], tmp_path)
    assert "holds no step after its start or one of its checkpoints" in said


def test_steps_that_a_crash_has_undone_are_not_replayed(unbroken: Path, tmp_path: Path) -> None:
    """Their groups may be there again, generated anew, while metrics.jsonl lacks them."""
    run = tmp_path / "run"
    shutil.copytree(unbroken, run)
    assert Recorded(run).last == STEPS
    rows = (row for row in read_lines(unbroken / "metrics.jsonl") if row["step"] <= 6)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert Recorded(run).last == 6


@pytest.mark.parametrize(
    "more",
    [
        ["--pipeline.max_lag", "1"],
        [
            "--pipeline.scheme=ppo_off_policy", "--pipeline.minibatches=2", "--pipeline.epochs=2",
            "--objective.anchor=recomputed", "--objective.advantage_norm=running",
        ],
    ],
    ids=["k1", "ppo"],
)  # fmt: skip
def test_a_replay_of_lagged_samples_is_bit_for_bit_too(
    more: list[str], begin: Callable[..., list[str]], tmp_path: Path
) -> None:
    run([*begin(tmp_path / "run"), *more], tmp_path)
    run([*MAIN, "--replay", str(tmp_path / "run"), "--run-dir", str(tmp_path / "again")], tmp_path)
    ours, theirs = (list(read_lines(tmp_path / name / "metrics.jsonl")) for name in ("again", "run"))
    lags = [row["lag/histogram"] for row in theirs if "lag/histogram" in row]
    assert [row["lag/histogram"] for row in ours] == lags and any(set(lag) - {"0"} for lag in lags)
    assert losses(tmp_path / "again") == losses(tmp_path / "run")
    assert weights(tmp_path / "again") == weights(tmp_path / "run")


def test_a_run_that_is_killed_anywhere_and_resumed_is_bit_for_bit_the_unbroken_one(
    unbroken: Path, begin: Callable[..., list[str]], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"

    def journal(kind: str) -> int:
        path = run_dir / "journal" / "000000.jsonl"
        return path.read_text().count(f'"{kind}"') if path.exists() else 0

    def saved(step: int) -> bool:
        return (run_dir / "checkpoints" / f"step-{step:06d}").exists()

    instants: list[Callable[[], Any]] = [
        lambda: saved(2),
        lambda: saved(2) and journal("finished") >= 14,  # within a batch
        lambda: saved(4) and journal("trained") >= 5,  # before the step is on record, or after
        lambda: saved(6),
    ]
    argv = begin(run_dir)
    for instant in instants:
        process = subprocess.Popen(argv, env=environment(tmp_path), start_new_session=True)
        deadline = time.monotonic() + 120
        while process.poll() is None and not instant() and time.monotonic() < deadline:
            time.sleep(0.005)
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        argv = [*MAIN, "--resume", "--run-dir", str(run_dir)]
    run(argv, tmp_path)
    assert losses(run_dir) == losses(unbroken) and len(losses(run_dir)) == STEPS
    assert weights(run_dir) == weights(unbroken)
