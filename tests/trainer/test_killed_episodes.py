"""Promises of a run on an environment, of which a process is killed in a turn: nothing is lost or twice."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from small import MAIN, learned, metrics, run, started, until

from trainer.controller.journal import records
from trainer.jsonl import read_lines

pytestmark = pytest.mark.slow
STEPS, PROMPTS, STEP = 4, 8, 3  # a process is killed while step STEP is generated
MODULE = '''
import os, time
from pathlib import Path
from trainer.environments.guess import Guess

class Held(Guess):
    """Waits in its second turn while the file `hold` names its question, and leaves its pid beside it. Of the
    first turns a third end it."""
    def __init__(self, hold):
        super().__init__()
        self._hold, self._turns = Path(hold), 0
    def start(self, row):
        self._question = row["question"]
        return super().start(row)
    def step(self, message):
        self._turns += 1
        while self._turns == 2 and self._hold.exists() and self._hold.read_text() == self._question:
            self._hold.with_suffix(f".{os.getpid()}").touch()
            time.sleep(0.02)
        if self._turns == 1 and sum(map(ord, message["content"])) % 3 == 0:
            return "", 0.25, True
        return super().step(message)
'''
FLAGS = f"""--recipe tiny --task guess --pipeline.steps {STEPS} --pipeline.prompts_per_step {PROMPTS}
--data.held_out 4 --pipeline.completions_per_prompt 4 --evaluation.every 4 --data.size 64
--model.dtype float32 --logging.checkpoint_every 2 --logging.samples_per_step {PROMPTS}
--objective.zero_variance keep
--pipeline.max_lag 0 --environment.kind held:Held --environment.network true --environment.turn_s 250"""


def command(folder: Path, name: str) -> list[str]:
    (folder / "held.py").write_text(MODULE)
    options = json.dumps({"hold": str(folder / "hold.txt")})
    return [*MAIN, *FLAGS.split(), "--environment.options", options, "--run-dir", str(folder / name)]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    run(command(folder, "run"), folder)
    return folder / "run"


def turns(run_dir: Path, group: int) -> list[tuple[int, int]]:
    """The turns of a group that were recorded when they ended: index of the episode, number."""
    return [(r["index"], r["number"]) for r in records(run_dir / "journal") if r.get("turn") == group]


@contextmanager
def held(unbroken: Path, folder: Path) -> Iterator[tuple[Any, Path, int, list[int]]]:
    """A run that waits in the second turn of a group's episodes, at least one of which has ended before: its
    process, folder, the group, and how many turns its episodes have in the unbroken run."""
    samples = [row for row in read_lines(unbroken / "samples.jsonl") if row["step"] == STEP]
    counts = [[completion["count"] for completion in row["completions"]] for row in samples]
    number = next(i for i, turns in enumerate(counts) if min(turns) == 1 < max(turns))
    (folder / "hold.txt").write_text(samples[number]["prompt"])
    group, run_dir = (STEP - 1) * PROMPTS + number, folder / "run"

    def waits() -> bool:
        path = run_dir / "journal" / "000000.jsonl"
        there = list(read_lines(path)) if path.exists() else []
        done = {r["finished"] for r in there if "finished" in r}
        recorded = {(r["index"], r["number"]) for r in there if r.get("turn") == group}
        wanted = {(i, n) for i, count in enumerate(counts[number]) for n in range(min(count, 2))}
        others = {*range((STEP - 1) * PROMPTS, STEP * PROMPTS)} - {group}
        waiting = len(list(folder.glob("hold.*"))) - 1 == sum(count > 1 for count in counts[number])
        return recorded == wanted and others <= done and waiting

    with started(command(folder, "run"), folder) as process:
        until(waits, process, 400)
        yield process, run_dir, group, counts[number]


def pids(run_dir: Path) -> dict[str, int]:
    found: dict[str, int] = json.loads((run_dir / "pids.json").read_text())
    return found


@pytest.mark.parametrize("role", ["launcher", "controller", "learner", "engine"])
def test_a_run_that_is_killed_in_a_turn_is_bit_for_bit_the_unbroken_one(
    role: str, unbroken: Path, tmp_path: Path
) -> None:
    with held(unbroken, tmp_path) as (process, run_dir, group, counts):
        before, engine = turns(run_dir, group), pids(run_dir)["engine"]
        if role == "launcher":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            os.kill(pids(run_dir)[role], signal.SIGKILL)
        if role == "engine":
            until(lambda: pids(run_dir)["engine"] != engine, process, 400)
        else:
            assert process.wait(400)
        (tmp_path / "hold.txt").unlink()
        if role == "engine":
            assert process.wait(400) == 0
    if role != "engine":
        run([*MAIN, "--resume", "--run-dir", str(run_dir)], tmp_path)
    assert len(before) == len(set(before))
    wanted = {(i, n) for i, count in enumerate(counts) for n in range(count)}
    assert sorted(turns(run_dir, group)) == sorted(wanted)  # none again, none lost
    assert learned(run_dir) == learned(unbroken)


@pytest.mark.parametrize("whose", ["worker", "fork server"])
def test_an_environment_that_is_killed_in_a_turn_costs_its_episodes_and_no_more(
    whose: str, unbroken: Path, tmp_path: Path
) -> None:
    with held(unbroken, tmp_path) as (process, run_dir, _, counts):
        worker = next(int(path.suffix[1:]) for path in tmp_path.glob("hold.*") if path.suffix != ".txt")
        parent = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(worker if whose == "worker" else parent, signal.SIGKILL)
        (tmp_path / "hold.txt").unlink()
        assert process.wait(400) == 0
    books = json.loads((run_dir / "ledger.json").read_text())
    seconds = books["roles"]["engine"]["seconds"]
    assert seconds["tools"] > 0 and sum(seconds.values()) == pytest.approx(books["wall_s"], rel=0.01)
    episodes = PROMPTS * len(counts)
    errors = {row["step"]: row["environment/error"] * episodes for row in metrics(run_dir, "learner/loss")}
    lost = errors.pop(STEP)
    assert round(lost) == 1 if whose == "worker" else 1 <= round(lost) <= len(counts)
    assert set(errors.values()) == {0.0} and len(errors) == STEPS - 1
    said, _ = run([*MAIN, "--run-dir", str(tmp_path / "again"), "--replay", str(run_dir)], tmp_path)
    assert f"the losses up to step {STEPS} are bit for bit those of the replayed run" in said
