"""The promise that a sweep works with the real trainer: two runs of a tiny model end at their compute."""

import json
from pathlib import Path

import pytest
import yaml
from recipe_run import make_task
from small import environment

from trainer.jsonl import read_lines
from trainer.run_folder import complete
from trainer.sweep.__main__ import main

BUDGET = 0.004  # core-hours


@pytest.mark.slow
def test_two_runs_end_at_their_compute_with_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = make_task(tmp_path, "torch", monkeypatch)
    settings = yaml.safe_load(task.read_text())
    settings["pipeline"]["steps"], settings["evaluation"]["every"] = 5000, 5
    task.write_text(yaml.safe_dump(settings))
    monkeypatch.setenv("PYTHONPATH", environment(tmp_path)["PYTHONPATH"])
    folder = tmp_path / "sweep"
    asked = ["reinforce", "scalerl", "--task", str(task), "--seeds", "1", "--out", str(folder)]
    lr = ["--", "--learner.warmup_steps", "0", "--model.dtype", "float32"]
    assert main([*asked, "--budget", str(BUDGET), *lr]) == 0
    for run in ("reinforce-0", "scalerl-0"):
        rows = list(read_lines(folder / run / "metrics.jsonl"))
        assert complete(folder / run, BUDGET) and not complete(folder / run, 2 * BUDGET)
        assert json.loads((folder / run / "ended.json").read_text())["by"] == "compute"
        # Its last weights are evaluated. The controller trains on until the launcher's message reaches it,
        # which takes a few steps on a busy machine.
        reached = next(row["step"] for row in rows if row["compute/total"] >= BUDGET)
        assert "eval/pass_rate" in rows[-1] and rows[-1]["step"] == max(row["step"] for row in rows)
        assert reached <= rows[-1]["step"] < reached + 100
    assert "Cost of 2 of 2 runs" in capsys.readouterr().out
    assert (folder / "report.html").stat().st_size > 10_000
