"""Experiment trackers beside the run's own files: Weights & Biases and Trackio, where logging.* asks."""

import contextlib
import io
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.config import Config

PROJECT = "sigmoid-rl"


@dataclass(frozen=True, slots=True)
class Tracker:
    """A run of a tracker, which gets each line of metrics.jsonl, forecasts included, as numbers by name."""

    log: Callable[[Mapping[str, Any]], object]
    sample: Callable[[Mapping[str, Any]], object]  # a group: step, prompt, answer, completions
    finish: Callable[[], object]


def trackers(run_dir: Path, config: Config, resumed: bool) -> list[Tracker]:
    """Those that are turned on; a resumed run goes on in the tracker's, which may have steps twice."""
    chosen = []
    if config.logging.wandb:
        chosen.append(_wandb(run_dir, config, resumed))
    if config.logging.trackio:
        chosen.append(_trackio(run_dir, config, resumed))
    return chosen


def _wandb(run_dir: Path, config: Config, resumed: bool) -> Tracker:
    """A run whose id is in the folder's file wandb_id; without W&B's server, each start has its own files."""
    import wandb  # type: ignore[import-not-found, unused-ignore]  # optional

    file, again = run_dir / "wandb_id", "allow" if resumed else None  # others warn, offline, before 0.31
    if not (resumed and file.is_file()):
        file.write_text(secrets.token_hex(4))
    run = wandb.init(
        project=PROJECT, name=run_dir.name, dir=str(run_dir), config=asdict(config), id=file.read_text(),
        resume=again,
    )  # fmt: skip
    # An evaluation of version v is reported after step v + 1, but W&B drops lines whose own step goes back.
    run.define_metric("*", step_metric="step")
    return Tracker(run.log, lambda sample: None, run.finish)


def _trackio(run_dir: Path, config: Config, resumed: bool) -> Tracker:
    """A run in the database of the machine, or in the Space that TRACKIO_SPACE_ID names."""
    import trackio  # type: ignore[import-not-found, unused-ignore]  # optional

    def log(scalars: Mapping[str, Any]) -> None:
        step = int(scalars["step"])
        run.log({key: value for key, value in scalars.items() if key not in ("step", "time")}, step=step)

    def sample(group: Mapping[str, Any]) -> None:
        columns = ["prompt", "answer", "completion", "reward", "outcome"]
        asked = [group["prompt"], group["answer"]]
        rows = [[*asked, c["text"], c["reward"], c["outcome"]] for c in group["completions"]]
        run.log({"samples": trackio.Table(columns=columns, data=rows)}, step=int(group["step"]))

    def finish() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            trackio.finish()

    again = "allow" if resumed else "never"
    with contextlib.redirect_stdout(io.StringIO()):  # the terminal is the run's view
        run = trackio.init(PROJECT, run_dir.name, config=asdict(config), resume=again, embed=False)
    return Tracker(log, sample, finish)
