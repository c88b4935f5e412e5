"""The endpoint that a command line asks for: which weights, by which engines, under which name."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from trainer import cli
from trainer.config import Config, ConfigError
from trainer.config.typed import fields, from_text
from trainer.evaluate.question import Checkpoint, question_of, run_of
from trainer.evaluate.record import results
from trainer.models.resolve import resolve_model
from trainer.run_folder import EVALUATIONS, RESULTS, checkpoint_at, latest

# The keys that have an effect on a server, or how they begin.
KEYS = (
    "engine.kind", "engine.count", "engine.tensor_parallel", "engine.urls", "engine.memory", "engine.slots",
    "engine.max_new_tokens", "engine.threads", "model.dtype", "model.fp32_head", "data.max_prompt_tokens",
    "data.chat_options", "pipeline.deadline_s", "pipeline.start_deadline_s",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scoring:
    """A shell command that scores each of a run's checkpoints through the server."""

    command: str
    name: str  # of the curve
    checkpoints: tuple[Checkpoint, ...]  # that have no score yet
    folder: Path  # of the results


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of the server, and the weights that it serves."""

    host: str
    port: int  # 0: a free one
    token: str
    name: str = ""  # of the model
    version: int = 0  # of the first weights: a run's step
    run: Path | None = None  # whose newer checkpoints are to be served as they come
    scoring: Scoring | None = None  # the server ends when it is done


@dataclass(frozen=True, slots=True)
class Plan:
    """The engines and the server to be started. `config.run_dir` is the folder of its logs."""

    config: Config
    model: str  # the folder of the first weights
    endpoint: Endpoint
    slots_are_set: bool  # engine.slots, by the run or the command line


def plan(
    what: str, flags: Mapping[str, str], out: str, endpoint: Endpoint, command: str = "", name: str = ""
) -> Plan:
    """The plan for a run, RUN@STEP or a model; ConfigError for a setting without effect. `command` scores the
    run's checkpoints, as the curve `name`."""
    if unused := [key for key in flags if key not in KEYS]:
        raise ConfigError(f"--{unused[0]} has no effect on a server; leave it out")
    overrides = {key: from_text(fields()[key][0], raw) for key, raw in flags.items()}
    run, step = run_of(what)
    if run is None:
        config = cli.resolve("", "", {"model.path": what, **overrides}).config
        model, folder = resolve_model(what), f"runs/serve/{Path(what).name}"
        endpoint = replace(endpoint, name=Path(what).resolve().name if Path(what).is_dir() else what)
    else:
        in_use = {"engine.urls": (), "engine.colocate": False}  # by the run itself
        config = cli.resolve(str(run / "config.yaml"), "", in_use | overrides).config
        checkpoint = checkpoint_at(run, step, "serve") if step else latest(run) if step is None else None
        model, folder = str(checkpoint or resolve_model(config.model.path)), str(run / "serve")
        version = int(checkpoint.name.removeprefix("step-")) if checkpoint else 0
        served = run.resolve().name + f"@{step}" * (step is not None)
        follow = run if step is None else None
        endpoint = replace(endpoint, name=served, version=version, run=follow)
    if bool(command) != bool(name):
        raise ConfigError("expected --score COMMAND and --name NAME together")
    if command:
        scoring = _scoring(what, command, name)
        first = scoring.checkpoints[0]
        model, endpoint = first.folder, replace(endpoint, version=first.step, run=None, scoring=scoring)
    cli.check(config)
    slots_are_set = run is not None or "engine.slots" in overrides
    return Plan(replace(config, run_dir=out or folder), model, endpoint, slots_are_set)


def _scoring(what: str, command: str, name: str) -> Scoring:
    """The checkpoints of a run that lack this score; ConfigError if there are none."""
    question = question_of(what, {"name": name})
    if question.run is None:
        raise ConfigError(f"--score: {what} is a model; expected a run, whose checkpoints become a curve")
    folder = question.run / EVALUATIONS / name
    if (folder / "config.yaml").is_file():
        raise ConfigError(f"--name {name}: {folder} is an evaluation by trainer.evaluate; give another name")
    done = {row["step"] for row in results(folder)}
    if not (remaining := tuple(one for one in question.checkpoints if one.step not in done)):
        raise ConfigError(f"--score: every checkpoint of {what} has its line in {folder / RESULTS}")
    return Scoring(command, name, remaining, folder)
