"""Trains a language model by reinforcement learning (ScaleRL), keeps a ledger of the
compute, and fits the curve that says how high the run will end.

  python -m trainer.main                          the ten-minute demo on a laptop
  python -m trainer.main --recipe tiny            a 0.16 M model from scratch: a full sigmoid
  python -m trainer.main --recipe grpo --task arithmetic    another recipe on the demo's work
  python -m trainer.main --task my_task.yaml      ScaleRL on a task of your own
  python -m trainer.main --model.path ./my-llm --data.source train.jsonl

A recipe says how to train: objective, off-policy scheme, filters, optimizer. A task says on
what: model, data, verifier, lengths, sizes, evaluation. A key has the value of the last that
sets it of: the defaults below, the recipe's `base:`, the recipe, the task (--task, or the one
that the recipe names), the command line. A task may have a `base:`, too. A file of your own
comes after the files that ship with the trainer; but for `data`, which the task's replaces.

Without --recipe the demo runs; with --task, scalerl; with --data.source (data of your own) and
neither, recipe `own`: ScaleRL with the sizes of a first run.
"""

# The text above heads `--help`. From a recipe file and command-line overrides to a checked Config: neither
# tyro 1.0 nor pydantic-settings 2.16 takes YAML values in flags, reports an error in one line, or suggests
# `learner.lr` for `--lr`. Adapting either takes as much code as is here.

import argparse
import dataclasses
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn

import yaml

from kernels.objectives import OBJECTIVES
from trainer.config import Config, ConfigError, VerifierConfig
from trainer.config.layers import DATA_KEYS, RECIPE_KEYS, Layer, nested, read_layers, shipped, with_sets
from trainer.config.objective import check_objective
from trainer.config.secrets import check_secrets
from trainer.config.typed import build, fields, from_text, suggest, type_name
from trainer.run_folder import set_keys
from trainer.verifiers.verifier import check_verifiers, kinds_help

DEFAULT_RECIPE, DEFAULT_TASK_RECIPE, OWN_RECIPE = "demo", "scalerl", "own"
NAME, NAME_CHARACTERS = r"[\w.-]+", "of letters, digits, '_', '-' and '.'"  # of tasks and held-out sets
TASK_KEYS = ("data.", "verifier.kind", "engine.stop", "engine.max_new_tokens")  # what fits one task only

