"""The end of a run teaches: what was odd in this run, and the commands that go on from it."""

import json
import shlex
import textwrap
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path

from trainer.cli import OWN_RECIPE, differing, resolve
from trainer.config import Config
from trainer.config.layers import shipped
from trainer.config.typed import fields
from trainer.jsonl import read_lines
from trainer.run_folder import checkpoints, end_of

OF_DATA = (  # keys that say what is right, and which weights learn it
    "data.", "verifier.", "environment.", "model.lora.", "engine.stop", "engine.max_new_tokens",
)  # fmt: skip
OF_LENGTH = (  # keys that make two recipes' runs comparable
    "learner.lr", "pipeline.steps", "pipeline.max_compute", "pipeline.prompts_per_step",
    "pipeline.completions_per_prompt", "evaluation.every", "evaluation.samples",
)  # fmt: skip


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
    """Each warning of the run once, with its first step and how often it came; of a run too short for one,
    that it has learned nothing."""
    steps, texts = dict[str, list[int]](), dict[str, str]()
    metrics = run_dir / "metrics.jsonl"
    rows = [*read_lines(metrics)] if metrics.is_file() else []
    for row in rows:
        for name in [name for name in row if name.startswith("warning/")]:
            steps.setdefault(name, []).append(row["step"])
            texts.setdefault(name, row[name])
    times = {name: f" ({len(s)} times)" * (len(s) > 1) for name, s in steps.items()}
    lines = [f"step {s[0]}: {texts[name]}{times[name]}" for name, s in steps.items()]
    trained = [row for row in rows if "train/effective_prompts" in row]
    if trained and not lines and not any(row["train/effective_prompts"] for row in trained):
        unread = sum(row.get("verify/unparsable", 0.0) for row in trained) / len(trained)
        solved = all(row.get("train/all_right") == 1 for row in trained)
        lines.append(
            f"in all {len(trained)} steps every answer is right: the task is solved for this model"
            if solved
            else f"in none of the {len(trained)} steps had a prompt two different rewards, so nothing was "
            f"learned; of {unread:.0%} of the completions the verifier could read no answer. "
            "Read samples.jsonl"
        )
    return lines


def commands(config: Config, best: int | None = None) -> dict[str, str]:
    """Commands by what one may want to do with the run; a slower one if it has fallen since step `best`."""
    run, saved = shlex.quote(config.run_dir), [int(p.name[5:]) for p in checkpoints(config.run_dir)]
    go_on = _go_on(config, run) if best is None else _slower(config, run, [s for s in saved if s <= best])
    if config.objective.supervised and saved:
        rl = f"{_on_its_data(config, 'scalerl')} --run-dir {shlex.quote(config.run_dir + '-rl')}"
        before = [s for s in saved if best is None or s <= best] or saved[:1]
        go_on = {"RL from here": f"--branch-from {run}@{before[-1]} {rl}"}
    on = {name: f"python -m trainer.main {flags}" for name, flags in go_on.items()}
    on["look at its rollouts"] = f"sigmoid-rl view {run}"
    if saved:
        many = "--evaluation.samples 64 --evaluation.pass_at '[1,8,64]' --name many"
        on["more answers a question"] = f"python -m trainer.evaluate {run}@{saved[-1]} {many}"
        on["ask the model"] = f"python -m trainer.serve {run}"
    recipe = "scalerl" if config.objective.loss == "grpo" else "grpo"
    other = shlex.quote(f"{config.run_dir}-{recipe}")
    on["train another recipe"] = f"python -m trainer.main {_on_its_data(config, recipe)} --run-dir {other}"
    return on | {"compare with it": f"python -m trainer.scaling compare {run} {other}"}


def _on_its_data(config: Config, recipe: str) -> str:
    """The flags that train the run's model by a recipe on its data: the nearest task that ships with these,
    or `own`, and each key in which the run differs from it."""
    tasks = {name: resolve("", name, {}).config for name in shipped("task").split(", ")}
    same = [n for n, t in tasks.items() if not differing(("data.source", "mixture"), t, config)]
    model = f"--model.path {shlex.quote(config.model.path)}"
    if config.mixture and not same:
        return f"--recipe {recipe} --task TASK {model}"
    task = min(same, key=lambda n: len(differing(fields(), tasks[n], config)), default="own")
    if task == "own" and recipe == "scalerl":
        recipe = OWN_RECIPE  # the same without interruption
    flags = [f"--recipe {recipe} --task {task} {model}"]
    prefixes = OF_DATA if config.objective.supervised else OF_DATA + OF_LENGTH
    keys = [key for key in fields() if key.startswith(prefixes)]
    for key in differing(keys, resolve(recipe, task, {}).config, config):
        value = attrgetter(key)(config)
        text = value if isinstance(value, str) else json.dumps(value, default=asdict)
        flags.append(f"--{key} {shlex.quote(text)}")
    return " ".join(flags)


def _slower(config: Config, run: str, saved: list[int]) -> dict[str, str]:
    """The flags that train more slowly from the last checkpoint before the fall, or from the beginning."""
    start = f"--branch-from {run}@{saved[-1]}" if saved else f"--recipe {run}/config.yaml"
    folder = shlex.quote(f"{config.run_dir}-slower")
    return {"train more slowly": f"{start} --learner.lr {config.learner.lr / 3:.2g} --run-dir {folder}"}


def _go_on(config: Config, run: str) -> dict[str, str]:
    """The flags that go on with a run that was stopped, or double the limit that ended it."""
    resume, pipeline = f"--resume --run-dir {run}", config.pipeline
    match end_of(Path(config.run_dir)).get("by", ""):
        case "":
            return {"go on": resume}
        case "compute":
            return {"train twice as long": f"{resume} --pipeline.max_compute {2 * pipeline.max_compute:g}"}
        case "steps" if not pipeline.epochs_of_data:
            return {"train twice as long": f"{resume} --pipeline.steps {2 * pipeline.steps}"}
    return {}
