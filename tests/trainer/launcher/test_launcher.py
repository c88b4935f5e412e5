"""Promises of the launcher, with roles that need no model: signals, stuck roles, books, resumes."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from trainer import run_folder
from trainer.cli import parse, to_yaml
from trainer.config import Config, LoggingConfig, PipelineConfig
from trainer.jsonl import read_lines
from trainer.launcher import supervisor as launcher
from trainer.launcher.placement import assign
from trainer.launcher.supervisor import Launcher
from trainer.launcher.terminal import make_view
from trainer.main import follow, main
from trainer.messages import Event, Spans
from trainer.scaling import Sigmoid

ROLES = {"LEARNER": "fake_roles:learner", "CONTROLLER": "fake_roles:controller"}
CONFIG = Config(pipeline=PipelineConfig(steps=10), logging=LoggingConfig(tensorboard=False))


def make(run_dir: Path, behaviour: str = "", resume: dict[str, Any] | None = None) -> Launcher:
    config = replace(CONFIG, run_dir=str(run_dir))
    devices = assign(config, (), len(os.sched_getaffinity(0)))
    return Launcher(config, behaviour, make_view(config, stream=StringIO()), resume, devices)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(launcher.ENGINES, "torch", "fake_roles:engine")
    for name, role in ROLES.items():
        monkeypatch.setattr(launcher, name, role)
    monkeypatch.setattr(
        "trainer.launcher.memory_estimate.check_fits", lambda *args: None
    )  # there is no model


def start(behaviour: str, run_dir: Path) -> subprocess.Popen[str]:
    """The whole program, but for its roles, in a process group of its own."""
    program = (
        "import signal, sys; from trainer import main\n"
        "from trainer.launcher import memory_estimate, supervisor\n"
        "from trainer.models import resolve\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # ignored where the tests run under nohup
        "supervisor.ENGINES['torch'] = 'fake_roles:engine'\n"
        f"supervisor.LEARNER, supervisor.CONTROLLER = {tuple(ROLES.values())}\n"
        f"resolve.resolve_model = lambda path: {behaviour!r}\n"
        "memory_estimate.check_fits = lambda *args: None\n"
        f"code = main.main(['--run-dir', {str(run_dir)!r}])\n"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    paths = os.pathsep.join([str(Path(__file__).parents[2] / "helpers"), os.getcwd()])
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": paths}, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    while not (run_dir / "pids.json").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    return process


@pytest.mark.parametrize("sent", launcher.STOPS)
def test_a_signal_to_all_during_start_up_stops_the_run_in_order(sent: int, tmp_path: Path) -> None:
    process = start("waits", tmp_path)
    os.killpg(process.pid, sent)  # the roles are still importing
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0, out
    assert "stopping after this step" in out and "Traceback" not in out
    assert not any(log.read_text() for log in (tmp_path / "logs").iterdir())


def test_roles_that_end_as_they_were_asked_to_are_not_taken_for_dead(
    fakes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make(tmp_path, "talks")  # its word that all is done comes behind much else, slowly read
    monkeypatch.setattr(one.view, "log", lambda text: time.sleep(0.005))
    one._ready = True
    one.run()
    assert one.done and not one._deaths


def test_a_role_killed_amid_a_message_is_named(fakes: None, tmp_path: Path) -> None:
    with pytest.raises(launcher.RoleDied, match="the controller's process was killed by signal 9"):
        make(tmp_path, "stutters").run()


def test_a_rank_of_torchrun_leaves_stops_to_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    during: list[object] = []
    monkeypatch.setattr(
        "trainer.learner.process.learner_main",
        lambda *args: during.extend(signal.getsignal(stop) for stop in launcher.STOPS),
    )
    monkeypatch.setattr("trainer.models.resolve.resolve_model", lambda path: path)
    before = {stop: signal.getsignal(stop) for stop in launcher.STOPS}
    try:
        launch = parse(["--run-dir", str(tmp_path)])
        follow(launch, assign(launch.config, (), 1))
    finally:
        for stop, handler in before.items():
            signal.signal(stop, handler)
    assert during == [signal.SIG_IGN] * len(launcher.STOPS)


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    process = start("deaf", tmp_path)
    for _ in range(2):
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=10)
    assert process.returncode == 130 and "error: ended by Ctrl-C; no checkpoint was written yet" in out


def test_a_stuck_role_is_killed_leaves_no_weights_and_its_time_is_booked(
    fakes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "GRACE_S", 2.0)
    began = time.monotonic()
    make(tmp_path, "stuck").run()
    wall = time.monotonic() - began
    assert wall < 10
    assert not list(tmp_path.glob(f"{run_folder.PREFIX}*"))
    books = json.loads((tmp_path / "ledger.json").read_text())
    for role in ("engine", "learner"):
        one = books["roles"][role]
        assert sum(one["states"].values()) == pytest.approx(wall * one["devices"], rel=0.01)
    assert sum(books["compute"].values()) * 3600 == pytest.approx(wall * books["devices_total"], rel=0.01)


def test_the_compute_of_an_evaluation_is_that_when_its_weights_were_made(tmp_path: Path) -> None:
    one = make(tmp_path)
    start, (cores, *_) = one.start, one.ledger.devices.values()
    result = {"pass_rate": 0.5, "pass_rate_se": 0.1}
    one._handle(Event("eval", start, {"step": 0} | result))
    one._handle(Event("training_begins", start, {}))
    for role, state in (("engine", "generate"), ("learner", "forward_backward")):
        one._handle(Spans(role, ((state, start, start + 7),)))
    one._handle(Event("step", start + 7, {"step": 1}))
    for i in range(1000):  # a long evaluation of version 1, and a step beside it
        at = start + 7 + i / 100
        one._handle(Spans("engine", (("generate", at, at + 0.005), ("evaluate", at + 0.005, at + 0.01))))
    one._handle(Spans("learner", (("forward_backward", start + 7, start + 17),)))
    one._handle(Event("step", start + 17, {"step": 2}))
    one._handle(Event("eval", start + 18, {"step": 1} | result))
    first, _, _, last = list(read_lines(tmp_path / "metrics.jsonl"))
    assert [p.compute * 3600 for p in one.points] == pytest.approx([0, 14 * cores])
    assert (first["compute/total"], last["compute/total"] * 3600) == pytest.approx((0, 14 * cores))
    assert last["time"] == pytest.approx(7)


@pytest.mark.parametrize(("version", "steps"), [(2, [0, 1, 2, 2]), (0, [])])
def test_a_resume_forgets_what_lies_beyond_its_checkpoint(
    version: int, steps: list[int], tmp_path: Path
) -> None:
    before = make(tmp_path)
    before.close()
    line = {"compute/total": 0.1, "eval/pass_rate": 0.5, "eval/pass_rate_se": 0.1}
    rows = [{"step": 0} | line, {"step": 1}, {"step": 2}, {"step": 3}, {"step": 2} | line, {"step": 3} | line]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    one = make(tmp_path, resume={"version": version, "path": ""})
    assert [row["step"] for row in list(read_lines(tmp_path / "metrics.jsonl"))] == steps
    assert [p.step for p in one.points] == [s for s in steps if s != 1][:-1]
    assert one.view.progress.step == version
    assert one.view.progress.left(time.monotonic()) is None  # not known before this process has made steps


def test_a_start_that_failed_does_not_spoil_its_folder(
    fakes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--run-dir", str(tmp_path / "run")]
    assert main([*argv, "--model.path", "./nope"]) == 2
    assert main([*argv, "--resume"]) == 2
    monkeypatch.setattr("trainer.models.resolve.resolve_model", lambda path: "")
    assert main(argv) == 0, capsys.readouterr().err


def test_a_resume_needs_the_checkpoint_and_not_the_model_it_began_with(
    fakes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path).close()
    (tmp_path / "config.yaml").write_text(to_yaml(CONFIG))
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-000001" / "controller.json").write_text('{"version": 1}')
    monkeypatch.delattr("trainer.models.resolve._download")
    assert main(["--resume", "--run-dir", str(tmp_path), "--model.path", "gone/away"]) == 0, (
        capsys.readouterr()
    )


def test_each_evaluation_comes_with_what_was_foreseen_and_a_forecast_of_the_runs_end(
    tmp_path: Path,
) -> None:
    law = Sigmoid(0.1, 0.9, 2.0, 0.02)
    one = make(tmp_path)
    one._handle(Event("eval", one.start, {"step": 0, "pass_rate": 0.1, "pass_rate_se": 0.01}))
    one._handle(Event("training_begins", one.start, {}))
    for step in range(1, 9):
        at = one.start + 30 * step
        for role in one.ledger.devices:
            one._handle(Spans(role, (("idle", at - 30, at),)))
        one._handle(Event("step", at, {"step": step}))
        rate = float(law.reward(one.ledger.compute(at).total))
        one._handle(Event("eval", at + 1, {"step": step, "pass_rate": rate, "pass_rate_se": 0.01}))
    row = list(read_lines(tmp_path / "metrics.jsonl"))[-1]
    end = float(law.reward(row["compute/total"] / 8 * 10))  # of ten steps
    assert row["forecast/end_low"] <= end <= row["forecast/end_high"]
    assert row["forecast/end"] == pytest.approx(end, abs=0.02)
    assert row["forecast/predicted"] == pytest.approx(rate, abs=0.02) and row["forecast/alarm"] == 0
    assert one.fit is not None and one.fit.points == 8


@pytest.mark.parametrize(
    "engine", [{"weight_push": "nccl"}, {"weight_push": "ipc"}, {"colocate": True}, {"weight_push": "file"}]
)
def test_an_engine_bound_to_the_learner_is_not_started_again(
    engine: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make(tmp_path)
    started: list[int] = []
    config: Config = one.roles_config
    one.roles_config = replace(config, engine=replace(config.engine, **engine))
    one._ready = True
    monkeypatch.setattr(one, "_death", lambda role: RuntimeError("killed"))
    monkeypatch.setattr(one, "_start_engine", lambda i: (started.append(i), multiprocessing.Pipe()[0])[1])
    monkeypatch.setattr(one, "_write_pids", lambda: None)
    one._roles["controller"] = (None, multiprocessing.Pipe()[0])  # type: ignore[assignment]
    if engine == {"weight_push": "file"}:
        one._make_good("engine-1")
        assert started == [1]
    else:
        with pytest.raises(RuntimeError, match="killed"):
            one._make_good("engine-1")
        assert not started
    one._roles.clear()
