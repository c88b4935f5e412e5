"""Promises of the fault matrix: it sees what is wrong, and a sample of its cells has no failure."""

import random
from argparse import Namespace
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import group, prompts
from logs import write_jsonl

from bench.faults import ledger_check, matrix, soak, trial
from bench.faults.cells import FROZEN, INF, KILLED, NAN, Cell, all_cells
from bench.faults.soak import describe, growth
from trainer.controller.journal import Journal
from trainer.controller.rounds import Minibatch
from trainer.controller.sampler import IssuedPrompt

PROMPTS = 4


def write(run_dir: Path, steps: int, version: int = 0) -> None:
    """The books of a run of two groups a step, with every token of step s from version s − 1 − `version`."""
    (run_dir / "journal").mkdir(parents=True)
    journal = Journal(run_dir / "journal")
    rows: list[dict[str, Any]] = [{"step": 0, "eval/pass_rate": 0.5}]
    for step in range(1, steps + 1):
        groups = []
        for group_id in (2 * step - 2, 2 * step - 1):
            prompt, epoch = prompts(PROMPTS)[group_id % PROMPTS], group_id // PROMPTS
            one = group(prompt, 1, 1)
            rollout = replace(one.rollouts[0], versions=np.full(1, step - 1 - version, np.int32))
            groups.append(replace(one, group_id=group_id, epoch=epoch, rollouts=(rollout,)))
            journal.issued(IssuedPrompt(group_id, epoch, prompt, step - 1))
            journal.finished(groups[-1])
        journal.trained(step, Minibatch(tuple(groups), ()))
        rows.append({"step": step})
    journal.close()
    write_jsonl(run_dir / "metrics.jsonl", rows)


def problems(run_dir: Path, lag: int = 1) -> list[str]:
    return ledger_check.problems(run_dir, PROMPTS, 2, lag)


def test_books_that_are_in_order_have_no_problem(tmp_path: Path) -> None:
    write(tmp_path / "a", 5)
    write(tmp_path / "b", 5, version=1)
    assert problems(tmp_path / "a") == [] and problems(tmp_path / "b") == []


def changed(run_dir: Path, old: str, new: str, name: str = "journal/000000.jsonl") -> Path:
    """The run's books with something changed in one file."""
    path = run_dir / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return run_dir


def test_what_is_lost_or_twice_or_too_old_is_found(tmp_path: Path) -> None:
    metrics, evaluated = "metrics.jsonl", '{"step": 0, "eval/pass_rate": 1}'
    for number, (old, new, problem, *name) in enumerate([
        ('{"step": 3}\n', "", "lacks the steps [3]", metrics),
        ('{"step": 3}\n{"step": 4}\n', '{"step": 4}\n{"step": 3}\n', "not in order", metrics),
        ('{"step": 3}\n', '{"step": 3}\n{"step": 3}\n', "has the steps [3] again", metrics),
        ('{"step": 5}\n', f'{{"step": 5}}\n{evaluated}\n', "step 0 was evaluated 2 times", metrics),
        ('"finished": 5,', '"finished": 55,', "group 5 of step 3 is not in the journal"),
        ('"trained": 2, "first": 2', '"trained": 2, "first": 1', "step 2 was trained on"),
        ('"epoch": 0, "prompt_id": "id0003"', '"epoch": 0, "prompt_id": "id0002"', "prompt id0002 2 times"),
    ]):  # fmt: skip
        run_dir = tmp_path / str(number)
        write(run_dir, 5)
        assert any(problem in line for line in problems(changed(run_dir, old, new, *name))), problem
    write(tmp_path / "old", 5, version=1)
    assert "tokens of versions {-1} in step 1" in problems(tmp_path / "old", lag=0)[0]


LINE = "error: the learner's process was killed"


