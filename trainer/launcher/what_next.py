"""The end of a run teaches: what was odd in this run, and the commands that go on from it."""

import textwrap
from pathlib import Path

from trainer.config import Config
from trainer.jsonl import read_lines


def what_next(config: Config, step: int) -> str:
    """Text for people, at the end of a run whose last step is this one."""
    warnings = odd(Path(config.run_dir))
    lines = ["odd in this run" if warnings else "No sign of trouble in this run."]
    for text in warnings:
        lines += textwrap.wrap(text, 100, initial_indent="  ", subsequent_indent="    ")
    lines += ["", "what next"]
    lines += [f"  {why:<24} {command}" for why, command in commands(config, step).items()]
    return "\n".join(lines)


def odd(run_dir: Path) -> list[str]:
    """Each warning of the run once, with its first step and how often it came."""
    steps, texts = dict[str, list[int]](), dict[str, str]()
    for row in read_lines(run_dir / "metrics.jsonl"):
        for name in [name for name in row if name.startswith("warning/")]:
            steps.setdefault(name, []).append(row["step"])
            texts.setdefault(name, row[name])
    times = {name: f" ({len(s)} times)" * (len(s) > 1) for name, s in steps.items()}
    return [f"step {s[0]}: {texts[name]}{times[name]}" for name, s in steps.items()]


def commands(config: Config, step: int) -> dict[str, str]:
    """The commands that go on from the end of a run."""
    run, limit = config.run_dir, config.pipeline.max_compute
    more = f"--pipeline.max_compute {2 * limit:g}" if limit else f"--pipeline.steps {2 * step}"
    on = {"train twice as long": f"python -m trainer.main --resume --run-dir {run} {more}"}
    if config.objective.supervised:
        on = {
            "RL from here": f"python -m trainer.main --branch-from {run}@{step} --recipe scalerl --task ..."
        }
    many = "--evaluation.samples 64 --evaluation.pass_at [1,8,64] --name many"
    return on | {
        "compare with another": f"python -m trainer.scaling compare {run} OTHER_RUN",
        "more answers a question": f"python -m trainer.evaluate {run}@{step} {many}",
        "ask the model": f"python -m trainer.serve {run}",
    }
