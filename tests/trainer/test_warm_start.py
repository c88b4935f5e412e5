"""Promises of a warm start: a resumed run is the unbroken one, and RL goes on from it on the same axis."""

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from small import MAIN, Begin, metrics, run

from trainer.controller.journal import records

LOSS = "--objective.loss=sft --objective.aggregation=token --objective.zero_variance=keep"
ROUNDS = "--pipeline.scheme=ppo_off_policy --pipeline.minibatches=3 --pipeline.steps=8 --evaluation.every=4"
SFT = [*LOSS.split(), *ROUNDS.split(), "--logging.checkpoint_every=2", "--logging.keep_checkpoints=9"]
RL = ["--objective.loss=cispo", "--objective.zero_variance=drop", "--pipeline.scheme=pipeline_rl"]


@pytest.fixture(scope="module")
def warm(begin: Begin, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("warm")
    run(begin(folder / "run", *SFT), folder)
    return folder / "run"


def learned(run_dir: Path) -> tuple[dict[int, float], bytes]:
    """The losses by step, and the weights of the last one."""
    rows = metrics(run_dir, "learner/loss")
    weights = load_file(run_dir / "checkpoints" / "step-000008" / "model.safetensors")
    return {r["step"]: r["learner/loss"] for r in rows}, b"".join(
        weights[n].tobytes() for n in sorted(weights)
    )


def test_it_learns_the_datas_completions_and_samples_for_evaluations_alone(warm: Path) -> None:
    steps = metrics(warm, "learner/loss")
    assert steps[-1]["learner/loss"] < steps[0]["learner/loss"]
    assert [row["step"] for row in metrics(warm, "eval/pass_rate")] == [0, 4, 8]
    assert all(row["train/rollout_tokens"] == 0 for row in steps)
    assert not [
        k for k in steps[0] if k.startswith(("ratio/", "kl/", "lag/", "train/reward", "train/pass_rate"))
    ]
    trained = [r["prompt_id"] for r in records(warm / "journal") if "issued" in r]
    assert sorted(trained) == sorted(set(trained))  # an epoch has 32 prompts, and so have 8 steps


@pytest.mark.slow
def test_a_branch_and_a_resume_amid_a_round_are_the_unbroken_run(
    begin: Begin, warm: Path, tmp_path: Path
) -> None:
    for step in (2, 4):
        folder = tmp_path / f"branch-{step}"
        run([*MAIN, "--run-dir", str(folder), "--branch-from", f"{warm}@{step}"], tmp_path)
        assert learned(folder) == learned(warm)
    run(begin(tmp_path / "run", *SFT, "--pipeline.steps=5"), tmp_path)
    run([*MAIN, "--run-dir", str(tmp_path / "run"), "--resume", "--pipeline.steps=8"], tmp_path)
    assert learned(tmp_path / "run") == learned(warm)


def test_a_replay_is_the_run(warm: Path, tmp_path: Path) -> None:
    said, _ = run([*MAIN, "--run-dir", str(tmp_path / "same"), "--replay", str(warm)], tmp_path)
    assert "the losses up to step 8 are bit for bit those of the replayed run" in said


def test_rl_goes_on_from_it_with_other_prompts_and_its_compute(warm: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    rows = [{"question": f"{a}-{b}=", "answer": str(a)} for a in range(10) for b in range(3)]
    other.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = [*RL, "--data.source", str(other), "--pipeline.steps=10"]
    run([*MAIN, "--run-dir", str(tmp_path / "rl"), "--branch-from", f"{warm}@8", *more], tmp_path)
    before, after = metrics(warm), metrics(tmp_path / "rl")
    assert after[: len(before)] == before
    assert [row["step"] for row in after[len(before) :] if "learner/loss" in row] == [9, 10]
    assert all("train/pass_rate" in row for row in after[len(before) :] if "learner/loss" in row)
    assert min(row["compute/total"] for row in after[len(before) :]) > before[-1]["compute/total"]
    trained = [r for r in records(tmp_path / "rl" / "journal") if "trained" in r]
    assert [(r["trained"], r["first"]) for r in trained] == [(9, 0), (10, 4)]
    assert "pass rate" in (tmp_path / "rl" / "report.html").read_text()
