"""The evaluation that a command line asks for: which checkpoints, on which prompts, with which settings.

A run is asked its own question again: its config holds, with its lengths, interruption, temperature and stop
texts, since they are part of the question. `--task` replaces data, verifier and `evaluation` by the task's. A
model that is no run's is asked what `python -m trainer.main` with the same flags would ask it before step 1.
"""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from trainer import cli
from trainer.config import Config, ConfigError
from trainer.config.layers import flat, nested, with_sets
from trainer.config.typed import build, fields, from_text
from trainer.jsonl import read_lines
from trainer.models.resolve import resolve_model
from trainer.run_folder import EVALUATIONS, RESULTS, checkpoint_at, checkpoints, damage

OPTIMIZER = "state/"  # in a checkpoint: no engine reads it, and it is most of the bytes
OF_A_TASK = ("data", "verifier", "mixture", "evaluation")
OF_THE_RUN = "engine.max_new_tokens", "engine.temperature", "engine.stop", "engine.interruption."
ASKED = ("seed", "model.", "engine.kind", *OF_A_TASK, *OF_THE_RUN)  # keys that decide the scores


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Weights to score."""

    step: int
    folder: str  # of a model
    compute: float | None = None  # of its run until then, in the ledger's unit; None: it is no run's


@dataclass(frozen=True, slots=True)
class Question:
    """One evaluation. `config.run_dir` is the folder of its results."""

    config: Config
    name: str
    checkpoints: tuple[Checkpoint, ...]
    run: Path | None = None  # whose checkpoints these are
    unit: str = ""  # of its compute
    notices: tuple[str, ...] = ()
    slots_are_set: bool = True  # engine.slots, by a file or the command line


def question_of(what: str, flags: Mapping[str, str]) -> Question:
    """The question about `what`, with the command line's flags, whose values are text."""
    task, source = flags.get("task", ""), flags.get("data.source", "")
    data = Path(task).stem or (source and cli.short_name(source))
    name = flags.get("name") or data or "held_out"
    if not re.fullmatch(cli.NAME, name):
        raise ConfigError(f"--name {name!r}: expected a name, {cli.NAME_CHARACTERS}")
    if flags.keys() & {"run_dir", "model.path"}:
        raise ConfigError("expected --out FOLDER and WHAT as the model, not --run-dir and --model.path")
    run, step = run_of(what)
    question = _of_a_run(run, step, name, flags) if run else _of_a_model(what, name, flags)
    config = replace(question.config, run_dir=flags.get("out") or question.config.run_dir)
    cli.check(config)
    return replace(question, config=config)


def run_of(what: str) -> tuple[Path | None, int | None]:
    """The run that is meant, and the step (None: all); no run if `what` is a model."""
    path, (run, _, step) = Path(what), what.rpartition("@")
    if run and step.isdecimal() and Path(run, "config.yaml").is_file():
        return Path(run), int(step)
    inside = re.fullmatch(r"step-(\d+)", path.resolve().name)
    if inside and Path(owner := path.resolve().parents[1], "config.yaml").is_file():
        return owner, int(inside[1])
    if (path / "config.yaml").is_file():
        return path, None
    if run and step.isdecimal():
        raise ConfigError(f"{what}: {run} holds no run (no config.yaml); expected RUN@STEP, a run or a model")
    return None, None


def _of_a_model(what: str, name: str, flags: Mapping[str, str]) -> Question:
    """The question that `trainer.main` would ask this model with these flags."""
    if not flags.keys() & {"recipe", "task", "data.source", "mixture"}:
        raise ConfigError(f"{what} holds no run, so it must be a model: ask it by --task or --data.source")
    chosen = {"model.path": what, **{key: x for key, x in flags.items() if key not in ("name", "out")}}
    launch = cli.parse([f"--{key}={raw}" for key, raw in chosen.items()])
    config = replace(launch.config, run_dir=f"runs/evaluate/{Path(what).name}-{name}")
    slots_are_set = any("engine.slots" in keys for keys in launch.origins.values())
    checkpoint = Checkpoint(0, resolve_model(what))
    return Question(config, name, (checkpoint,), notices=launch.notices, slots_are_set=slots_are_set)


