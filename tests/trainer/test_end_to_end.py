"""Promises of the whole program, tried as a user tries it: real processes, real files, a tiny model."""

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from processes import alive, wait_until_gone
from small import (
    MAIN,
    Begin,
    check_no_group_is_lost,
    metrics,
    run,
    started,
    started_anew,
    steps,
    until,
)
from transformers import AutoModelForCausalLM

from trainer.controller.journal import records, unpack
from trainer.jsonl import read_lines
from trainer.run_folder import PREFIX, latest

FOREVER = ("--pipeline.steps", "100000")


def versions(run_dir: Path) -> list[np.ndarray]:
    """The versions of each completion's tokens, from the journal."""
    out: list[np.ndarray] = []
    for record in records(run_dir / "journal"):
        if "finished" in record:
            lengths, flat = unpack(record)["versions"]
            out += np.split(flat, np.cumsum(lengths)[:-1])
    return out


def pids_of(run_dir: Path) -> dict[str, int]:
    """The ids of the roles' processes by role."""
    pids: dict[str, int] = json.loads((run_dir / "pids.json").read_text())
    return pids


def test_a_run_on_policy_leaves_everything_it_promises_and_its_folder_is_not_overwritten(
    begin: Begin, tmp_path: Path
) -> None:
    run_dir, start = tmp_path / "run", time.monotonic()
    argv = begin(run_dir, "--pipeline.max_lag", "0")
    with started_anew(argv, tmp_path) as process:
        assert process.wait(400) == 0, (tmp_path / "err.log").read_text()
    wall = time.monotonic() - start
    evaluations = metrics(run_dir, "eval/pass_rate")
    assert [r["step"] for r in evaluations] == [0, 2, 4]
    assert all(0 <= r["eval/pass_rate"] <= 1 and r["eval/pass_rate_se"] > 0 for r in evaluations)
    compute = [r["compute/total"] for r in evaluations]
    assert compute[0] == 0 < compute[1] < compute[2]
    assert steps(run_dir) == [1, 2, 3, 4]
    ledger = json.loads((run_dir / "ledger.json").read_text())
    assert ledger["unit"] == "core-hours" and ledger["wall_s"] < wall
    for role in ("learner", "engine"):
        states = ledger["roles"][role]
        assert sum(states["states"].values()) == pytest.approx(states["wall_s"] * states["devices"], rel=0.01)
        assert states["wall_s"] == ledger["wall_s"]  # to the end: test_supervisor.py
    for name in ("config.yaml", "samples.jsonl", "fit.json", "curve.png", "report.html", "journal"):
        assert (run_dir / name).stat().st_size > 0
    assert list(run_dir.rglob("events.out.tfevents*"))
    AutoModelForCausalLM.from_pretrained(run_dir / "checkpoints" / "step-000004")
    assert "identif" in (tmp_path / "out.log").read_text()  # three points identify nothing
    first = metrics(run_dir, "ratio/max")[0]  # in FP32 on the policy's own samples the ratio is 1
    assert first["step"] == 1 and first["lag/histogram"].keys() == {"0"}
    assert abs(first["ratio/max"] - 1) < 1e-4 and abs(first["ratio/min"] - 1) < 1e-4
    assert all(len(set(v.tolist())) <= 1 for v in versions(run_dir))
    _, error = run(argv, tmp_path, code=2)
    assert "in use already" in error and error.count("\n") == 1


