"""Promises of the supervisor, with roles that need no model: signals, stuck and killed roles, resumes."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_recorder
from fakes import having
from processes import alive

from trainer import run_folder
from trainer.cli import parse, to_yaml
from trainer.config import Config
from trainer.launcher import supervisor
from trainer.launcher.memory_estimate import SIZES
from trainer.launcher.placement import assign
from trainer.launcher.supervisor import RoleDied, Supervisor
from trainer.main import follow, main
from trainer.messages import Event
from trainer.roles import STOPS, stop_signals

ROLES = {"LEARNER": "fake_roles:learner", "CONTROLLER": "fake_roles:controller"}
CONFIG = having(Config(), pipeline={"steps": 10}, logging={"tensorboard": False})
Patch = pytest.MonkeyPatch


def ignore(role: str, message: object) -> None:
    """Takes a role's message."""


def make(run_dir: Path, behaviour: str = "", on_event: Any = ignore, deadline_s: float = 300) -> Supervisor:
    config = having(replace(CONFIG, run_dir=str(run_dir)), pipeline={"deadline_s": deadline_s})
    return Supervisor(config, behaviour, assign(config, (), 2), None, on_event)


@pytest.fixture
def fakes(monkeypatch: Patch) -> None:
    monkeypatch.setitem(supervisor.ENGINES, "torch", "fake_roles:engine")
    for name, role in ROLES.items():
        monkeypatch.setattr(supervisor, name, role)
    monkeypatch.setattr("trainer.launcher.memory_estimate.check_fits", lambda *args: (0, ""))  # no model
    monkeypatch.setattr("trainer.launcher.memory_estimate.size_of", lambda folder: SIZES["tiny"])


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
        "memory_estimate.check_fits = lambda *args: (0, '')\n"
        "memory_estimate.size_of = lambda folder: memory_estimate.SIZES['tiny']\n"
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


@pytest.mark.parametrize("sent", STOPS)
def test_a_signal_to_all_during_start_up_stops_the_run_in_order(sent: int, tmp_path: Path) -> None:
    process = start("waits", tmp_path)
    os.killpg(process.pid, sent)  # the roles are still importing
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0, out
    assert "stopping after this step" in out and "Traceback" not in out
    assert not any(log.read_text() for log in (tmp_path / "logs").iterdir())


def test_under_nohup_the_end_of_the_terminal_stops_nothing() -> None:
    before, interrupt = signal.signal(signal.SIGHUP, signal.SIG_IGN), signal.getsignal(signal.SIGINT)
    try:
        with stop_signals() as came:
            for stop in STOPS:
                signal.raise_signal(stop)
        assert came == [signal.SIGINT, signal.SIGTERM]
        assert signal.getsignal(signal.SIGINT) is interrupt
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    process = start("deaf", tmp_path)
    for _ in range(2):
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=10)
    assert process.returncode == 130 and "error: ended by Ctrl-C; no checkpoint was written yet" in out


def test_nothing_follows_the_error_line_when_killed_roles_leave_semaphores(tmp_path: Path) -> None:
    process = start("leaves semaphores and fails", tmp_path)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 2, out
    assert out.splitlines()[-1] == "error: the data are wrong"


@pytest.mark.parametrize("what", ["still starting", "at work"])
def test_a_killed_launcher_takes_what_is_starting_and_lets_others_finish(what: str, tmp_path: Path) -> None:
    process = start(what, tmp_path)
    pids = json.loads((tmp_path / "pids.json").read_text())
    assert process.stdout is not None
    while "training" not in (line := process.stdout.readline()):
        assert line
    time.sleep(1)
    process.kill()
    process.wait()
    end = time.monotonic() + 20
    while alive(pids.values()):
        assert time.monotonic() < end
        time.sleep(0.1)
    assert (tmp_path / "saved").exists() == (what == "at work")