def _of_a_run(run: Path, step: int | None, name: str, flags: Mapping[str, str]) -> Question:
    """The run's question, or that of a task, with the run's settings under the command line's."""
    if flags.get("recipe"):
        raise ConfigError("--recipe is for a model that is no run's: a run keeps the settings it has")
    keys = {key: raw for key, raw in flags.items() if key in fields()}
    config, task, notices = _config_of(run), flags.get("task", ""), list[str]()
    _check_name(name, config)
    asked = config
    if task:
        other = cli.resolve("", task, {})
        engine = [key for keys in other.origins.values() for key in keys if key.startswith(OF_THE_RUN)]
        if differ := ", ".join(key for key in cli.differing(engine, config, other.config) if key not in keys):
            notices.append(f"{differ}: as in {run}, not as in --task {task}; give them to ask otherwise")
        asked = replace(config, **{section: getattr(other.config, section) for section in OF_A_TASK})
    overrides = {key: from_text(fields()[key][0], raw) for key, raw in keys.items()}
    if "data.source" in overrides:
        overrides = {"data.held_out_source": ""} | overrides
    values = dict(flat(dataclasses.asdict(asked))) | overrides
    asked = with_sets(build(nested(values), Config, "command line"))
    asked = replace(asked, run_dir=str(run / EVALUATIONS / name))
    data, before = asked.data, config.data
    if data.source == before.source and not data.held_out_source and data.held_out > before.held_out:
        notices.append(f"data.held_out is above the run's {before.held_out}: it may have trained on the rest")
    scored, damaged = _checkpoints(run, step, config.model.path)
    ledger = run / "ledger.json"
    unit = json.loads(ledger.read_text())["unit"] if ledger.is_file() else "device-hours"
    return Question(asked, name, scored, run, unit, (*notices, *damaged))


def _config_of(run: Path) -> Config:
    return cli.resolve(str(run / "config.yaml"), "", {}).config


def _check_name(name: str, config: Config) -> None:
    """ConfigError if the run itself has curves of this name."""
    taken = {*config.mixture, *(part.partition("/")[0] for part in config.evaluation.sets)}
    if name in taken:
        raise ConfigError(f"--name {name}: the run has a curve eval/{name}/… itself; give another name")


def _checkpoints(run: Path, step: int | None, model: str) -> tuple[tuple[Checkpoint, ...], tuple[str, ...]]:
    """The whole checkpoints of a run, or that of one step; its first weights count as step 0. Beside them a
    line for each that is left out."""
    known, notices = {0: 0.0}, list[str]()
    for row in read_lines(run / "metrics.jsonl") if (run / "metrics.jsonl").is_file() else ():
        known[row["step"]] = max(known.get(row["step"], 0.0), row.get("compute/total", 0.0))
    folders = [*_first_weights(model, step, notices)]
    if step is None:
        folders += [(int(path.name.removeprefix("step-")), str(path)) for path in checkpoints(run)]
    elif step:
        folders += [(step, str(checkpoint_at(run, step, "evaluate")))]
    scored = []
    for at, folder in folders:
        why = damage(Path(folder), without=OPTIMIZER)
        problem = f"{folder} is damaged ({why})" if why else ""
        if not problem and at not in known:
            problem = f"{run}/metrics.jsonl has no line of step {at}, hence its compute is not known"
        if problem and step is not None:
            raise ConfigError(f"{problem}; give another step")
        if problem:
            notices.append(f"{problem}; step {at} is left out")
        else:
            scored.append(Checkpoint(at, folder, known[at]))
    if not scored:
        raise ConfigError(f"{run}: there is nothing to evaluate; {'; '.join(notices)}")
    return tuple(scored), tuple(notices)


def _first_weights(model: str, step: int | None, notices: list[str]) -> Iterator[tuple[int, str]]:
    """The model that the run began with, if it is wanted and there."""
    if step:
        return
    try:
        yield 0, resolve_model(model)
    except ConfigError as e:
        if step == 0:
            raise
        notices.append(f"step 0 is left out: {e}")


def check_same(question: Question) -> None:
    """ConfigError if the folder holds the results of another question."""
    folder = Path(question.config.run_dir)
    if (folder / RESULTS).is_file() and (folder / RESULTS).stat().st_size:
        keys = [key for key in fields() if key.startswith(ASKED)]
        if changed := ", ".join(cli.differing(keys, _config_of(folder), question.config)):
            raise ConfigError(f"{folder} holds results with another {changed}; give another --name or --out")