@pytest.mark.slow
def test_at_k_4_versions_mix_within_completions_both_sides_work_at_once_and_a_resume_goes_on(
    begin: Begin, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    more = "--pipeline.max_lag=4 --pipeline.steps=10 --engine.max_new_tokens=200 --engine.slots=24"
    run(begin(run_dir, *more.split(), "--evaluation.every", "10"), tmp_path)
    assert any(len(set(v.tolist())) > 1 for v in versions(run_dir))
    lags = sum((Counter(row["lag/histogram"]) for row in metrics(run_dir, "lag/histogram")), Counter[str]())
    assert len(lags) >= 3 and max(map(int, lags)) <= 4
    spans = list(read_lines(run_dir / "timeline.jsonl"))
    generate, train = ([s for s in spans if s["state"] == x] for x in ("generate", "forward_backward"))
    assert any(g["start"] < t["end"] and t["start"] < g["end"] for g in generate for t in train)

    resume = ["--resume", "--run-dir", str(run_dir), "--pipeline.steps", "12", "--evaluation.every", "2"]
    run([*MAIN, *resume], tmp_path)
    assert steps(run_dir) == list(range(1, 13))
    assert steps(run_dir, "eval/pass_rate") == [0, 10, 12]
    compute = [r["compute/total"] for r in metrics(run_dir, "eval/pass_rate")]
    assert compute == sorted(compute)


@pytest.mark.slow
def test_ppo_off_policy_trains_in_rounds_on_real_processes(begin: Begin, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    more = "--pipeline.scheme=ppo_off_policy --pipeline.minibatches=2 --pipeline.epochs=2 --pipeline.steps=7"
    run(begin(run_dir, *more.split(), "--objective.zero_variance", "resample"), tmp_path)
    rows = metrics(run_dir, "learner/loss")
    assert [set(r["lag/histogram"]) for r in rows] == [{str(lag)} for lag in (0, 1, 2, 3, 0, 1, 2)]
    for row in rows:  # only the round's first step is on-policy
        on_policy = max(abs(row["ratio/max"] - 1), abs(row["ratio/min"] - 1)) < 1e-4
        assert on_policy == (row["step"] in (1, 5)), row["step"]
    assert {int(v) for one in versions(run_dir) for v in one} == {0, 4}


@pytest.mark.slow
def test_a_run_ends_by_its_own_forecast(begin: Begin, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    (tmp_path / "own_reward.py").write_text(  # right answers follow a sigmoid of the steps made
        "import zlib\nfrom pathlib import Path\n"
        "def first_digit_even(completion, answer, metadata):\n"
        f"    metrics = Path({str(run_dir / 'metrics.jsonl')!r})\n"
        "    steps = metrics.read_text().count('learner/loss') if metrics.exists() else 0\n"
        "    share = 0.1 + 0.8 / (1 + (3 / steps) ** 3) if steps else 0.1\n"
        "    return float(zlib.crc32((completion + answer).encode()) % 1000 < 1000 * share)\n"
    )
    more = "--evaluation.every=1 --evaluation.samples=8 --data.held_out=16 --forecast.patience=2"
    more += " --verifier.kind=own_reward:first_digit_even --pipeline.steps=200"
    out, _ = run(begin(run_dir, *more.split(), "--forecast.stop", "gain<0.1 per doubling"), tmp_path)
    end, last = json.loads((run_dir / "ended.json").read_text()), max(steps(run_dir))
    assert end["by"] == "forecast" and f"stopping: {end['why']}" in out and last < 100
    assert last == max(steps(run_dir, "eval/pass_rate"))  # the last weights are evaluated
    assert latest(run_dir) == run_dir / "checkpoints" / f"step-{last:06d}"
    assert "error_at_2x" in json.loads((run_dir / "fit.json").read_text())


@pytest.mark.slow
def test_a_killed_launcher_loses_no_step(begin: Begin, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with started_anew(begin(run_dir, *FOREVER), tmp_path) as process:
        until(lambda: len(metrics(run_dir)) > 3, process)
        step = max(steps(run_dir))
    process.wait()
    wait_until_gone(pids_of(run_dir).values(), 60)
    (saved,) = (run_dir / "checkpoints").iterdir()
    assert int(saved.name.removeprefix("step-")) >= step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "ranks"), [("learner", "1"), ("controller", "1"), ("learner", "2"), ("learner-1", "2")]
)
def test_a_killed_role_ends_the_run_with_its_name(
    role: str, ranks: str, begin: Begin, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with started(begin(run_dir, *FOREVER, "--learner.ranks", ranks), tmp_path) as process:
        until(lambda: len(metrics(run_dir)) > 2, process)
        pids = pids_of(run_dir)
        files = [f.resolve() for f in Path(f"/proc/{pids['learner']}/fd").iterdir()]
        (weights,) = {f.parent for f in files if f.parent.name.startswith(PREFIX)}
        os.kill(pids[role], signal.SIGKILL)
        assert process.wait(60) == 1
    assert f"the {role}'s process was killed by signal 9" in (tmp_path / "err.log").read_text()
    assert not alive(pids.values())  # nothing is left running
    assert not weights.exists()  # nor in shared memory


@pytest.mark.slow
def test_a_run_on_two_ranks_and_two_engines_is_resumed_on_one_of_each(begin: Begin, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run(begin(run_dir, "--learner.ranks", "2", "--engine.count", "2"), tmp_path)
    assert {"learner", "learner-1", "engine", "engine-1"} < pids_of(run_dir).keys()
    books = json.loads((run_dir / "ledger.json").read_text())
    assert books["roles"].keys() == {"learner", "engine", "engine-1"}
    AutoModelForCausalLM.from_pretrained(run_dir / "checkpoints" / "step-000004")
    one = ("--learner.ranks", "1", "--engine.count", "1", "--pipeline.steps", "6", "--resume")
    run(begin(run_dir, *one), tmp_path)
    assert steps(run_dir) == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.parametrize("engines", [1, 2])
def test_a_killed_engine_is_started_again_no_group_is_lost_and_ctrl_c_saves(
    engines: int, begin: Begin, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"

    def printed() -> str:
        return (tmp_path / "out.log").read_text() + (tmp_path / "err.log").read_text()

    with started(begin(run_dir, *FOREVER, "--engine.count", str(engines)), tmp_path) as process:
        until(lambda: len(metrics(run_dir)) > 2, process)
        os.kill(pids_of(run_dir)["engine"], signal.SIGKILL)
        until(lambda: "engine is back, with the weights of version" in printed(), process)
        step = metrics(run_dir)[-1]["step"]
        until(lambda: metrics(run_dir)[-1]["step"] > step + 10, process)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, printed()
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == [f"step-{max(steps(run_dir)):06d}"]
    assert "engine's process was killed by signal 9" in printed()
    check_no_group_is_lost(run_dir)
    assert max(int(lag) for r in metrics(run_dir, "lag/histogram") for lag in r["lag/histogram"]) <= 1