@pytest.mark.parametrize(
    ("behaviour", "deadline_s", "error"),
    [
        ("stutters", 300, "the controller's process was killed by signal 9"),
        # Without a limit, `recv` would hold the launcher up for ever.
        ("hesitates", 1, "controller has sent a part of a message and nothing more"),
        ("freezes", 1, r"^the controller has given no sign of life for pipeline\.deadline_s = 1 s$"),
        ("learner fails, lives on", 300, r"^learner: the push failed \(traceback in .*failure.txt\)$"),
        # Each role that the controller leaves ends with exit code 0, an engine is not started again for it.
        ("fails once the others have ended", 300, "^controller: the teacher is away"),
        ("fails, and the others end", 300, "^controller: the teacher is away"),
        ("is killed, and the learner ends first", 300, "the controller's process was killed by signal 9"),
        # A thread does not keep it alive: the process ends by itself.
        ("learner fails and ends", 300, "^learner: invalid literal.*the push failed"),
    ],
)
def test_a_role_that_dies_freezes_or_fails_ends_the_run_with_its_name(
    behaviour: str, deadline_s: float, error: str, fakes: None, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(supervisor, "FAILED_GRACE_S", 0.5 if "lives on" in behaviour else 600)
    one, began = make(tmp_path, behaviour, deadline_s=deadline_s), time.monotonic()
    watchdog = threading.Timer(20, lambda: one._roles["controller"][0].kill())
    watchdog.start()
    with pytest.raises(RoleDied, match=error):
        one.run()
    watchdog.cancel()
    assert time.monotonic() - began < 20


def test_roles_that_end_as_they_were_asked_to_are_not_taken_for_dead(fakes: None, tmp_path: Path) -> None:
    one = make(tmp_path, "talks", lambda role, message: time.sleep(0.005))  # `done` comes after much else
    one._ready = True
    one.run()
    assert one._done and not one._deaths


def test_a_record_that_cannot_be_written_is_not_taken_for_a_dead_role(fakes: None, tmp_path: Path) -> None:
    def on_event(role: str, message: object) -> None:
        if isinstance(message, Event):
            raise OSError(28, "No space left on device", "metrics.jsonl")

    with pytest.raises(OSError, match="No space left on device"):
        make(tmp_path, "talks", on_event).run()


@pytest.mark.parametrize("deadline_s", [0.2, float("inf")])
def test_the_controller_has_a_deadline_to_send_to_each_role(tmp_path: Path, deadline_s: float) -> None:
    one = make(tmp_path, deadline_s=deadline_s)
    held: list[int] = []  # the role's end of each pipe, which `_start` would give to a process
    one._start = lambda role, target, args, *more: held.append(os.dup(args[2].fileno()))  # type: ignore[method-assign]  # no process
    for conn in (one._start_engine(0), one._start_learner()):
        if deadline_s < 1:
            with pytest.raises(BlockingIOError):
                conn.send(bytes(10_000_000))  # nobody reads
    assert len(held) == 2
    for end in held:
        os.close(end)


def test_a_rank_of_torchrun_leaves_stops_to_rank_0(tmp_path: Path, monkeypatch: Patch) -> None:
    during: list[object] = []
    monkeypatch.setattr(
        "trainer.learner.process.learner_main",
        lambda *args: during.extend(signal.getsignal(stop) for stop in STOPS),
    )
    monkeypatch.setattr("trainer.models.resolve.resolve_model", lambda path: path)
    monkeypatch.setattr(os, "environ", environment := dict(os.environ))
    before = {stop: signal.getsignal(stop) for stop in STOPS}
    try:
        launch = parse(["--run-dir", str(tmp_path)])
        follow(launch, assign(launch.config, (), 1))
    finally:
        for stop, handler in before.items():
            signal.signal(stop, handler)
    assert during == [signal.SIG_IGN] * len(STOPS)
    assert environment["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"


def test_an_engine_of_a_resume_restarts_without_its_checkpoint(tmp_path: Path, monkeypatch: Patch) -> None:
    old, new = (tmp_path / "checkpoints" / f"step-{step:06d}" for step in (2, 6))
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "controller.json").write_text("{}")
    one, loaded = make(tmp_path, str(old)), list[str]()
    one.start = {"path": str(old)}
    monkeypatch.setattr(one, "_start", lambda role, target, args, gpus: loaded.append(args[1]))
    one._start_engine(0).close()
    shutil.rmtree(old)  # the learner keeps the newest
    one._start_engine(0).close()
    assert loaded == [str(old), str(new)]


@pytest.mark.parametrize("push", ["nccl", "ipc"])
def test_learner_ranks_trace_nccl_and_share_memory(push: Any, tmp_path: Path, monkeypatch: Patch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    config = having(replace(CONFIG, run_dir=str(tmp_path)), engine={"weight_push": push})
    env = supervisor.learner_environment(config)
    assert env["TORCH_NCCL_DUMP_ON_TIMEOUT"] == 1 and env["TORCH_FR_BUFFER_SIZE"] > 0
    assert env["TORCH_FR_DUMP_TEMP_FILE"].parent == tmp_path / "logs"
    assert ("PYTORCH_ALLOC_CONF" in env) == (push == "nccl")  # memory that grows has no IPC handle
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native")
    assert "PYTORCH_ALLOC_CONF" not in supervisor.learner_environment(config)


def test_a_stuck_role_is_killed_leaves_no_weights_and_its_time_is_booked(
    fakes: None, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(supervisor, "GRACE_S", 2.0)
    began = time.monotonic()
    with closing(test_recorder.make(tmp_path, devices=2)) as recorder:
        make(tmp_path, "stuck", recorder.handle).run()
    wall = time.monotonic() - began
    assert wall < 10
    assert not list(tmp_path.glob(f"{run_folder.PREFIX}*"))
    books = json.loads((tmp_path / "ledger.json").read_text())
    for role in ("engine", "learner"):
        one = books["roles"][role]
        assert sum(one["states"].values()) == pytest.approx(wall * one["devices"], rel=0.01)
    assert sum(books["compute"].values()) * 3600 == pytest.approx(wall * books["devices_total"], rel=0.01)


def test_a_start_that_failed_does_not_spoil_its_folder(
    fakes: None, tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--run-dir", str(tmp_path / "run")]
    assert main([*argv, "--model.path", "./nope"]) == 2
    assert main([*argv, "--resume"]) == 2
    monkeypatch.setattr("trainer.models.resolve.resolve_model", lambda path: "")
    assert main(argv) == 0, capsys.readouterr().err


def test_a_resume_needs_the_checkpoint_and_not_the_model_it_began_with(
    fakes: None, tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    test_recorder.make(tmp_path).close()
    (tmp_path / "config.yaml").write_text(to_yaml(having(CONFIG, engine={"max_new_tokens": 100})))
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-000001" / "controller.json").write_text('{"version": 1}')
    monkeypatch.delattr("trainer.models.resolve._download")
    argv = ["--resume", "--run-dir", str(tmp_path), "--model.path", "gone/away"]
    assert main(argv) == 0, capsys.readouterr()


@pytest.mark.parametrize(
    "engine", [{"weight_push": "nccl"}, {"weight_push": "ipc"}, {"colocate": True}, {"weight_push": "file"}]
)
def test_an_engine_bound_to_the_learner_is_not_started_again(
    engine: dict[str, Any], tmp_path: Path, monkeypatch: Patch
) -> None:
    one, started, again = make(tmp_path), list[int](), [1] * (engine == {"weight_push": "file"})
    one.config = having(one.config, engine=engine)
    one._ready = True
    monkeypatch.setattr(one, "_cause_of_death", lambda role: RuntimeError("killed"))
    monkeypatch.setattr(one, "_start_engine", lambda i: (started.append(i), multiprocessing.Pipe()[0])[1])
    monkeypatch.setattr(one, "_write_pids", lambda: None)
    one._roles["controller"] = (None, multiprocessing.Pipe()[0])  # type: ignore[assignment]
    try:
        one._respawn("engine-1")
    except RuntimeError as error:
        assert str(error) == "killed" and not again
    assert started == again
    one._roles.clear()
