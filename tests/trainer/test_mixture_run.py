"""The promise of a mixture as a user sees it: a run on two tasks leaves two curves that can be fitted."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from judges import Reply, says, serve
from small import Begin, make_data, metrics, run

from trainer.scaling.reading.options import ReadOptions
from trainer.scaling.reading.read import read_inputs


def even(route: str, body: Any) -> Reply:
    """A judge that gives 1 where the first digit is even, as the verifier does, else 0.5."""
    digits = [c for c in body["messages"][0]["content"] if c.isdigit()]
    return says("1" if digits and int(digits[0]) % 2 == 0 else "0.5")


def trained(begin: Begin, tmp_path: Path, url: str) -> tuple[list[dict[str, Any]], str]:
    """The evaluations of a run on two tasks, and what it printed."""
    far = tmp_path / "far.jsonl"
    far.write_text("".join(json.dumps({"question": f"{a}*9=", "answer": "1"}) + "\n" for a in range(5)))
    judge = {"url": url, "model": "m", "template": "{completion}", "deadline_s": 30}
    extra = [{"kind": "judge", "weight": 0}]
    verifier = {"kind": "tests_reward:first_digit_even", "extra": extra, "judge": judge}
    sums = {"source": str(make_data(tmp_path)), "held_out": 8}
    halves = sums | {"template": "={question}", "held_out": 6}
    recipe: dict[str, Any] = {
        "mixture": {
            "sums": {"share": 3, "data": sums, "verifier": verifier},
            "halves": {"share": 1, "data": halves, "verifier": {"kind": "number"}},
        },
        "evaluation": {"sets": {"sums/far": str(far)}, "pass_at": [1, 2], "maj_at": [2], "best_at": [2]},
    }
    (tmp_path / "mixed.yaml").write_text(yaml.safe_dump(recipe))
    argv = [word for word in begin(tmp_path / "run") if not word.startswith(("--data.", "--verifier."))]
    printed, _ = run([*argv, "--recipe", str(tmp_path / "mixed.yaml")], tmp_path)
    return metrics(tmp_path / "run", "eval/pass_rate"), printed


@pytest.mark.slow
def test_a_run_on_two_tasks_leaves_a_curve_of_each_and_of_each_further_set(
    begin: Begin, tmp_path: Path
) -> None:
    with serve(even) as server:
        rows, printed = trained(begin, tmp_path, server.url)
    assert [row["step"] for row in rows] == [0, 2, 4]
    for step in metrics(tmp_path / "run", "learner/loss"):
        assert step["train/sums/share"] + step["train/halves/share"] == 1
    for row in rows:
        prompts = [row[f"eval/{name}/prompts"] for name in ("sums", "halves", "sums/far")]
        assert prompts == [8, 6, 5]
        mean = 0.75 * row["eval/sums/pass_rate"] + 0.25 * row["eval/halves/pass_rate"]
        assert row["eval/pass_rate"] == pytest.approx(mean)
        for name in ("eval", "eval/sums", "eval/halves", "eval/sums/far"):
            assert row[f"{name}/pass@1"] == pytest.approx(row[f"{name}/pass_rate"])
            assert row[f"{name}/pass@2"] >= row[f"{name}/pass_rate"]
        votes = {name for name in row if name.endswith("maj@2")}
        assert votes == {"eval/halves/maj@2"}  # only `number` has answers to compare
        for name in ("eval/sums", "eval/sums/far"):  # the judge knows what is right
            assert row[f"{name}/best@2"] == pytest.approx(row[f"{name}/pass@2"])
        assert "eval/halves/best@2" not in row
    for folder in (tmp_path / "run", tmp_path / "run" / "tensorboard"):
        for name in ("eval", "eval/sums", "eval/halves", "eval/sums/far"):
            options = ReadOptions(reward_column=f"{name}/pass_rate", compute_column="compute/total")
            (curve,) = (reading.curve for reading in read_inputs([str(folder)], options))
            expected = [(r["step"], r[f"{name}/pass_rate"], r[f"{name}/pass_rate_se"]) for r in rows]
            points = [(p.step, p.pass_rate, p.pass_rate_se) for p in curve.evaluations]
            assert points == [pytest.approx(values, rel=1e-6) for values in expected]
    assert "sums/far 0." in printed
