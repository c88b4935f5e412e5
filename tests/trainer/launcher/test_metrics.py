"""What a run records can be read back, whatever the numbers were."""

from __future__ import annotations

import json
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


def strict(text: str) -> Any:
    """JSON as the standard has it, where NaN is not a word."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_every_line_is_valid_json_and_names_what_was_not_finite(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, FILES_ONLY)
    writer.write(
        {
            "step": np.int64(3),
            "learner/loss": float("nan"),
            "ratio/max": np.float32("inf"),
            "entropy": np.float32(0.5),
            "lag/histogram": {0: 12, "1": float("-inf")},
            "lengths": np.array([1.0, np.nan]),
        }
    )
    writer.write({"step": 4, "train/reward": 1.0})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # before close: lines are flushed
    writer.close()
    first = strict(lines[0])
    assert first["step"] == 3 and first["entropy"] == 0.5
    assert first["learner/loss"] is None and first["ratio/max"] is None
    assert first["lag/histogram"] == {"0": 12, "1": None} and first["lengths"] == [1.0, None]
    assert first["non_finite"] == ["learner/loss", "ratio/max", "lag/histogram.1", "lengths.1"]
    assert strict(lines[1]) == {"step": 4, "train/reward": 1.0}
    assert list(read_lines(tmp_path / "metrics.jsonl")) == [strict(line) for line in lines]


def test_samples_keep_any_text(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, FILES_ONLY)
    sample = {
        "step": 1,
        "prompt": 'a\n"b"',
        "completions": [{"text": "[red]é\u2028\x1b[2J\x00", "reward": -1.0}],
    }
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


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\noops\n{"step": 2}\n')
    with pytest.raises(ConfigError, match="line 2"):
        list(read_lines(path))


def test_tensorboard_holds_the_finite_scalars_by_step(tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    writer = MetricsWriter(tmp_path, Config())
    writer.write(
        {"step": 7, "time": 1.0, "eval/pass_rate": 0.25, "learner/loss": float("nan"), "lag/histogram": {}}
    )
    writer.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    events = list(loader.LegacyEventFileLoader(str(file)).Load())
    assert [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value] == [
        (7, "eval/pass_rate", 0.25)
    ]


def test_wandb_gets_the_scalars_and_their_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    run = SimpleNamespace(
        log=calls.append,
        finish=lambda: calls.append("finished"),
        define_metric=lambda name, step_metric: calls.append((name, step_metric)),
    )
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **kw: run, __spec__=object()))
    writer = MetricsWriter(tmp_path, Config(logging=LoggingConfig(tensorboard=False, wandb=True)))
    writer.write({"step": 2, "train/reward": 0.5, "lag/histogram": {"0": 1}})
    writer.close()
    assert calls == [("*", "step"), {"step": 2, "train/reward": 0.5}, "finished"]


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_a_missing_package_is_a_users_error_before_the_run(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    logging = LoggingConfig(**{"tensorboard": False, package: True})
    with pytest.raises(ConfigError, match=f"pip install {package}"):
        MetricsWriter(tmp_path, Config(logging=logging))
