"""Promises of the whole program, tried as a user tries it: real processes, real files, a tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import command, environment, make_data, make_model
from timeline import overlap, read_timeline
from transformers import AutoModelForCausalLM

from trainer.controller.journal import records, unpack
from trainer.launcher import supervisor
from trainer.main import main
from trainer.run_folder import PREFIX, latest

TIMEOUT_S = 150


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


def run(argv: list[str], tmp: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, env=environment(tmp), capture_output=True, text=True, timeout=TIMEOUT_S)


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def versions(run_dir: Path) -> list[np.ndarray]:
    """The versions of each completion's tokens, from the journal."""
    out: list[np.ndarray] = []
    for record in records(run_dir / "journal"):
        if "finished" in record:
            lengths, flat = unpack(record)["versions"]
            out += np.split(flat, np.cumsum(lengths)[:-1])
    return out


@dataclass(frozen=True, slots=True)
class Finished:
    """A run of 4 steps at k = 0."""

    argv: list[str]
    folder: Path
    wall: float  # seconds
    stdout: str


@pytest.fixture(scope="module")
def finished(model_dir: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("finished")
    argv = command(model_dir, data, folder / "run", "--pipeline.max_lag", "0")
    began = time.monotonic()
    done = run(argv, folder)
    assert done.returncode == 0, done.stderr
    return Finished(argv, folder / "run", time.monotonic() - began, done.stdout)


def test_a_run_leaves_everything_it_promises_and_its_folder_is_not_overwritten(
    finished: Finished, tmp_path: Path
) -> None:
    run_dir = finished.folder
    rows = lines(run_dir)
    evaluations = [r for r in rows if "eval/pass_rate" in r]
    assert [r["step"] for r in evaluations] == [0, 2, 4]
    assert all(0 <= r["eval/pass_rate"] <= 1 and r["eval/pass_rate_se"] > 0 for r in evaluations)
    compute = [r["compute/total"] for r in evaluations]
    assert compute[0] == 0 < compute[1] < compute[2]
    assert [r["step"] for r in rows if "learner/loss" in r] == [1, 2, 3, 4]
    ledger = json.loads((run_dir / "ledger.json").read_text())
    assert ledger["unit"] == "core-hours"
    for role in ("learner", "engine"):
        states = ledger["roles"][role]
        assert sum(states["states"].values()) == pytest.approx(states["wall_s"] * states["devices"], rel=0.01)
        assert states["wall_s"] == ledger["wall_s"] < finished.wall  # to the end: test_supervisor.py
    for name in ("config.yaml", "samples.jsonl", "fit.json", "curve.png", "report.html", "journal"):
        assert (run_dir / name).stat().st_size > 0
    assert list(run_dir.rglob("events.out.tfevents*"))
    AutoModelForCausalLM.from_pretrained(run_dir / "checkpoints" / "step-000004")
    assert "identif" in finished.stdout  # three points identify nothing, and it says so

    again = run(finished.argv, tmp_path)
    assert again.returncode == 2 and "in use already" in again.stderr and again.stderr.count("\n") == 1


def test_at_k_0_in_fp32_the_first_batch_has_ratio_1(finished: Finished) -> None:
    first = next(r for r in lines(finished.folder) if r["step"] == 1 and "ratio/max" in r)
    assert abs(first["ratio/max"] - 1) < 1e-4 and abs(first["ratio/min"] - 1) < 1e-4
    assert first["lag/histogram"] == {"0": first["lag/histogram"]["0"]}
    assert all(len(set(v.tolist())) <= 1 for v in versions(finished.folder))


@pytest.mark.slow
def test_at_k_4_versions_mix_within_completions_both_sides_work_at_once_and_a_resume_goes_on(
    model_dir: Path, data: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    more = ["--pipeline.max_lag", "4", "--pipeline.steps", "10", "--engine.max_new_tokens", "200"]
    done = run(
        command(model_dir, data, run_dir, *more, "--engine.slots", "24", "--evaluation.every", "10"), tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert any(len(set(v.tolist())) > 1 for v in versions(run_dir))
    histogram: dict[str, int] = {}
    for row in lines(run_dir):
        for lag, count in row.get("lag/histogram", {}).items():
            histogram[lag] = histogram.get(lag, 0) + count
    assert len(histogram) >= 3 and max(map(int, histogram)) <= 4
    assert overlap(read_timeline(run_dir / "timeline.jsonl")) > 0

    argv = [sys.executable, "-m", "trainer.main", "--resume", "--run-dir", str(run_dir)]
    resumed = run([*argv, "--pipeline.steps", "12", "--evaluation.every", "2"], tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert [r["step"] for r in lines(run_dir) if "learner/loss" in r] == list(range(1, 13))
    evaluations = [r for r in lines(run_dir) if "eval/pass_rate" in r]
    assert [r["step"] for r in evaluations] == [0, 10, 12]
    after = [r["compute/total"] for r in evaluations]
    assert after == sorted(after)


@pytest.mark.slow
def test_ppo_off_policy_trains_in_rounds_on_real_processes(
    model_dir: Path, data: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    scheme = ["--pipeline.scheme", "ppo_off_policy", "--pipeline.minibatches", "2", "--pipeline.epochs", "2"]
    more = ["--pipeline.steps", "7", "--evaluation.every", "3", "--objective.zero_variance", "resample"]
    done = run(command(model_dir, data, run_dir, *scheme, *more), tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [r for r in lines(run_dir) if "learner/loss" in r]
    assert [set(r["lag/histogram"]) for r in rows] == [{str(lag)} for lag in (0, 1, 2, 3, 0, 1, 2)]
    for row in rows:  # only the round's first step is on-policy
        on_policy = max(abs(row["ratio/max"] - 1), abs(row["ratio/min"] - 1)) < 1e-4
        assert on_policy == (row["step"] in (1, 5)), row["step"]
    assert {int(v) for one in versions(run_dir) for v in one} == {0, 4}
    assert [r["step"] for r in lines(run_dir) if "eval/pass_rate" in r] == [0, 3, 6, 7]


@pytest.mark.slow
def test_a_round_of_ppo_off_policy_that_was_cut_short_is_begun_again(
    model_dir: Path, data: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    scheme = ["--pipeline.scheme", "ppo_off_policy", "--pipeline.minibatches", "50"]
    argv = command(model_dir, data, run_dir, *scheme, "--pipeline.steps", "1000", "--evaluation.every", "999")
    process = subprocess.Popen(argv, env=environment(tmp_path), stdout=subprocess.DEVNULL)
    try:
        until(lambda: (run_dir / "metrics.jsonl").exists() and len(lines(run_dir)) > 4, process)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
    stopped = max(r["step"] for r in lines(run_dir) if "lag/max" in r)
    assert stopped % 50
    resume = [sys.executable, "-m", "trainer.main", "--resume", "--run-dir", str(run_dir)]
    done = run([*resume, "--pipeline.steps", str(stopped + 3)], tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [r for r in lines(run_dir) if "lag/max" in r]
    assert [r["step"] for r in rows] == list(range(1, stopped + 4))
    assert [r["lag/max"] for r in rows[stopped:]] == [0, 1, 2]
    rows = records(run_dir / "journal")
    spans = [(r["first"], r["last"]) for r in rows if "trained" in r]
    assert spans == [(4 * i, 4 * i + 3) for i in range(stopped + 3)]


@pytest.mark.slow
def test_a_run_ends_by_its_own_forecast(model_dir: Path, data: Path, tmp_path: Path) -> None:
    run_dir, env = tmp_path / "run", environment(tmp_path)
    (tmp_path / "tests_reward.py").write_text(  # right answers follow a sigmoid of the steps made
        "import zlib\nfrom pathlib import Path\n"
        "def first_digit_even(completion, answer, metadata):\n"
        f"    metrics = Path({str(run_dir / 'metrics.jsonl')!r})\n"
        "    steps = metrics.read_text().count('learner/loss') if metrics.exists() else 0\n"
        "    share = 0.1 + 0.8 / (1 + (3 / steps) ** 3) if steps else 0.1\n"
        "    return float(zlib.crc32((completion + answer).encode()) % 1000 < 1000 * share)\n"
    )
    evaluation = ["--evaluation.every", "1", "--evaluation.samples", "8", "--data.held_out", "16"]
    rule = ["--forecast.stop", "gain<0.1 per doubling", "--forecast.patience", "2"]
    argv = command(model_dir, data, run_dir, *evaluation, *rule, "--pipeline.steps", "200")
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    rows, end = lines(run_dir), json.loads((run_dir / "ended.json").read_text())
    last = max(r["step"] for r in rows if "learner/loss" in r)
    assert end["by"] == "forecast" and f"stopping: {end['why']}" in done.stdout and last < 100
    assert last == max(r["step"] for r in rows if "eval/pass_rate" in r)  # the last weights are evaluated
    assert latest(run_dir) == run_dir / "checkpoints" / f"step-{last:06d}"
    assert "error_at_2x" in json.loads((run_dir / "fit.json").read_text())


@pytest.mark.slow
def test_ctrl_c_saves_and_exits_cleanly(model_dir: Path, data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    argv = command(model_dir, data, run_dir, "--pipeline.steps", "100000")
    process = subprocess.Popen(
        argv, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        until(lambda: (run_dir / "metrics.jsonl").exists() and len(lines(run_dir)) > 3, process)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, process.stdout.read() if process.stdout else ""
    finally:
        process.kill()
    step = max(r["step"] for r in lines(run_dir) if "learner/loss" in r)
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == [f"step-{step:06d}"]


@pytest.mark.slow
def test_a_killed_launcher_loses_no_step(model_dir: Path, data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    argv = command(model_dir, data, run_dir, "--pipeline.steps", "100000", "--logging.checkpoint_every", "0")
    log = tmp_path / "out.log"
    with log.open("w") as file:
        process = subprocess.Popen(argv, env=environment(tmp_path), stdout=file, stderr=subprocess.STDOUT)
    pids: dict[str, int] = {}
    try:
        until(lambda: (run_dir / "metrics.jsonl").exists() and len(lines(run_dir)) > 3, process)
        step = max(r["step"] for r in lines(run_dir) if "learner/loss" in r)
        pids = json.loads((run_dir / "pids.json").read_text())
        process.kill()
        process.wait()
        deadline = time.monotonic() + 60
        while (left := [p for p in pids.values() if running(p)]) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not left, "they outlive the launcher"
    finally:
        process.kill()
        for pid in filter(running, pids.values()):
            os.kill(pid, signal.SIGKILL)
    (saved,) = (run_dir / "checkpoints").iterdir()
    assert int(saved.name.removeprefix("step-")) >= step


def running(pid: int) -> bool:
    """Whether the process is neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
@pytest.mark.parametrize("role", ["learner", "controller"])
def test_a_killed_role_ends_the_run_with_its_name(
    role: str, model_dir: Path, data: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    argv = command(model_dir, data, run_dir, "--pipeline.steps", "100000")
    process = subprocess.Popen(
        argv, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        until(lambda: (run_dir / "metrics.jsonl").exists() and len(lines(run_dir)) > 2, process)
        pids = json.loads((run_dir / "pids.json").read_text())
        files = [f.resolve() for f in Path(f"/proc/{pids['learner']}/fd").iterdir()]
        (weights,) = {f.parent for f in files if f.parent.name.startswith(PREFIX)}
        os.kill(pids[role], signal.SIGKILL)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1
    assert f"the {role}'s process was killed by signal 9" in err.decode()
    for pid in pids.values():  # nothing is left running
        assert not Path(f"/proc/{pid}").exists()
    assert not weights.exists()  # nor in shared memory


@pytest.mark.slow
def test_a_run_on_two_ranks_and_two_engines_is_resumed_on_one_of_each(
    model_dir: Path, data: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    two = ("--learner.ranks", "2", "--engine.count", "2")
    done = run(command(model_dir, data, run_dir, *two), tmp_path)
    assert done.returncode == 0, done.stderr
    assert {"learner", "learner-1", "engine", "engine-1"} < json.loads(
        (run_dir / "pids.json").read_text()
    ).keys()
    books = json.loads((run_dir / "ledger.json").read_text())
    assert books["roles"].keys() == {"learner", "engine", "engine-1"}
    AutoModelForCausalLM.from_pretrained(run_dir / "checkpoints" / "step-000004")
    one = ("--learner.ranks", "1", "--engine.count", "1", "--pipeline.steps", "6", "--resume")
    done = run(command(model_dir, data, run_dir, *one), tmp_path)
    assert done.returncode == 0, done.stderr
    assert [r["step"] for r in lines(run_dir) if "learner/loss" in r] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.parametrize("role", ["learner", "learner-1"])
def test_a_killed_rank_ends_the_run_with_its_name(
    role: str, model_dir: Path, data: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    argv = command(model_dir, data, run_dir, "--pipeline.steps", "100000", "--learner.ranks", "2")
    process = subprocess.Popen(
        argv, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        until(lambda: (run_dir / "metrics.jsonl").exists() and len(lines(run_dir)) > 2, process)
        pids = json.loads((run_dir / "pids.json").read_text())
        os.kill(pids[role], signal.SIGKILL)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1
    assert f"the {role}'s process was killed by signal 9" in err.decode()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())


@pytest.mark.slow
@pytest.mark.parametrize("engines", [1, 2])
def test_a_killed_engine_is_started_again_and_no_group_is_lost(
    engines: int, model_dir: Path, data: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    argv = command(model_dir, data, run_dir, "--pipeline.steps", "100000", "--engine.count", str(engines))
    log = tmp_path / "out.log"
    with log.open("w") as file:
        process = subprocess.Popen(argv, env=environment(tmp_path), stdout=file, stderr=subprocess.STDOUT)
    try:
        until(lambda: (run_dir / "metrics.jsonl").exists() and len(lines(run_dir)) > 2, process)
        pids = json.loads((run_dir / "pids.json").read_text())
        os.kill(pids["engine"], signal.SIGKILL)
        until(lambda: "engine is back, with the weights of version" in log.read_text(), process)
        step = lines(run_dir)[-1]["step"]
        until(lambda: lines(run_dir)[-1]["step"] > step + 10, process)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
    assert "engine's process was killed by signal 9" in log.read_text()
    rows = list(records(run_dir / "journal"))
    batches = [(r["first"], r["last"]) for r in rows if "trained" in r]
    assert [first for first, _ in batches] == [0, *(last + 1 for _, last in batches[:-1])]
    assert max(int(k) for r in lines(run_dir) for k in r.get("lag/histogram", {})) <= 1


def test_bad_data_is_one_line_with_its_line_number(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(supervisor.ENGINES, "torch", "fake_roles:engine")  # the controller reads the data
    monkeypatch.setattr(supervisor, "LEARNER", "fake_roles:learner")
    environment(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"question": "1+1=", "answer": "2"}\n{"question": \n')
    capsys.readouterr()
    code = main(command(model_dir, bad, tmp_path / "run")[3:])
    err = capsys.readouterr().err
    assert code == 2
    assert err.startswith("error: ") and err.count("\n") == 1
    assert "bad.jsonl:2" in err


def until(holds: Any, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 90
    while not holds():
        assert process.poll() is None, "the run ended early"
        assert time.monotonic() < deadline, "the run did not get going"
        time.sleep(0.2)
