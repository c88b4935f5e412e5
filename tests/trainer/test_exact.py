"""Promises of runs that go on from another one's state: bit for bit what the unbroken run does, at k = 0."""

import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from small import MAIN, Begin, make_model, metrics, run, started, until

from trainer.controller.recorded import Recorded
from trainer.jsonl import read_lines
from trainer.launcher import placement

pytestmark = pytest.mark.slow
STEPS = 8


def new(tmp: Path, name: str, *more: str) -> tuple[Path, str]:
    """The folder of a further run of this name and these flags, and what it printed."""
    return tmp / name, run([*MAIN, "--run-dir", str(tmp / name), *more], tmp)[0]


def refused(tmp: Path, *flags: str) -> str:
    """The one line of a command that is wrong."""
    _, error = run([*MAIN, *flags], tmp, code=2)
    assert error.count("\n") == 1, error
    return error


def losses(run_dir: Path) -> dict[int, float]:
    return {row["step"]: row["learner/loss"] for row in metrics(run_dir, "learner/loss")}


def weights(run_dir: Path, step: int = STEPS) -> dict[str, bytes]:
    file = run_dir / "checkpoints" / f"step-{step:06d}" / "model.safetensors"
    return {name: array.tobytes() for name, array in load_file(file).items()}


FLAGS = f"--pipeline.max_lag=0 --pipeline.steps={STEPS} --evaluation.every=4 --logging.checkpoint_every=2"
SETTINGS = (*FLAGS.split(), "--logging.keep_checkpoints=9")  # a checkpoint every second step


