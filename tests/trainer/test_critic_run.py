"""The promise of PPO with a critic as a whole program: it trains, and a resume goes on as if unbroken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from recipe_run import make_task
from small import metrics

from trainer.main import main

SAME = ("learner/loss", "learner/grad_norm", "critic/loss", "critic/grad_norm", "critic/explained_variance")


def train(run_dir: Path, task: Path, *more: str) -> list[dict[str, Any]]:
    """The metrics of all steps of the run so far."""
    ppo = ["--objective.loss", "ppo", "--objective.anchor", "recomputed", "--objective.critic.lr", "1e-3"]
    on_policy = ["--pipeline.max_lag", "0", "--pipeline.no_positive_resampling", "false"]
    assert main(["--task", str(task), "--run-dir", str(run_dir), *ppo, *on_policy, *more]) == 0
    return metrics(run_dir, "learner/loss")


@pytest.mark.slow
@pytest.mark.parametrize("body", ["own", "shared"])
def test_a_run_with_a_critic_goes_on_where_it_ended(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "task").mkdir()
    task = make_task(tmp_path / "task", "torch", monkeypatch)
    critic = ("--objective.critic.body", body)
    unbroken = train(tmp_path / "unbroken", task, *critic, "--pipeline.steps", "3")
    first = train(tmp_path / "run", task, *critic, "--pipeline.steps", "2")
    assert [row["step"] for row in first] == [1, 2]
    resumed = train(tmp_path / "run", task, "--resume", "--pipeline.steps", "3")
    assert [row["step"] for row in resumed] == [1, 2, 3]
    assert all(row["train/effective_prompts"] == 4 for row in resumed)  # none is dropped for equal rewards
    for ours, expected in zip(resumed, unbroken, strict=True):
        for key in SAME:
            assert ours[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-6), (ours["step"], key)
