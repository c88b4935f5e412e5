"""--branch-from RUN@STEP: makes a run folder as if the run in it had stopped at that step of RUN.

It gets the checkpoint (as links to its files), the lines of metrics.jsonl up to STEP, and a config.yaml with
the new settings; then it is resumed. So its steps and its compute go on from those of RUN at STEP, its curve
begins with RUN's points, and RUN itself is only read.
"""

import json
import os
import shutil
from pathlib import Path

from trainer.cli import to_yaml
from trainer.config import Config, ConfigError
from trainer.jsonl import read_lines, write_atomic
from trainer.run_folder import checkpoints, damage, origin, record_origin


def find(branch: str) -> Path:
    """The checkpoint that RUN@STEP means."""
    run, _, step = branch.rpartition("@")
    by_step = {int(path.name.removeprefix("step-")): path for path in checkpoints(run)}
    if (path := by_step.get(int(step))) is None:
        there = f"it has those of {', '.join(map(str, by_step))}" if by_step else "it has none"
        raise ConfigError(f"--branch-from: {run} has no checkpoint of step {step}; {there}")
    if why := damage(path):
        raise ConfigError(f"--branch-from: {path} is damaged ({why}); give another step")
    state = json.loads((path / "controller.json").read_text())
    if "pending" not in state:
        raise ConfigError(
            f"--branch-from: {path} was written by an older version of the trainer, which did not keep there "
            "which prompts were under way; go on with that run and give a later step"
        )
    if origin(run).get("replay"):
        raise ConfigError(f"--branch-from: {run} is a replay, without engines; give the run that it replays")
    return path


def begin(config: Config, checkpoint: Path, unit: str) -> None:
    """Fill the empty folder of the new run; the checkpoint comes last, since with it the folder is in use."""
    folder, run = Path(config.run_dir), checkpoint.parents[1]
    step = int(checkpoint.name.removeprefix("step-"))
    theirs = json.loads((run / "ledger.json").read_text())["unit"]
    if theirs != unit:
        raise ConfigError(
            f"--branch-from: the compute of {run} is in {theirs}, this run's in {unit}; expected the same "
            "kind of device, since the curve goes on"
        )
    rows = [row for row in read_lines(run / "metrics.jsonl") if row["step"] <= step]
    compute = max((row["compute/total"] for row in rows), default=0.0)
    write_atomic(folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
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
