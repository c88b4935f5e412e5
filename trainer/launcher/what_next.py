"""The end of a run teaches: what was odd in this run, and the commands that go on from it."""

import shlex
import textwrap
from pathlib import Path

from trainer.cli import differing, resolve
from trainer.config import Config
from trainer.config.layers import shipped
from trainer.config.typed import fields
from trainer.jsonl import read_lines
from trainer.run_folder import checkpoints, ended_by


def what_next(config: Config, best: int | None = None) -> str:
    """Text for people, at the end of a run; `best`: the step since which the held-out reward has fallen."""
    fallen = f"the held-out reward has fallen since step {best}: more steps are no help"
    warnings = [fallen] * (best is not None) + odd(Path(config.run_dir))
    lines = ["odd in this run" if warnings else "No sign of trouble in this run."]
    for text in warnings:
        lines += textwrap.wrap(text, 100, initial_indent="  ", subsequent_indent="    ")
    lines += ["", "what next"]
    lines += [f"  {why:<24} {command}" for why, command in commands(config, best).items()]
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


def commands(config: Config, best: int | None = None) -> dict[str, str]:
    """Commands by what one may want to do with the run; a slower one if it has fallen since step `best`."""
    run, saved = shlex.quote(config.run_dir), [int(p.name[5:]) for p in checkpoints(config.run_dir)]
    go_on = _go_on(config, run) if best is None else _slower(config, run, [s for s in saved if s <= best])
    if config.objective.supervised and saved:
        rl = f"--recipe scalerl {_task(config)} --run-dir {shlex.quote(config.run_dir + '-rl')}"
        go_on = {"RL from here": f"--branch-from {run}@{saved[-1]} {rl}"}
    on = {name: f"python -m trainer.main {flags}" for name, flags in go_on.items()}
    on["look at its rollouts"] = f"sigmoid-rl view {run}"
    if saved:
        many = "--evaluation.samples 64 --evaluation.pass_at '[1,8,64]' --name many"
        on["more answers a question"] = f"python -m trainer.evaluate {run}@{saved[-1]} {many}"
        on["ask the model"] = f"python -m trainer.serve {run}"
    recipe = "scalerl" if config.objective.loss == "grpo" else "grpo"
    other = shlex.quote(f"{config.run_dir}-{recipe}")
    on["train another recipe"] = f"python -m trainer.main --recipe {recipe} {_task(config)} --run-dir {other}"
    return on | {"compare with it": f"python -m trainer.scaling compare {run} {other}"}


def _task(config: Config) -> str:
    """The task that ships with the trainer and has the run's data, and the run's model, as flags."""
    tasks = {name: resolve("", name, {}).config for name in shipped("task").split(", ")}
    same = [n for n, t in tasks.items() if not differing(("data.source", "mixture"), t, config)]
    nearest = min(same, key=lambda n: len(differing(fields(), tasks[n], config)), default="TASK")
    return f"--task {nearest} --model.path {shlex.quote(config.model.path)}"


def _slower(config: Config, run: str, saved: list[int]) -> dict[str, str]:
    """The flags that train more slowly from the last checkpoint before the fall, or from the beginning."""
    start = f"--branch-from {run}@{saved[-1]}" if saved else f"--recipe {run}/config.yaml"
    folder = shlex.quote(f"{config.run_dir}-slower")
    return {"train more slowly": f"{start} --learner.lr {config.learner.lr / 3:.2g} --run-dir {folder}"}


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
