"""The beginning of a run: fresh, resumed from its checkpoint, branched from another run, or a replay of one.

--branch-from RUN@STEP makes a run folder as if the run in it had stopped at that step of RUN: with the
checkpoint (as links to its files), the lines of metrics.jsonl up to STEP, and a config.yaml with the new
settings; then it is resumed. So its steps and its compute go on from those of RUN at STEP, its curve begins
with RUN's points, and RUN itself is only read.
"""

import json
import os
import shutil
import sys
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from trainer.cli import Launch, to_yaml
from trainer.config import Config, ConfigError
from trainer.controller.recorded import Recorded
from trainer.jsonl import read_lines, write_atomic
from trainer.run_folder import HELD_OUT, SET_KEYS, checkpoint_at, checkpoints, damage, origin, record_origin


@dataclass(frozen=True, slots=True)
class Beginning:
    """The beginning as `train` needs it."""

    resume: dict[str, Any] | None = None  # the controller's state in a checkpoint, and that one's 'path'
    recorded: Recorded | None = None  # what is replayed
    notes: tuple[str, ...] = ()  # for people

    @property
    def start(self) -> dict[str, Any] | None:
        """The checkpoint at 'path' whose weights come first; None: those of `model.path`."""
        replayed = self.recorded and self.recorded.start
        return {"path": str(replayed)} if replayed else self.resume


def source_of(launch: Launch) -> Path | Recorded | None:
    """The checkpoint from which a run branches, or the steps that it replays; None if it has no other run."""
    if launch.replay:
        return Recorded(Path(launch.replay))
    return _branch_point(launch.branch) if launch.branch else None


def begin(launch: Launch, source: Path | Recorded | None, unit: str) -> Beginning:
    """Prepare the claimed run folder, whose compute is in `unit`."""
    config, resume = launch.config, None
    write_atomic(Path(config.run_dir, SET_KEYS), json.dumps(sorted(chain(*launch.origins.values()))))
    if isinstance(source, Recorded):
        _record_replay(launch, source)
    elif source is not None:
        _branch(config, source, unit)
    if launch.resume or isinstance(source, Path):
        resume = checkpoint_state(config, set_aside=True)
    over = launch.resume and not resume and "this run has no checkpoint yet: it starts from its beginning"
    on = launch.resume and resume and f"resuming from step {resume['version']}"
    notes = tuple(filter(None, (origin(config.run_dir).get("text"), over or on)))
    return Beginning(resume, source if isinstance(source, Recorded) else None, notes)


def starting_checkpoint(launch: Launch) -> str | None:
    """The checkpoint whose weights come first, for a rank on another machine, which writes nothing."""
    if launch.resume:
        state = checkpoint_state(launch.config, set_aside=False)
        return str(state["path"]) if state else None
    source = source_of(launch)
    path = source.start if isinstance(source, Recorded) else source
    return str(path) if path else None


def checkpoint_state(config: Config, set_aside: bool) -> dict[str, Any] | None:
    """The controller's state in the newest checkpoint that is whole, with the checkpoint's 'path'; None for a
    run without any.

    `set_aside`: damaged ones are renamed, so that they count as checkpoints no longer."""
    paths = checkpoints(config.run_dir)
    for path in reversed(paths):
        if why := damage(path):
            print(f"note: {path} is damaged ({why}), so the checkpoint before it is used", file=sys.stderr)
            if set_aside:
                aside = path.with_name(f"damaged-{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
            continue
        return json.loads((path / "controller.json").read_text()) | {"path": str(path)}
    if not paths and not list(Path(config.run_dir).glob("checkpoints/damaged-*")):
        return None
    raise ConfigError(
        f"--resume: {config.run_dir} holds no checkpoint that is whole; start a new run elsewhere"
    )


def _branch_point(branch: str) -> Path:
    """The checkpoint that RUN@STEP means."""
    run, _, step = branch.rpartition("@")
    path = checkpoint_at(run, int(step), "--branch-from")
    if why := damage(path):
        raise ConfigError(f"--branch-from: {path} is damaged ({why}); give another step")
    if origin(run).get("replay"):
        raise ConfigError(f"--branch-from: {run} is a replay, without engines; give the run that it replays")
    return path


def _branch(config: Config, checkpoint: Path, unit: str) -> None:
    """Fill the empty folder of the new run; the checkpoint comes last, since with it the folder is in use."""
    folder, run = Path(config.run_dir), checkpoint.parents[1]
    step = int(checkpoint.name.removeprefix("step-"))
    parent_unit = json.loads((run / "ledger.json").read_text())["unit"]
    if parent_unit != unit:
        units = f"the compute of {run} is in {parent_unit}, this run's in {unit}"
        raise ConfigError(f"--branch-from: {units}; expected the same kind of device: the curve goes on")
    rows = [row for row in read_lines(run / "metrics.jsonl") if row["step"] <= step]
    compute = max((row["compute/total"] for row in rows), default=0.0)
    write_atomic(folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    if (run / HELD_OUT).is_file():  # readers ignore steps that metrics.jsonl lacks
        shutil.copy(run / HELD_OUT, folder)
    (folder / "ledger.json").unlink(missing_ok=True)  # of a start that failed
    text = f"branched from {run}@{step}, at {compute:.4g} {unit}; what is before is that run's"
    record_origin(folder, {"run": str(run), "step": step, "compute": compute, "text": text})
    write_atomic(folder / "config.yaml", to_yaml(config))
    copy = folder / "checkpoints" / f".{checkpoint.name}.part"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(checkpoint, copy, copy_function=_link)
    copy.rename(copy.with_name(checkpoint.name))


def _link(source: str, target: str) -> None:
    """A second name of the file, whose content never changes; on another file system a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _record_replay(launch: Launch, recorded: Recorded) -> None:
    """Say in the new run's folder what is replayed, and from where."""
    after = f" after step {recorded.first}: its journal holds no step before" if recorded.first else ""
    text = f"replay of {launch.replay}{after}, up to step {recorded.last}"
    if launch.changed:
        keys = ", ".join(launch.changed)
        text += f"; off-policy: its samples are not those of a policy with another {keys}"
    where = {"replay": launch.replay, "step": recorded.first, "changed": launch.changed, "text": text}
    record_origin(Path(launch.config.run_dir), where)
