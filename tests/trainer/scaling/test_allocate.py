"""Promises of `allocate`: the best value of an axis at each budget, with an interval that holds it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from simulated import write

from bench.validation.allocation import allocation_of, best_value, simulate
from trainer.scaling.__main__ import main
from trainer.scaling.allocate import Allocation, Best, peak
from trainer.scaling.commands.allocate import describe
from trainer.scaling.curve.sigmoid import Estimate


def test_the_maximum_lies_between_values_or_at_an_end() -> None:
    """A parabola's maximum is found exactly at uneven distances; a monotonic reward has its at an end."""
    x = np.array([0.0, 1.0, 3.0, 4.5])
    rows = [5 - 2 * (x - 1.3) ** 2, 1 - (x - 2.2) ** 2, x, -x, np.array([0.0, 0.0, 1.0, 0.0])]
    # Of the last, f(1) = 0, f(3) = 1, f(4.5) = 0: −(x − 1)(x − 4.5) / 3 has its maximum at 2.75.
    assert peak(x, np.array(rows)) == pytest.approx([1.3, 2.2, 4.5, 0.0, 2.75])
    assert peak(np.array([0.0, 1.0]), np.array([[0.2, 0.1], [0.1, 0.2]])).tolist() == [0.0, 1.0]


@pytest.mark.slow
def test_the_interval_holds_the_best_value_which_grows_with_compute() -> None:
    a, b = 0.25, 0.6
    result = allocation_of(simulate(a, b, 0.0, np.random.default_rng(3)), at=[20_000.0])
    assert result.exponent and result.exponent.low > 0
    for row in result.budgets[-4:]:
        truth = best_value(row.compute, a, b)
        assert row.value.low <= truth <= row.value.high * 1.001
        assert row.value.high / row.value.low < 16  # of the range tried, 4 to 64
        assert abs(np.log(row.value.value / truth)) < 0.4
    first, *_, last = result.budgets
    assert last.compute == 20_000 and last.ahead > 1 and first.value.value < last.value.value


def test_a_best_value_at_the_end_of_the_range_is_said_to_be_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Group sizes of 4 and 8 alone, where more is better: no value between them is named."""
    runs = simulate(0.4, 0.35, 0.0, np.random.default_rng(1))
    files = [write(tmp_path / f"a-group_size_{v}.csv", runs[v]) for v in ("4", "8", "16")]
    out = tmp_path / "best.json"
    assert main(["allocate", *files, "--axis", "objective.group_size", "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "16 or more" in text and "The highest value tried may be the best" in text
    content = json.loads(out.read_text())
    assert set(content["values"].values()) == {4.0, 8.0, 16.0}
    assert content["budgets"][-1]["at_highest"] > 0.9


@pytest.mark.slow
def test_the_value_is_that_of_the_config_or_the_name_and_else_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = simulate(0.3, 0.5, 0.0, np.random.default_rng(0))
    for v in ("4", "64"):
        (folder := tmp_path / f"run-{v}").mkdir()
        (folder / "config.yaml").write_text(f"learner:\n  lr: {int(v) / 1000}\n")
        rows = [{"step": i, "compute/total": p.compute, "eval/pass_rate": p.pass_rate}
                for i, p in enumerate(runs[v].evaluations)]  # fmt: skip
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folders = [str(tmp_path / f"run-{v}") for v in ("4", "64")]
    out = tmp_path / "best.json"
    assert main(["allocate", *folders, "--axis", "learner.lr", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["values"] == {"run-4": 0.004, "run-64": 0.064}
    files = [write(tmp_path / f"{v}.csv", runs[v]) for v in ("4", "64")]
    assert main(["allocate", f"4={files[0]}", f"64={files[1]}", "--axis", "group", "--json", str(out)]) == 0
    assert set(json.loads(out.read_text())["values"].values()) == {4.0, 64.0}
    for text in ("learner: {}\n", "group: 7\n"):  # beside the files: of another run
        (tmp_path / "config.yaml").write_text(text)
        named = [f"4={files[0]}", f"64={files[1]}", "--axis", "group", "--json", str(out)]
        assert main(["allocate", *named]) == 0
        assert set(json.loads(out.read_text())["values"].values()) == {4.0, 64.0}
    dashed = [write(tmp_path / f"grpo-group-{v}.csv", runs[v]) for v in ("4", "64")]
    (tmp_path / "config.yaml").write_text("learner: {}\n")
    assert main(["allocate", *dashed, "--axis", "learner.group", "--json", str(out)]) == 0
    assert set(json.loads(out.read_text())["values"].values()) == {4.0, 64.0}
    (tmp_path / "config.yaml").write_text("learner: [\n")
    assert main(["allocate", *dashed, "--axis", "learner.group"]) == 2
    assert "it is not valid YAML" in capsys.readouterr().err
    (tmp_path / "config.yaml").unlink()
    for inputs, why in (
        ([f"a={files[0]}", f"b={files[1]}"], "a: neither a config nor the name says it"),
        ([f"4={files[0]}", f"4.0={files[1]}"], "all runs have 4; expected two values or more"),
        (folders, "run-4: neither"),
    ):
        assert main(["allocate", *inputs, "--axis", "group"]) == 2
        assert why in capsys.readouterr().err


def test_a_budget_before_the_data_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = simulate(0.3, 0.5, 0.0, np.random.default_rng(0))
    named = [f"{v}={write(tmp_path / f'{v}.csv', runs[v])}" for v in ("4", "16", "64")]
    first = runs["4"].points[0].compute
    assert main(["allocate", *named, "--axis", "group", "--at", f"{first / 2}"]) == 2
    assert "a run has no evaluation yet" in capsys.readouterr().err


def test_an_end_is_named_only_where_it_is_likelier_than_not() -> None:
    """Of 8 and 16 tried between 4 and 32: an end has more than half together, and neither has it alone."""
    best = Best(1.0, Estimate(8.0, 4.0, 32.0), Estimate(0.5, 0.4, 0.6), "8", 0.32, 0.3, 1.0)
    rows = describe("g", Allocation((best, replace(best, at_lowest=0.6)), None, 0.9), "h").rows
    assert [row[1] for row in rows[1:]] == ["4 to 32", "4 or less"]


def test_a_value_whose_runs_have_fallen_is_named_and_nobody_is_sent_beyond_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the highest learning rate of ScaleRL in docs/study-lr: else the one below it looks like an end."""
    runs = simulate(0.4, 0.35, 0.0, np.random.default_rng(1))
    last = runs["16"].points[-1].compute
    collapsed = [
        replace(p, pass_rate=p.pass_rate * 0.6) if p.compute > 0.7 * last else p for p in runs["16"].points
    ]
    runs["16"] = replace(runs["16"], points=tuple(collapsed))
    files = [f"{v}={write(tmp_path / f'{v}.csv', runs[v])}" for v in ("4", "8", "16")]
    assert main(["allocate", *files, "--axis", "group_size"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "With 16 the reward has fallen: left out." in text
    assert "8 or more" in text and "try between it and the one that has fallen." in text
    assert "try further" not in text.replace("lowest", "").split("highest")[-1]