LEARNING_KEYS = (  # these decide what is learned
    "learner.", "objective.", "model.", "engine.temperature", "pipeline.scheme", "pipeline.epochs",
)  # fmt: skip
MACHINE_KEYS = (  # but for these, of the learner's devices
    "learner.threads", "learner.ranks", "learner.micro_batch_tokens", "learner.vocab_parallel",
    "learner.checkpoint_activations",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """The run that the command line asked for."""

    config: Config
    resume: bool = False
    dry_run: bool = False
    notices: tuple[str, ...] = ()  # on settings of another task than the data's; more: launcher/notices.py
    origins: dict[str, list[str]] = dataclasses.field(default_factory=dict)  # keys by where they were set
    recommended: dict[str, tuple[str, Any, Any]] = dataclasses.field(default_factory=dict)
    """Source, least and greatest value of each recommendation, by key."""
    branch: str = ""  # RUN@STEP, whose state the run begins with
    replay: str = ""  # RUN, whose journal is trained on
    changed: tuple[str, ...] = ()  # keys with which a replay learns otherwise than RUN


def parse(argv: Sequence[str]) -> Launch:
    """The Launch of a command line; ConfigError on anything unknown or of the wrong type."""
    flags = {key: raw for key, raw in vars(_parser().parse_args(argv)).items() if raw is not None}
    resume, dry_run, recipe, task, branch, replay = (
        flags.pop(name, "") for name in ("resume", "dry_run", "recipe", "task", "branch_from", "replay")
    )
    if (branch or replay) and (resume or (replay and (branch or recipe or task))):
        raise ConfigError("expected one of --resume, --branch-from and --replay; --replay takes no recipe")
    source = _source(branch, replay, "run_dir" in flags) if branch or replay else ""
    if not (recipe or task):
        recipe = source or (OWN_RECIPE if {"data.source", "mixture"} & flags.keys() else DEFAULT_RECIPE)
    recipe = recipe or (DEFAULT_TASK_RECIPE if task else "")
    overrides = {key: from_text(fields()[key][0], raw) for key, raw in flags.items()}
    launch = resolve(recipe, task, overrides)
    config = launch.config
    parent = resolve(source, "", {}).config if source else config
    if config.model.path != parent.model.path:
        models = f"model.path is {config.model.path}, that of {branch or replay} is {parent.model.path}"
        raise ConfigError(f"{models}; expected the same: the new run goes on from its weights or samples")
    if not config.run_dir:
        files = (recipe, task) if task or recipe != OWN_RECIPE else ()
        names = [Path(name).stem for name in files if name] or config.mixture
        name = "-".join(names) or short_name(config.data.source)
        config = dataclasses.replace(config, run_dir=f"runs/{name}-{config.seed}")
    stored = Path(config.run_dir, "config.yaml")
    if resume and stored.is_file():  # a run goes on as it began, whatever the recipe says
        launch = resolve(str(stored), "", overrides)
        config = dataclasses.replace(launch.config, run_dir=config.run_dir)
    check(config)
    learning = [key for key in fields() if key.startswith(LEARNING_KEYS) and not key.startswith(MACHINE_KEYS)]
    start = {"branch": branch, "replay": replay, "changed": differing(learning, config, parent)}
    return dataclasses.replace(launch, config=config, resume=bool(resume), dry_run=bool(dry_run), **start)


def check(config: Config) -> None:
    """ConfigError for values that each are allowed and together are not, and for what is no rule."""
    check_secrets(config)
    check_objective(config.objective)
    _check_tasks(config)
    check_verifiers(config)
    _check_environments(config)
    _check_schedule(config)
    _check_teacher(config)
    _ = config.forecast.rule, config.logging.next_kept


def differing(keys: Iterable[str], config: Config, other: Config) -> tuple[str, ...]:
    """Those of the keys that have different values in the two."""
    return tuple(key for key in keys if attrgetter(key)(config) != attrgetter(key)(other))


def _source(branch: str, replay: str, named: bool) -> str:
    """The config.yaml of the run that a branch, or a replay, begins from."""
    flag = "--branch-from" if branch else "--replay"
    run, _, step = branch.rpartition("@") if branch else (replay, "", "0")
    if not run or not step.isdecimal():
        raise ConfigError(f"--branch-from: expected RUN@STEP, such as runs/demo-0@40; given {branch!r}")
    if not named:
        raise ConfigError(f"{flag} needs a --run-dir, for the folder of the new run")
    if not (path := Path(run, "config.yaml")).is_file():
        raise ConfigError(f"{flag}: {run} holds no run (no config.yaml); give the --run-dir of one")
    return str(path)


def _check_tasks(config: Config) -> None:
    """ConfigError for settings of the single task beside a mixture, and for names that cannot be metrics'."""
    tasks = f"({'|'.join(map(re.escape, config.mixture))})/" if config.mixture else ""
    of_task = f"TASK/NAME with a task of {', '.join(config.mixture)}"
    sources = [name for name, one in config.evaluation.sets.items() if isinstance(one, str)]
    for key, names, pattern, expected in (
        ("mixture", config.mixture, NAME, "a name"),
        ("evaluation.sets", sources if tasks else (), tasks + NAME, of_task),
        ("evaluation.sets", config.evaluation.sets, f"({tasks})?{NAME}", "a name"),
    ):
        if wrong := [name for name in names if not re.fullmatch(pattern, name)]:
            raise ConfigError(f"{key}: {wrong[0]!r}; expected {expected}, {NAME_CHARACTERS}")
    if taken := config.mixture.keys() & config.evaluation.sets:
        raise ConfigError(f"evaluation.sets: {min(taken)!r} is the name of a task; expected another")
    n = max([config.evaluation.samples, *(one.samples for one in config.sets.values())])
    for key in ("pass_at", "maj_at", "best_at"):
        if (most := max(getattr(config.evaluation, key), default=0)) > n:
            raise ConfigError(f"evaluation.{key}: {most}; expected at most evaluation.samples, which is {n}")
    single = [
        key for key in fields() if re.match(r"data\.|environment\.|verifier\.(?!length_penalty\.)", key)
    ]
    if config.mixture and (changed := ", ".join(differing(single, config, Config()))):
        task = f"mixture.{next(iter(config.mixture))}"
        raise ConfigError(f"each task of a mixture has its own: move {changed} to {task} or another task")


def _check_environments(config: Config) -> None:
    """ConfigError for settings without effect beside an environment, and a deadline above the run's."""
    default, problem = VerifierConfig(), ""
    for name, task in config.scored.items():
        verifier = dataclasses.replace(task.verifier, length_penalty=default.length_penalty)
        if not task.environment.kind:
            continue
        where = f"{name}: " if name else ""
        if verifier != default:
            problem = "verifier: with environment.kind the rewards are the environment's: remove one of them"
        elif (seconds := task.environment.turn_s) >= config.pipeline.deadline_s:
            limit = f"pipeline.deadline_s, {config.pipeline.deadline_s:g}"
            problem = f"environment.turn_s is {seconds:g}; expected less than {limit}"
        elif config.evaluation.maj_at and not config.mixture:
            problem = "evaluation.maj_at: episodes have no answers to compare; expected none"
        if problem:
            raise ConfigError(where + problem)


def _check_teacher(config: Config) -> None:
    """ConfigError for a teacher behind a URL where the policy samples at another temperature than 1, the
    server's, for a deadline above the run's, and for a top-k of a split head."""
    kl, problem, most = config.objective.kl, "", config.pipeline.deadline_s
    if kl.top_k and config.learner.vocab_parallel:
        problem = "objective.kl.top_k needs whole rows of the head; expected learner.vocab_parallel false"
    if kl.by_url and config.engine.temperature != 1:
        problem = f"engine.temperature is {config.engine.temperature:g}, and the log-probs of a server, "
        problem += f"objective.kl.to {kl.to}, are at 1; expected 1, or a teacher by folder"
    elif kl.by_url and kl.deadline_s >= most:
        problem = f"objective.kl.deadline_s is {kl.deadline_s:g}; expected less than pipeline.deadline_s "
        problem += f"{most:g}, which would end the run without naming the teacher"
    if problem:
        raise ConfigError(problem)


def _check_schedule(config: Config) -> None:
    """ConfigError for a budget without numbers, and for epochs or a curriculum that would have no effect."""
    budget, epochs, curriculum = config.engine.interruption, config.pipeline.epochs, config.curriculum
    grows, problem = curriculum.kind != "none", ""
    if budget.lo > budget.hi:
        problem = f"engine.interruption: expected lo <= hi, given lo {budget.lo}, hi {budget.hi}"
    elif config.objective.supervised and config.pipeline.no_positive_resampling:
        problem = "objective.loss sft has no pass rates: expected pipeline.no_positive_resampling false"
    elif epochs > 1 and not config.pipeline.off_policy:
        problem = f"pipeline.epochs is {epochs}; expected 1, or pipeline.scheme ppo_off_policy"
    elif grows and not curriculum.by and curriculum.length_start == 1:
        problem = (
            f"curriculum.kind is {curriculum.kind}, but nothing grows: set curriculum.by or length_start"
        )
    elif grows and curriculum.length_start < 1 and budget.enabled:
        problem = (
            "curriculum.length_start: completions are as long as engine.interruption's budgets; set it to 1"
        )
    if problem:
        raise ConfigError(problem)


def resolve(recipe: str, task: str, overrides: Mapping[str, Any]) -> Launch:
    """The defaults, under the recipe's chain, under its task's, under the command line's values."""
    layers = read_layers("recipe", recipe) if recipe else []
    defaults = [(layer.task, layer.path.parent) for layer in layers if layer.task]
    notices: list[str] = []
    if task or defaults:
        tasks = read_layers("task", task) if task else read_layers("task", *defaults[-1])
        notices = [line for layer in layers if layer.is_own for line in _replaced(layer, tasks)]
        for layer in layers:
            for key in [key for key in layer.values if key.startswith(DATA_KEYS)]:
                del layer.values[key]
        layers += tasks
    owner, values, origin = layers[-1].name if layers else "", dict[str, Any](), dict[str, str]()
    for layer in sorted(layers, key=attrgetter("is_own")):
        values |= layer.values
        origin |= dict.fromkeys(set_keys(layer.path, layer.values), layer.name)
    base: Config = build(nested(values), Config, owner)
    config = with_sets(build(nested({**values, **overrides}), Config, "command line"))
    origins: dict[str, list[str]] = {}
    for key, name in (origin | dict.fromkeys(overrides, "the command line")).items():
        origins.setdefault(name, []).append(key)
    recommended = {
        key: (layer.name, *pair)
        for layer in layers
        for key, pair in layer.recommended.items()
        # What a task recommends of a recipe's own keys, such as epochs, is for recipes that use them.
        if not (key.startswith(RECIPE_KEYS) and layer.is_task) or differing([key], config, Config())
    }
    source = base.data.source
    changed = [key for key in differing(fields(), base, Config()) if key.startswith(TASK_KEYS)]
    names = ", ".join(key for key in changed if key not in overrides)
    if names and source not in ("", config.data.source):
        notices.append(
            f"--data.source {config.data.source} replaces the data that {owner} was made for ({source}), but "
            f"its {names} still apply; set them, or give another --task"
        )
    return Launch(config, notices=tuple(notices), origins=origins, recommended=recommended)


def _replaced(recipe: Layer, tasks: Sequence[Layer]) -> Iterator[str]:
    """A line for each task file that sets what a recipe file of the user's sets to another value."""
    for task in tasks:
        winner, loser = (task, recipe) if task.is_own else (recipe, task)
        keys = [
            k for k, v in task.values.items() if not k.startswith(DATA_KEYS) and v != recipe.values.get(k, v)
        ]
        if keys:
            pairs = ", ".join(f"{key} {winner.values[key]} (not {loser.values[key]})" for key in keys)
            yield f"{winner.path.name} comes after {loser.name}: {pairs}"
    if data := ", ".join(key for key in recipe.values if key.startswith(DATA_KEYS)):
        yield f"{recipe.path.name} sets {data}, which {tasks[-1].name} replaces: a task has data of its own"


def short_name(source: str) -> str:
    """A folder name for a data source: gsm8k-train for /data/gsm8k/train.jsonl."""
    words = re.findall(r"[\w.-]+", re.sub(r"\.(jsonl|json|csv|parquet)$", "", source.split(":")[-1]))
    return "-".join(word for word in words[-2:] if word.strip(".")) or "data"


def fail(message: str, code: int) -> int:
    """Print the error that ends a command; returns its exit code. What a server or a model wrote in it cannot
    steer the terminal."""
    text = "".join(c if c.isprintable() or c == "\n" else "·" for c in message)
    print(f"error: {text}", file=sys.stderr)
    return code


class Parser(argparse.ArgumentParser):
    """An argparse parser that guesses no option; errors are one ConfigError line with a suggestion."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False} | options)

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: "):
            flag = message.split()[2].split("=")[0]
            if flag in fields():  # as in verl and Hydra
                raise ConfigError(f"{flag} has no dashes; expected --{flag} VALUE")
            key = flag.lstrip("-").replace("-", "_")
            raise ConfigError(f"unknown option {flag}{suggest(key)}; --help lists them all")
        raise ConfigError(f"{message}; --help explains every option")


FLAGS = {
    "--recipe": ("NAME_OR_FILE", f"recipe to start from: a .yaml file or one of {shipped('recipe')}"),
    "--task": ("NAME_OR_FILE", f"task to train on: a .yaml file or one of {shipped('task')}"),
    "--branch-from": (
        "RUN@STEP",
        "begin a new run with the checkpoint of that step of another run: weights, optimizer, sampler and "
        "random state; steps and compute go on from there. Settings are RUN's, or those of --recipe and "
        "--task, under the command line's",
    ),
    "--replay": (
        "RUN",
        "train again on the samples of another run's journal, without engines: bit for bit the same, or with "
        "other learner settings, for which these samples are off-policy",
    ),
}


@cache
def _parser() -> argparse.ArgumentParser:
    flags = " ".join(f"[{flag} {metavar}]" for flag, (metavar, _) in FLAGS.items())
    parser = Parser(
        prog="python -m trainer.main",
        usage=f"%(prog)s {flags} [--run-dir DIR] [--seed N] [--resume] [--dry-run] [--SECTION.KEY VALUE ...]",
        formatter_class=argparse.RawTextHelpFormatter,
        description=__doc__,
    )
    for flag, (metavar, text) in FLAGS.items():
        parser.add_argument(flag, metavar=metavar, help=textwrap.fill(text, 84))
    parser.add_argument("--resume", action="store_true", help="continue the run in --run-dir")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print config, who set what, devices and memory; start nothing",
    )
    add_keys(parser)
    return parser


def add_keys(parser: argparse.ArgumentParser, hidden: tuple[str, ...] = ()) -> None:
    """An option for every key of the config, by section; values stay as written. `hidden`: without help."""
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for key, (hint, doc) in fields().items():
        section = key.rpartition(".")[0].partition(".")[0]
        if section not in groups:
            groups[section] = parser.add_argument_group(f"{section} (--{section}.KEY VALUE)")
        known = {
            "verifier.kind": {"kinds": kinds_help()},
            "objective.loss": {"losses": ", ".join(OBJECTIVES)},
        }
        doc = doc.format(**known[key]) if key in known else doc
        text = f"{doc} [{type_name(hint)}; default: {attrgetter(key)(Config())!r}]".replace("%", "%%")
        flags_ = dict.fromkeys((f"--{key}", f"--{key.replace('_', '-')}"))
        text = argparse.SUPPRESS if hidden and key.startswith(hidden) else textwrap.fill(text, 84)
        groups[section].add_argument(*flags_, dest=key, metavar="VALUE", help=text)


def to_yaml(config: Config) -> str:
    """The resolved config as a recipe file that reproduces it."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True)
