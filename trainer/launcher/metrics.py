"""Writes the .jsonl files of a run and TensorBoard events, and tells the trackers that are turned on.

Each line is one object of valid JSON: NaN and infinities become null, and `non_finite` lists their keys.
Names are `train/reward`, `eval/pass_rate`, `compute/total` and so on; every line has `step`.
"""

import importlib.util
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config import Config, ConfigError
from trainer.jsonl import append, nan_to_null, open_to_append
from trainer.launcher.trackers import trackers
from trainer.run_folder import HELD_OUT


class MetricsWriter:
    """Appends to the files of the run folder. Every line is flushed, so a crash loses none."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        for package in ("tensorboard", "wandb", "trackio"):
            if getattr(config.logging, package) and importlib.util.find_spec(package) is None:
                advice = f"`pip install {package}`, or set --logging.{package} false"
                raise ConfigError(f"logging.{package} is on, but {package} is not installed; {advice}")
        self._run_dir = run_dir
        resumed = (run_dir / "metrics.jsonl").exists()  # with the lines up to the checkpoint
        self._metrics = open_to_append(run_dir / "metrics.jsonl")
        self._samples = open_to_append(run_dir / "samples.jsonl")
        self._held_out = open_to_append(run_dir / HELD_OUT)
        self._with_tensorboard = config.logging.tensorboard
        self._events: Any = None  # TensorBoard is imported at the first line, which is after start-up
        self._trackers = trackers(run_dir, config, resumed)

    def write(self, metrics: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl, and its finite numbers to TensorBoard and the trackers."""
        line = _finite(metrics)
        append(self._metrics, line)
        scalars = {k: v for k, v in line.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        if self._with_tensorboard:
            self._write_events(scalars)
        for tracker in self._trackers:
            tracker.log(scalars)

    def write_held_out(self, step: int, by_prompt: Mapping[str, Any]) -> None:
        """A line of held_out.jsonl for each task and set of an evaluation."""
        for name, worth in by_prompt.items():
            append(self._held_out, {"step": step, "set": name, **worth})

    def write_sample(self, sample: Mapping[str, Any]) -> None:
        """One line of samples.jsonl, and for the trackers."""
        append(self._samples, line := _finite(sample))
        for tracker in self._trackers:
            tracker.sample(line)

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        for file in filter(None, (self._metrics, self._samples, self._held_out, self._events)):
            file.close()
        for tracker in self._trackers:
            tracker.finish()

    def _write_events(self, scalars: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._events is None:
            self._events = EventFileWriter(str(self._run_dir / "tensorboard"), flush_secs=5)
        tags = scalars.keys() - {"step", "time"}
        values = [Summary.Value(tag=tag, simple_value=scalars[tag]) for tag in tags]
        step, summary = int(scalars.get("step", 0)), Summary(value=values)
        self._events.add_event(Event(wall_time=time.time(), step=step, summary=summary))


def _finite(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with null for NaN and infinities; `non_finite` lists their keys."""
    replaced: list[str] = []
    line: dict[str, Any] = nan_to_null(record, replaced=replaced)
    return line | {"non_finite": replaced} if replaced else line
