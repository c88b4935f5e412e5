"""Recipe and task files: how to train, and on what. Either may build on another by `base:`."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from trainer.config import Config, ConfigError, SetConfig
from trainer.config.typed import build, fields, suggest

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
FOLDERS = {"recipe": RECIPES, "task": RECIPES / "tasks"}
TASK_NAME = re.compile(r"[\w-]+|.*\.ya?ml")  # what else names a held-out set is a source
DATA_KEYS = ("data.", "environment.", "mixture")  # a task replaces the recipe's altogether
RECIPE_KEYS = (  # a task must not set these: runs of several recipes on one task differ in them
    "seed", "run_dir", "objective.", "curriculum.kind", "curriculum.start", "model.fp32_head",
    "pipeline.scheme", "pipeline.minibatches", "pipeline.epochs", "pipeline.max_lag", "pipeline.npr_",
    "pipeline.no_positive_resampling", "engine.temperature", "engine.interruption.enabled",
    "learner.schedule", "learner.final_lr_share", "learner.betas", "learner.eps", "learner.weight_decay",
    "learner.grad_clip",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layer:
    """The keys that one recipe or task file sets."""

    name: str  # such as "recipe grpo"
    path: Path
    values: dict[str, Any]  # by full key, such as learner.lr
    task: str  # default task of a recipe, or ""
    recommended: dict[str, list[Any]]  # least and greatest value by full key: a run that leaves them says so

    @property
    def is_own(self) -> bool:
        """True for a file of the user's; False for one that ships with the trainer."""
        return not self.path.is_relative_to(RECIPES)

    @property
    def is_task(self) -> bool:
        return self.name.startswith("task ")


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by full key, as the mapping of sections that a recipe file is."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        target = out
        for section in sections:
            target = target.setdefault(section, {})
        target[name] = value
    return out


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The full keys and values of a mapping of sections that `build` accepts."""
    for key, value in values.items():
        if f"{prefix}{key}" in fields():
            yield f"{prefix}{key}", value
        else:
            yield from flat(value, f"{prefix}{key}.")


def read_layers(
    kind: str, name: str, folder: Path | None = None, above: tuple[Path, ...] = (), key: str = ""
) -> list[Layer]:
    """A recipe or task (`kind`) and what it is based on, base first; ConfigError if one is missing or wrong.

    `name`: one that ships with the trainer, or a file, relative to the folder of the file that names it."""
    where, is_file = f"{key or f'--{kind}'} {name}", name.endswith((".yaml", ".yml"))
    path = (folder or Path()) / name if is_file else FOLDERS[kind] / f"{name}.yaml"
    if not path.is_file():
        problem = f"{path.absolute()} does not exist" if is_file else f"no such {kind}"
        raise ConfigError(f"{where}: {problem}; give a .yaml file or one of: {shipped(kind)}")
    path = path.resolve()
    if path in above:
        circle = " -> ".join(p.stem for p in (*above[above.index(path) :], path))
        raise ConfigError(f"{where}: expected a base that ends, but each is based on the next: {circle}")
    try:
        data = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as e:
        raise ConfigError(f"{where}: not valid YAML: {' '.join(str(e).split())}") from e
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected a mapping of sections, found {type(data).__name__}")
    base, task, recommended = data.pop("base", ""), data.pop("task", ""), data.pop("recommended", {})
    build(data, Config, f"{kind} {name}")
    if unknown := [key for key in recommended if key not in fields()]:
        raise ConfigError(f"{where}: recommended: unknown key {unknown[0]!r}{suggest(unknown[0])}")
    ranges = {k: [build(v, fields()[k][0], where, k) for v in pair] for k, pair in recommended.items()}
    layer = Layer(f"{kind} {path.stem}", path, dict(flat(data)), task, ranges)
    forbidden = RECIPE_KEYS if kind == "task" else DATA_KEYS if task else ()
    if wrong := [key for key in layer.values if key.startswith(forbidden)]:
        owner = "recipe" if kind == "task" else "task"
        raise ConfigError(f"{where} sets {', '.join(wrong)}: that is for the {owner} to set; move it there")
    return [*(read_layers(kind, base, path.parent, (*above, path)) if base else ()), layer]


def read_set(name: str) -> SetConfig:
    """The held-out set that a task file describes, by its data, verifier and evaluation.samples."""
    layers = read_layers("task", name, key="evaluation.sets:")
    values = {key: value for layer in layers for key, value in layer.values.items()}
    if "mixture" in values or not values.get("data.source"):
        problem = "is a mixture" if "mixture" in values else "names no data.source"
        raise ConfigError(f"evaluation.sets: the task {name} {problem}; expected one with data of its own")
    sections = ("data.", "verifier.", "environment.")
    chosen = {key: value for key, value in values.items() if key.startswith(sections)}
    samples = {"samples": values["evaluation.samples"]} if "evaluation.samples" in values else {}
    one: SetConfig = build(nested(chosen | samples), SetConfig, f"task {name}")
    return one


def with_sets(config: Config) -> Config:
    """The config in which held-out sets that name a task are the sets that these describe."""
    sets = {
        name: read_set(one) if isinstance(one, str) and TASK_NAME.fullmatch(one) else one
        for name, one in config.evaluation.sets.items()
    }
    return replace(config, evaluation=replace(config.evaluation, sets=sets))


def shipped(kind: str) -> str:
    """The names of the recipes or tasks that come with the trainer."""
    return ", ".join(sorted(p.stem for p in FOLDERS[kind].glob("*.yaml")))
