"""What a run records can be read back, whatever the numbers were."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trainer.config import Config, ConfigError, LoggingConfig
from trainer.jsonl import read_lines
from trainer.launcher.metrics import MetricsWriter

FILES_ONLY = Config(logging=LoggingConfig(tensorboard=False))


def test_every_line_is_valid_json_and_names_what_was_not_finite(tmp_path: Path) -> None:
    """That each line is JSON as the standard has it: test_jsonl.py."""
    writer = MetricsWriter(tmp_path, FILES_ONLY)
    arrays = {"lag/histogram": {0: 12, "1": float("-inf")}, "lengths": np.array([1.0, np.nan])}
    numbers = {"learner/loss": float("nan"), "ratio/max": np.float32("inf"), "entropy": np.float32(0.5)}
    writer.write(numbers | arrays | {"step": np.int64(3)})
    writer.write({"step": 4, "train/reward": 1.0})
    first, second = read_lines(tmp_path / "metrics.jsonl")  # before close: lines are flushed
    writer.close()
    non_finite = ["learner/loss", "ratio/max", "lag/histogram.1", "lengths.1"]
    read = {"learner/loss": None, "ratio/max": None, "lengths": [1.0, None], "non_finite": non_finite}
    assert first == read | {"step": 3, "entropy": 0.5, "lag/histogram": {"0": 12, "1": None}}
    assert second == {"step": 4, "train/reward": 1.0}


def test_samples_keep_any_text(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, FILES_ONLY)
    completions = [{"text": "[red]é\u2028\x1b[2J\x00", "reward": -1.0}]
    sample = {"step": 1, "prompt": 'a\n"b"', "completions": completions}
    writer.write_sample(sample)
    writer.write_sample(sample)
    writer.close()
    writer.close()
    assert list(read_lines(tmp_path / "samples.jsonl")) == [sample, sample]


def test_a_line_torn_by_a_crash_is_cut_off_and_the_rest_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "tra')
    assert list(read_lines(path)) == [{"step": 1}]
    writer = MetricsWriter(tmp_path, FILES_ONLY)
    writer.write({"step": 2})
    writer.close()
    assert list(read_lines(path)) == [{"step": 1}, {"step": 2}]
    path.write_text('{"step": 1}\noops\n{"step": 2}\n')
    with pytest.raises(ConfigError, match="line 2"):
        list(read_lines(path))


def test_tensorboard_holds_the_finite_scalars_by_step(tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    writer = MetricsWriter(tmp_path, Config())
    row = {"step": 7, "time": 1.0, "eval/pass_rate": 0.25, "learner/loss": float("nan"), "lag/histogram": {}}
    writer.write(row)
    writer.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    events = list(loader.LegacyEventFileLoader(str(file)).Load())
    scalars = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]
    assert scalars == [(7, "eval/pass_rate", 0.25)]


def test_wandb_gets_the_scalars_and_their_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    run = SimpleNamespace(log=calls.append, finish=lambda: calls.append("finished"))
    run.define_metric = lambda name, step_metric: calls.append((name, step_metric))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **kw: run, __spec__=object()))
    writer = MetricsWriter(tmp_path, Config(logging=LoggingConfig(tensorboard=False, wandb=True)))
    writer.write({"step": 2, "train/reward": 0.5, "lag/histogram": {"0": 1}})
    writer.close()
    assert calls == [("*", "step"), {"step": 2, "train/reward": 0.5}, "finished"]


def test_a_resumed_run_goes_on_in_its_own_run_of_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[tuple[str, str | None, str]] = []

    def init(*, id: str, resume: str | None, name: str, **settings: Any) -> Any:
        starts.append((id, resume, name))
        return SimpleNamespace(log=print, finish=lambda: None, define_metric=lambda *_, **__: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, __spec__=object()))
    config = Config(logging=LoggingConfig(tensorboard=False, wandb=True))
    for parent in ("a", "b"):  # two runs of one name
        folder = tmp_path / parent / "scalerl-0"
        folder.mkdir(parents=True)
        for _ in range(2):
            MetricsWriter(folder, config).close()
        (folder / "metrics.jsonl").unlink()  # it begins again, from its beginning
        MetricsWriter(folder, config).close()
    first, again, anew, other, *_ = starts
    assert first[0] == again[0] and len({first[0], anew[0], other[0]}) == 3
    assert [start[1] for start in starts] == [None, "allow", None] * 2
    assert {start[2] for start in starts} == {"scalerl-0"}


@pytest.mark.parametrize("resumed", [False, True])
def test_trackio_gets_scalars_forecasts_and_samples_by_step_and_a_resumed_run_its_former_one(
    resumed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []

    def init(project: str, name: str, *, config: Any, resume: str, embed: bool) -> Any:
        print("* Trackio project initialized")
        calls.append((project, name, config["seed"], resume, embed))
        return SimpleNamespace(log=lambda metrics, step: calls.append((step, metrics)))

    def finish() -> None:
        print("* Run finished")
        calls.append("finished")

    module = SimpleNamespace(init=init, finish=finish, __spec__=object())
    module.Table = lambda columns, data: [columns, *data]
    monkeypatch.setitem(sys.modules, "trackio", module)
    if resumed:
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    writer = MetricsWriter(tmp_path, Config(logging=LoggingConfig(tensorboard=False, trackio=True)))
    writer.write({"step": 2, "time": 1.5, "eval/pass_rate": 0.5, "forecast/end": 0.7, "ratio/max": math.inf})
    completions = [
        {"text": text, "reward": reward, "outcome": "correct", "tokens": 4}
        for text, reward in (("140", 1.0), ("1e999", math.inf))
    ]
    writer.write_sample({"step": 3, "prompt": "85 + 55", "answer": "140", "completions": completions})
    writer.close()
    table = [
        ["prompt", "answer", "completion", "reward", "outcome"],
        ["85 + 55", "140", "140", 1.0, "correct"],
        ["85 + 55", "140", "1e999", None, "correct"],
    ]
    assert calls == [
        ("sigmoid-rl", tmp_path.name, 0, "allow" if resumed else "never", False),
        (2, {"eval/pass_rate": 0.5, "forecast/end": 0.7}),
        (3, {"samples": table}),
        "finished",
    ]
    assert not capsys.readouterr().out  # the terminal is the run's view


@pytest.mark.parametrize("package", ["wandb", "tensorboard", "trackio"])
def test_a_missing_package_is_named(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    logging = LoggingConfig(**{"tensorboard": False, package: True})
    with pytest.raises(ConfigError, match=f"pip install {package}"):
        MetricsWriter(tmp_path, Config(logging=logging))
