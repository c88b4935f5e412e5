"""`python -m trainer.evaluate` on each kind of engine: a run's own evaluation again, within its error."""

from pathlib import Path

import pytest
from recipe_run import make_task
from small import metrics

from trainer.evaluate.__main__ import main as evaluate
from trainer.evaluate.record import results
from trainer.main import main


@pytest.mark.slow
def test_the_checkpoints_of_a_run_give_its_curve_again(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, task = tmp_path / "run", make_task(tmp_path, kind, monkeypatch)
    flags = ["--model.dtype=float32", "--evaluation.samples=64", "--learner.lr=3e-2", "--engine.slots=128"]
    assert main(["--recipe", "grpo", "--task", str(task), "--run-dir", str(run_dir), *flags]) == 0
    assert evaluate([str(run_dir)]) == 0
    rows, evaluations = results(run_dir / "evaluations" / "held_out"), metrics(run_dir, "eval/pass_rate")
    assert [row["step"] for row in rows] == [row["step"] for row in evaluations] == [0, 2]
    for row, own in zip(rows, evaluations, strict=True):
        error = (row["eval/held_out/pass_rate_se"] ** 2 + own["eval/pass_rate_se"] ** 2) ** 0.5
        assert abs(row["eval/held_out/pass_rate"] - own["eval/pass_rate"]) < 4 * error
        assert row["compute/total"] == own["compute/total"]
    change = abs(evaluations[1]["eval/pass_rate"] - evaluations[0]["eval/pass_rate"])
    assert change > 4 * error  # or the first weights would do
