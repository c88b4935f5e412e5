"""The end of a run teaches: what was odd in this run, and the commands that go on from it."""

import shlex
import textwrap
from pathlib import Path

from trainer.config import Config
from trainer.jsonl import read_lines
from trainer.run_folder import checkpoints, ended_by


def what_next(config: Config) -> str:
    """Text for people, at the end of a run."""
    warnings = odd(Path(config.run_dir))
    lines = ["odd in this run" if warnings else "No sign of trouble in this run."]
    for text in warnings:
        lines += textwrap.wrap(text, 100, initial_indent="  ", subsequent_indent="    ")
    lines += ["", "what next"]
    lines += [f"  {why:<24} {command}" for why, command in commands(config).items()]
    return "\n".join(lines)


def odd(run_dir: Path) -> list[str]:
    """Each warning of the run once, with its first step and how often it came."""
    steps, texts = dict[str, list[int]](), dict[str, str]()
    metrics = run_dir / "metrics.jsonl"
    for row in read_lines(metrics) if metrics.is_file() else ():
        for name in [name for name in row if name.startswith("warning/")]:
            steps.setdefault(name, []).append(row["step"])
            texts.setdefault(name, row[name])
    times = {name: f" ({len(s)} times)" * (len(s) > 1) for name, s in steps.items()}
    return [f"step {s[0]}: {texts[name]}{times[name]}" for name, s in steps.items()]


def commands(config: Config) -> dict[str, str]:
    """Commands by what one may want to do with the run."""
    run, saved = shlex.quote(config.run_dir), checkpoints(config.run_dir)
    on = {name: f"python -m trainer.main {flags}" for name, flags in _go_on(config, run).items()}
    if saved:
        weights = f"{run}@{int(saved[-1].name.removeprefix('step-'))}"
        if config.objective.supervised:
            task = f"--recipe scalerl --task TASK --model.path {shlex.quote(config.model.path)}"
            on = {"RL from here": f"python -m trainer.main --branch-from {weights} {task}"}
        many = "--evaluation.samples 64 --evaluation.pass_at '[1,8,64]' --name many"
        on["more answers a question"] = f"python -m trainer.evaluate {weights} {many}"
        on["ask the model"] = f"python -m trainer.serve {run}"
    return on | {"compare with another": f"python -m trainer.scaling compare {run} OTHER_RUN"}


def _go_on(config: Config, run: str) -> dict[str, str]:
    """The flags that go on with a run that was stopped, or double the limit that ended it."""
    resume, pipeline = f"--resume --run-dir {run}", config.pipeline
    match ended_by(Path(config.run_dir)):
        case "":
            return {"go on": resume}
        case "compute":
            return {"train twice as long": f"{resume} --pipeline.max_compute {2 * pipeline.max_compute:g}"}
        case "steps" if not pipeline.epochs_of_data:
            return {"train twice as long": f"{resume} --pipeline.steps {2 * pipeline.steps}"}
    return {}
