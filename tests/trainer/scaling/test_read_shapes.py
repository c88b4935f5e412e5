"""Promises of tables that hold several runs, or rows of several kinds, under columns of any name."""

from pathlib import Path

import pytest
from helpers.logs import curve_at, pairs, reading_of, readings_of, says, write_csv, write_jsonl

from trainer.config import ConfigError


def table(path: Path, column: str, lengths: dict[str, int], by_step: bool = False) -> Path:
    """Runs of such lengths, one after the other or step by step; the name says where each begins."""
    rows = [(name, step) for name, length in lengths.items() for step in range(length)]
    rows = sorted(rows, key=lambda row: row[1]) if by_step else rows
    columns: dict[str, list[object]] = {
        column: [name for name, _ in rows],
        "step": [step for _, step in rows],
        "accuracy": [float(name[-1]) / 10 + step / 100 for name, step in rows],
    }
    return write_csv(path, columns)


@pytest.mark.parametrize("column", ["condition", "label", "which one", "run"])
@pytest.mark.parametrize("by_step", [False, True])
def test_runs_are_told_apart_by_any_column_of_text(column: str, by_step: bool, tmp_path: Path) -> None:
    """A table of a run after the other was read as one that was resumed, one of a step after the other was
    averaged."""
    path = table(tmp_path / "a.csv", column, {"run 1": 12, "run 2": 9, "run 3": 3}, by_step)
    first, second = readings_of(path)
    assert pairs(first.curve) == [(step, pytest.approx(0.1 + step / 100)) for step in range(1, 12)]
    assert pairs(second.curve) == [(step, pytest.approx(0.2 + step / 100)) for step in range(1, 9)]
    assert first.notes[0] == "Runs of fewer than 5 evaluations, which are left out: 'run 3'."
    assert pairs(curve_at(f"{path}/run 3"))[-1] == (2, pytest.approx(0.32))


def test_runs_are_told_apart_by_numbers_in_a_column_that_is_a_label(tmp_path: Path) -> None:
    path = table(tmp_path / "a.csv", "label", {"1e-1": 9, "3e-2": 9}, by_step=True)
    assert [reading.curve.name for reading in readings_of(path)] == [f"{path}: 1e-1", f"{path}: 3e-2"]


def test_a_text_that_changes_in_a_run_makes_no_two_of_it(tmp_path: Path) -> None:
    """The host of a run that was resumed on another one, and went back by two steps for it."""
    rows = [{"step": s, "accuracy": s / 100, "host": "a"} for s in range(12)]
    rows += [{"step": s, "accuracy": 0.5 + s / 100, "host": "b"} for s in range(10, 20)]
    reading = reading_of(write_jsonl(tmp_path / "a.jsonl", rows))
    assert len(reading.curve.points) == 19 and says(reading, "Steps 10 to 11 were made twice", "resumed")


def test_evaluations_are_taken_of_rows_of_several_kinds(tmp_path: Path) -> None:
    """Rollouts, which have the same columns, were taken for evaluations."""
    rows: list[dict[str, object]] = []
    for step in range(40):
        rows += {"type": "rollout", "step": step, "reward": 0.9}, {"type": "train", "step": step, "loss": 0.1}
        rows += [{"type": "eval", "step": step, "reward": step / 100}] * (step % 5 == 0)
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    reading = reading_of(path)
    assert pairs(reading.curve) == [(step, step / 100) for step in range(5, 40, 5)]
    assert says(reading, "Rows of the training batches, which are left out", "'rollout'")
    assert len(curve_at(f"{path}/rollout").points) == 39


@pytest.mark.parametrize(
    ("columns", "note"),
    [
        (["reward/mean"], "R is 'reward/mean', whose name does not say that the prompts are held out."),
        (
            ["reward", "loss"],
            "R is 'reward', by its name the reward of the training batches",
        ),
        (["accuracy"], "R is 'accuracy', taken for the reward of held-out prompts: the name does not say."),
        (["pass_rate"], ""),
        (["eval/reward"], ""),
        (["eval/reward/judge", "learner/loss"], ""),  # of a run of ours
        (["eval/math/maj@8", "learner/loss"], ""),
    ],
)
def test_a_reward_that_may_be_that_of_the_training_batches_is_called_so(
    columns: list[str], note: str, tmp_path: Path
) -> None:
    rows = [{"step": s, **dict.fromkeys(columns, s / 100)} for s in range(9)]
    reading = reading_of(write_jsonl(tmp_path / "a.jsonl", rows), "--reward-column", columns[0])
    assert any(n.startswith(note) for n in reading.notes) if note else not reading.notes


def test_where_no_run_is_long_all_are_read(tmp_path: Path) -> None:
    path = table(tmp_path / "a.csv", "label", {"run 1": 3, "run 2": 2})
    assert len(readings_of(path)) == 2
    with pytest.raises(ConfigError, match="has no run 'run 3'; it has run 1, run 2"):
        curve_at(f"{path}/run 3")