@pytest.mark.parametrize(
    ("role", "changes", "violated"),
    [
        ("learner", {}, 0),
        ("learner", {"line": "error: something"}, 1),
        ("learner", {"orphans": ["python"]}, 1),
        ("learner", {"ended": "hang"}, 1),
        ("learner", {"leaked": ["sem.x"]}, 1),
        ("learner", {"problems": ["step 3 is missing"]}, 1),
        ("engine", {"line": "error: the engine's process was killed"}, 1),  # it must be started again
        ("engine", {"ended": "recovered", "line": ""}, 0),
    ],
)
def test_a_failure_is_a_hang_an_orphan_a_leak_or_a_line_without_the_culprit(
    role: str, changes: dict[str, Any], violated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = Cell(role, "training", KILLED)
    row = {"ended": "error", "line": LINE, "seconds": 1.0, "orphans": [], "problems": [], "leaked": []}
    monkeypatch.setattr(matrix, "try_cell", lambda cell, seed: asdict(cell) | row | changes)
    measured = matrix.measure(cell, 1)
    assert len(measured["violated"]) == violated == measured["failed"]
    ended = {"recovered": ["1", "0"], "hang": ["0", "0"]}.get(measured["ended"], ["0", "1"])
    line = matrix.describe({}, [measured | {"case": cell.name}]).splitlines()[2]
    cells = [x.strip() for x in line.split("|")[1:-1]]
    assert cells == [role, "killed", "1 in 1 of 7 phases", *ended, "1.0 (1.0)", str(violated)]


def test_a_run_whose_parts_each_start_in_time_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's on busy cores: it trains after 300 s, though no part of its start took START_DEADLINE_S."""
    waits = list[float]()

    def until(condition: Any, seconds: float) -> bool:
        waits.append(seconds)
        return seconds > 300 or len(waits) > 1

    monkeypatch.setattr(trial.time, "sleep", lambda seconds: None)
    run: Any = Namespace(until=until, entered=Counter())
    assert trial._reach(Cell("engine", "generating", KILLED), run, random.Random(0), 8) and len(waits) == 4


def test_every_cell_is_tried_once_a_run() -> None:
    names = [cell.name for cell in all_cells()]
    assert len(set(names)) == len(names) == 159
    tried = dict(matrix.cases(Namespace(only="controller, training", runs=2)))
    assert list(tried)[:2] == ["controller, training, killed, 1", "controller, training, killed, 2"]
    assert len(tried) == 4


def test_growth_is_of_the_last_quarter_over_the_second() -> None:
    assert growth([5.0] * 10 + [10.0] * 20 + [11.0] * 10) == pytest.approx(0.1)
    assert growth([1.0, 2.0]) == 0.0
    life = [{"memory MB": 100.0 + (i > 30), "files": 5, "threads": 2, "shared MB": 0.0} for i in range(40)]
    row = {"lives": {"launcher": life, "learner": []}, "faults": ["engine"], "wrong": []}
    lines = describe({}, [row]).splitlines()
    assert (
        lines[2].split()[1:8:2] == ["launcher", "1.3", "100", "|"]
        and "(+1.0%)" in lines[2]
        and "1 killed: engine 1" in lines[-1]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell",
    [
        Cell("launcher", "start-up", KILLED),
        Cell("launcher", "writing a checkpoint", KILLED),
        Cell("controller", "generating", FROZEN),
        Cell("engine-1", "evaluating", FROZEN),
        Cell("learner", "training", NAN),
        Cell("engine", "generating", INF),
        Cell("engine, LoRA", "pushing weights", KILLED),
        Cell("environment", "generating", FROZEN),
    ],
    ids=lambda cell: cell.name,
)
def test_a_sample_of_the_matrix_has_no_failure(cell: Cell) -> None:
    assert matrix.measure(cell, 1)["violated"] == []


@pytest.mark.slow
def test_over_a_minute_of_random_faults_leaves_nothing_lost_and_nothing_behind() -> None:
    row = soak.measure(1.25, 1)
    assert row["faults"] and not row["wrong"]