@pytest.fixture(scope="module")
def unbroken(begin: Begin, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    run(begin(folder / "run", *SETTINGS), folder)
    return folder / "run"


def test_a_branch_goes_on_bit_for_bit_and_its_compute_and_curve_with_it(
    unbroken: Path, begin: Begin, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        folder, printed = new(tmp_path, name, "--branch-from", f"{unbroken}@4")
        assert f"branched from {unbroken}@4, at " in printed
        assert losses(folder) == losses(unbroken) and len(losses(folder)) == STEPS
        assert weights(folder) == weights(unbroken)
        ours, parents = metrics(folder), metrics(unbroken)
        count = sum(row["step"] <= 4 for row in parents)
        assert ours[:count] == parents[:count] and [r["step"] for r in ours] == [r["step"] for r in parents]
        compute = [row["compute/total"] for row in ours]
        assert compute == sorted(compute) and compute[count] > compute[count - 1]
        books = json.loads((folder / "ledger.json").read_text())
        for role in ("learner", "engine"):
            assert sum(books["roles"][role]["seconds"].values()) == pytest.approx(books["wall_s"], rel=0.01)
        assert "branched from" in (folder / "report.html").read_text()

    other = tmp_path / "other"
    run([*begin(other, *SETTINGS), "--learner.lr", "1e-2", "--branch-from", f"{tmp_path / 'a'}@6"], tmp_path)
    assert losses(other)[6] == losses(unbroken)[6] and losses(other)[8] != losses(unbroken)[8]
    assert "lr: 0.01" in (other / "config.yaml").read_text()


REFUSED = {
    "--branch-from {run}@3": "has no checkpoint of step 3; it has those of 2, 4, 6, 8",
    "--branch-from {run}/none@2": "none holds no run (no config.yaml)",
    "--branch-from {run}": "expected RUN@STEP, such as",
    "--branch-from {run}@2 --model.path tiny": "model.path is tiny, that of ",
    "--branch-from {run}@2 --resume": "expected one of --resume, --branch-from and --replay",
    "--branch-from {run}@2 --run-dir {run}": "is in use already",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_a_branch_that_cannot_be_is_refused_in_one_line(flags: str, unbroken: Path, tmp_path: Path) -> None:
    words = flags.format(run=unbroken).split()
    assert REFUSED[flags] in refused(tmp_path, "--run-dir", str(tmp_path / "new"), *words)
    assert "needs a --run-dir" in refused(tmp_path, "--branch-from", f"{unbroken}@2")


def test_a_replay_has_the_losses_of_the_run_and_says_what_it_changes(unbroken: Path, tmp_path: Path) -> None:
    same, printed = new(tmp_path, "same", "--replay", str(unbroken))
    assert f"the losses up to step {STEPS} are bit for bit those of the replayed run" in printed
    assert losses(same) == losses(unbroken) and weights(same) == weights(unbroken)
    assert [row["replay/off_policy"] for row in metrics(same)] == [0] * STEPS
    assert json.loads((same / "pids.json").read_text()).keys() == {"learner", "controller"}
    assert json.loads((same / "ledger.json").read_text())["compute"]["total"] > 0
    other, printed = new(tmp_path, "other", "--replay", str(unbroken), "--learner.lr", "5e-4")
    assert printed.count("off-policy: its samples are not those of a policy with another learner.lr") == 2
    assert "the loss of step 2 is the first that is not bit for bit the replayed run's" in printed
    assert losses(other)[1] == losses(unbroken)[1] and losses(other)[8] != losses(unbroken)[8]
    assert {row["replay/off_policy"] for row in metrics(other)} == {1}
    assert f"is a replay of {unbroken}" in refused(tmp_path, "--resume", "--run-dir", str(same))


def test_a_replay_begins_where_the_journal_does(unbroken: Path, tmp_path: Path) -> None:
    pruned, journal = tmp_path / "pruned", tmp_path / "pruned" / "journal" / "000000.jsonl"
    shutil.copytree(unbroken, pruned)
    kinds = ("issued", "finished", "first")
    later = [r for r in read_lines(journal) if min(r.get(kind, 99) for kind in kinds) > 14]
    journal.write_text("".join(json.dumps(record) + "\n" for record in later))
    folder, printed = new(tmp_path, "new", "--replay", str(pruned))
    assert f"replay of {pruned} after step 4: its journal holds no step before, up to step {STEPS}" in printed
    assert losses(folder) == {step: loss for step, loss in losses(unbroken).items() if step > 4}
    journal.write_text("")
    error = refused(tmp_path, "--replay", str(pruned), "--run-dir", str(tmp_path / "none"))
    assert "holds no step after its start or one of its checkpoints" in error


def test_steps_that_a_crash_has_undone_are_not_replayed(unbroken: Path, tmp_path: Path) -> None:
    """Their groups may be there again, generated anew, while metrics.jsonl lacks them."""
    folder = tmp_path / "run"
    shutil.copytree(unbroken, folder)
    assert Recorded(folder).last == STEPS
    rows = (row for row in metrics(unbroken) if row["step"] <= 6)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert Recorded(folder).last == 6


PPO = "--pipeline.scheme=ppo_off_policy --pipeline.minibatches=2 --pipeline.epochs=2"


@pytest.mark.parametrize(
    "flags",
    ["--pipeline.max_lag=1", f"{PPO} --objective.anchor=recomputed --objective.advantage_norm=running"],
)
def test_a_replay_of_lagged_samples_is_bit_for_bit_too(flags: str, begin: Begin, tmp_path: Path) -> None:
    parent = tmp_path / "run"
    run(begin(parent, *SETTINGS, *flags.split()), tmp_path)
    again, _ = new(tmp_path, "again", "--replay", str(parent))
    lags = [row["lag/histogram"] for row in metrics(parent, "lag/histogram")]
    assert [row["lag/histogram"] for row in metrics(again)] == lags and any(set(lag) - {"0"} for lag in lags)
    assert losses(again) == losses(parent) and weights(again) == weights(parent)


def test_a_cosine_ends_with_the_compute_and_its_replay_is_bit_for_bit(begin: Begin, tmp_path: Path) -> None:
    parent, budget = tmp_path / "run", 0.0015  # core-hours
    limits = "--pipeline.steps=5000 --learner.schedule=cosine --logging.checkpoint_every=1"
    run([*begin(parent), *limits.split(), f"--pipeline.max_compute={budget}"], tmp_path)
    less = (
        f"--pipeline.max_compute={budget / 100}"  # a replay is as long as its run, however slow the machine
    )
    rows, again = metrics(parent, "learner/lr"), new(tmp_path, "again", "--replay", str(parent), less)[0]
    rates = {row["step"]: row["learner/lr"] for row in rows}
    assert json.loads((parent / "ended.json").read_text())["by"] == "compute" and rates[1] == 1e-3
    for row in rows[2:]:  # what was spent lags the step by the launcher's message
        done = (row["step"] - 1) / max(row["train/planned_steps"], row["step"])
        assert row["learner/lr"] == pytest.approx(1e-3 * (1 + math.cos(math.pi * done)) / 2)
    assert min(rates.values()) < 0.1e-3 and rows[-1]["train/planned_steps"] < 2 * len(rows)
    assert {row["step"]: row["learner/lr"] for row in metrics(again, "learner/lr")} == rates
    assert losses(again) == losses(parent)


@pytest.mark.parametrize("body", ["own", "shared"])
def test_a_run_of_ppo_with_a_critic_goes_on_bit_for_bit_where_it_ended(
    body: str, begin: Begin, tmp_path: Path
) -> None:
    ppo = f"--objective.loss=ppo --objective.anchor=recomputed --objective.critic.body={body}"
    more = "--objective.critic.lr=1e-3 --objective.zero_variance=keep --pipeline.steps"
    for name, steps in (("unbroken", "3"), ("run", "2")):
        run(begin(tmp_path / name, *SETTINGS, *ppo.split(), *more.split(), steps), tmp_path)
    new(tmp_path, "run", "--resume", "--pipeline.steps", "3")
    unbroken, resumed = (metrics(tmp_path / name, "learner/loss") for name in ("unbroken", "run"))
    assert [row["step"] for row in resumed] == [1, 2, 3]
    assert all(row["train/effective_prompts"] == 4 for row in resumed)  # none is dropped for equal rewards
    for key in ("learner/loss", "learner/grad_norm", "critic/loss", "critic/explained_variance"):
        assert [row[key] for row in resumed] == [row[key] for row in unbroken], key


def experts_of(run_dir: Path) -> list[bool]:
    """Of each finished group in the journal, whether it has the experts of every completion."""
    records = read_lines(run_dir / "journal" / "000000.jsonl")
    return [all(r.get("experts", [None])) for r in records if "finished" in r]


FORCED = "--engine.interruption.enabled=true --engine.interruption.lo=2 --engine.interruption.hi=4"
FORCED += " --engine.interruption.answer_tokens=4 --engine.interruption.phrase==1+"


def test_a_replay_of_a_mixture_has_its_experts_bit_for_bit_and_other_losses_without(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, under forced interruption and new weights in flight, where learner and engine would choose
    other experts."""
    monkeypatch.setattr(placement, "cpu_has_bfloat16", lambda: True)  # slow on other CPUs, and refused there
    parent, model = tmp_path / "run", make_model(tmp_path / "model", mixture=True)
    flags = f"--model.path={model} --model.dtype=bfloat16 --pipeline.max_lag=1 {FORCED}"
    run(begin(parent, *SETTINGS, *flags.split()), tmp_path)
    assert all(experts_of(parent)) and len(experts_of(parent)) >= 4 * STEPS
    assert {row["learner/experts_not_replayed"] for row in metrics(parent, "learner/loss")} == {0}
    again, printed = new(tmp_path, "again", "--replay", str(parent))
    assert f"the losses up to step {STEPS} are bit for bit those of the replayed run" in printed
    assert losses(again) == losses(parent) and weights(again) == weights(parent)
    other, _ = new(tmp_path, "other", "--replay", str(parent), "--model.replay_experts=false")
    assert losses(other) != losses(parent)
    assert not metrics(other, "learner/experts_not_replayed")


def killed_at(argv: list[str], tmp: Path, instant: Callable[[], Any]) -> None:
    """Begin the run, and kill all its processes once `instant` is true."""
    with started(argv, tmp) as process:
        deadline = time.monotonic() + 120
        while process.poll() is None and not instant() and time.monotonic() < deadline:
            time.sleep(0.005)
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


LORA = "--model.lora.rank=4 --learner.lr=1e-2 --objective.kl.coefficient=0.1"
TEACHER = "--objective.kl.to={model} --objective.kl.place=as_advantage --objective.kl.estimator=k1"
OTHER_RUNS = {
    "LoRA": LORA,
    "a teacher": f"{TEACHER} --objective.kl.coefficient=1 --objective.zero_variance=keep",
    "SFT": "--objective.loss=sft --objective.zero_variance=keep --pipeline.scheme=ppo_off_policy "
    "--pipeline.minibatches=2",
}


@pytest.fixture(scope="module", params=OTHER_RUNS)
def other_run(
    request: pytest.FixtureRequest, begin: Begin, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, tuple[str, ...]]:
    """An unbroken run of another kind than those above, and its options."""
    folder = tmp_path_factory.mktemp("other")
    teacher = make_model(folder / "teacher", seed=1)
    flags = (*SETTINGS, *OTHER_RUNS[request.param].format(model=teacher).split())
    run(begin(folder / "run", *flags), folder)
    return folder / "run", flags


def test_adapters_a_teacher_and_sft_that_are_killed_and_resumed_are_bit_for_bit_the_unbroken_run(
    other_run: tuple[Path, tuple[str, ...]], begin: Begin, tmp_path: Path
) -> None:
    """LoRA's learner begins with the base of model.path again, its engines with the sum in the checkpoint."""
    kept, flags = other_run
    run_dir = tmp_path / "run"
    saved = run_dir / "checkpoints" / "step-000004"
    killed_at(begin(run_dir, *flags), tmp_path, saved.exists)
    run([*MAIN, "--resume", "--run-dir", str(run_dir)], tmp_path)
    assert weights(run_dir) != weights(run_dir, 2)
    assert losses(run_dir) == losses(kept) and len(losses(run_dir)) == STEPS
    assert weights(run_dir) == weights(kept)


def test_a_run_whose_engine_is_killed_is_the_unbroken_one_for_it_gets_the_newest_adapters(
    other_run: tuple[Path, tuple[str, ...]], begin: Begin, tmp_path: Path
) -> None:
    kept, flags = other_run
    run_dir = tmp_path / "run"

    def engine() -> int:
        return int(json.loads((run_dir / "pids.json").read_text())["engine"])

    with started(begin(run_dir, *flags), tmp_path) as process:
        until((run_dir / "checkpoints" / "step-000004").exists, process, 120)
        pid = engine()
        os.kill(pid, signal.SIGKILL)
        until(lambda: engine() != pid, process, 120)
        assert process.wait(120) == 0
    assert losses(run_dir) == losses(kept) and weights(run_dir) == weights(kept)


def test_a_run_of_a_mixture_that_is_killed_trains_on_with_the_experts_in_its_journal(
    begin: Begin, tmp_path: Path
) -> None:
    """Not the unbroken run, whose tokens may differ in the last bits; but a replay of it is this run."""
    run_dir, model = tmp_path / "run", make_model(tmp_path / "model", mixture=True)
    flags = f"--model.path={model} --pipeline.max_lag=1 {FORCED}"
    argv = begin(run_dir, *SETTINGS, *flags.split())
    killed_at(argv, tmp_path, (run_dir / "checkpoints" / "step-000004").exists)
    before = len(experts_of(run_dir))
    run([*MAIN, "--resume", "--run-dir", str(run_dir)], tmp_path)
    assert 16 <= before < len(experts_of(run_dir)) and all(experts_of(run_dir))
    rows = metrics(run_dir, "learner/loss")
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    assert {row["learner/experts_not_replayed"] for row in rows} == {0}
    again, _ = new(tmp_path, "again", "--replay", str(run_dir))
    assert losses(again) == losses(run_dir) and weights(again) == weights(run_dir)


def test_a_run_that_is_killed_anywhere_and_resumed_is_bit_for_bit_the_unbroken_one(
    unbroken: Path, begin: Begin, tmp_path: Path
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
    argv = begin(run_dir, *SETTINGS)
    for instant in instants:
        killed_at(argv, tmp_path, instant)
        argv = [*MAIN, "--resume", "--run-dir", str(run_dir)]
    run(argv, tmp_path)
    assert losses(run_dir) == losses(unbroken) and len(losses(run_dir)) == STEPS
    assert weights(run_dir) == weights(unbroken)
