"""From a recipe file and command-line overrides to a checked Config, and the `--help` that explains it."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import yaml

from trainer.config import RECIPES, Config, ConfigError

DEFAULT_RECIPE = "demo"


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """What the command line asked for."""

    config: Config
    resume: bool
    dry_run: bool


def parse(argv: Sequence[str]) -> Launch:
    """The Launch of a command line; ConfigError on anything unknown or of the wrong type."""
    args = _parser().parse_args(argv)
    given = {key: raw for key, raw in vars(args).items() if raw is not None}
    recipe, resume, dry_run = given.pop("recipe", DEFAULT_RECIPE), given.pop("resume"), given.pop("dry_run")
    config = _resolve(recipe, given)
    if not config.run_dir:
        config = dataclasses.replace(config, run_dir=f"runs/{Path(recipe).stem}-{config.seed}")
    stored = Path(config.run_dir, "config.yaml")
    if resume and stored.is_file():  # a run goes on as it began, whatever the recipe says
        config = dataclasses.replace(_resolve(str(stored), given), run_dir=config.run_dir)
    check(config)
    return Launch(config, resume, dry_run)


def _resolve(recipe: str, given: Mapping[str, str]) -> Config:
    """The recipe with what the command line gives over it."""
    values = read_recipe(recipe)
    for key, raw in given.items():
        *sections, name = key.split(".")
        target = values
        for section in sections:
            target = target.setdefault(section, {})
        target[name] = _from_text(raw, dict(_fields(Config))[key])
    config: Config = build(Config, values, f"recipe {recipe}")
    return config


def read_recipe(name: str) -> dict[str, Any]:
    """The mapping in a recipe: a file's path, or the name of one that ships with the trainer."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else RECIPES / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in RECIPES.glob("*.yaml")))
        raise ConfigError(f"--recipe {name}: no such recipe; give a .yaml file or one of: {known}")
    try:
        data = yaml.safe_load(path.read_text())
    except yaml.YAMLError as e:
        raise ConfigError(f"--recipe {name}: not valid YAML: {' '.join(str(e).split())}") from e
    if data is not None and not isinstance(data, dict):
        raise ConfigError(f"--recipe {name}: expected a mapping of sections, found {type(data).__name__}")
    return data or {}


def build(cls: type[Any], values: Mapping[str, Any], where: str, prefix: str = "") -> Any:
    """An instance of the config dataclass `cls` from plain values; every key and type is checked."""
    hints = get_type_hints(cls)
    kwargs: dict[str, Any] = {}
    for key, value in values.items():
        full = f"{prefix}{key}"
        if key not in hints:
            raise ConfigError(f"{where}: unknown key {full!r}{_suggest(full)}; --help lists them all")
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{where}: {full} is a section; expected keys under it, found {value!r}")
            kwargs[key] = build(hint, value, where, f"{full}.")  # type: ignore[arg-type]  # hint is a class
        else:
            kwargs[key] = _coerce(value, hint, f"{where}: {full}")
    return cls(**kwargs)


def _coerce(value: Any, hint: Any, where: str) -> Any:
    """`value` as type `hint`, or a ConfigError that names both."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        if value in args:
            return value
    elif origin is tuple:
        items = [value] if isinstance(value, str) else value
        if isinstance(items, list | tuple) and (args[-1] is ... or len(items) == len(args)):
            return tuple(_coerce(item, args[0], where) for item in items)
    elif origin is dict:
        if isinstance(value, dict):
            return value
    elif hint is float:
        # YAML 1.1 reads 1e-5 (without a point) as text.
        try:
            return float(value) if not isinstance(value, bool) else _fail(where, hint, value)
        except (TypeError, ValueError):
            pass
    elif isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    return _fail(where, hint, value)


def _fail(where: str, hint: Any, value: Any) -> NoReturn:
    raise ConfigError(f"{where}: expected {_type_name(hint)}, given {value!r}")


def _from_text(raw: str, hint: Any) -> Any:
    """A command-line value as YAML would read it; text stays text."""
    if hint is str or get_origin(hint) is Literal:
        return raw
    try:
        return yaml.safe_load(raw)
    except yaml.YAMLError:
        return raw


def _type_name(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " | ".join(map(str, args))
    if origin is tuple:
        return "list of " + (args[0].__name__ if args[-1] is ... else f"{len(args)} {args[0].__name__}")
    return {"dict": "mapping", "bool": "true | false", "str": "text"}.get(
        name := (origin or hint).__name__, name
    )


def _fields(cls: type[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, type) of every leaf of the config."""
    for name, hint in get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from _fields(hint, f"{prefix}{name}.")  # type: ignore[arg-type]  # hint is a class
        else:
            yield f"{prefix}{name}", hint


def _suggest(key: str) -> str:
    keys = [k for k, _ in _fields(Config)]
    by_leaf = [k for k in keys if k.rpartition(".")[2] == key.rpartition(".")[2]]
    close = by_leaf or difflib.get_close_matches(key, keys, n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def field_docs(cls: type[Any]) -> dict[str, str]:
    """The docstring under each field of a dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]  # it is a class
    docs = {}
    for node, after in pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr):
            docs[node.target.id] = ast.literal_eval(after.value)  # type: ignore[union-attr]  # a name
    return docs


class _Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one ConfigError line with a suggestion."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: "):
            flag = message.split()[2].split("=")[0]
            key = flag.lstrip("-").replace("-", "_")
            raise ConfigError(f"unknown option {flag}{_suggest(key)}; --help lists them all")
        raise ConfigError(f"{message}; --help explains every option")


def _parser() -> argparse.ArgumentParser:
    recipes = ", ".join(sorted(p.stem for p in RECIPES.glob("*.yaml")))
    parser = _Parser(
        prog="python -m trainer.main",
        usage="%(prog)s [--recipe NAME_OR_FILE] [--run-dir DIR] [--seed N] [--resume] [--dry-run] "
        "[--SECTION.KEY VALUE ...]",
        allow_abbrev=False,
        formatter_class=argparse.RawTextHelpFormatter,
        description="Trains a language model by reinforcement learning (ScaleRL), keeps a ledger of the\n"
        "compute, and fits the curve that says how high the run will end.\n\n"
        "  python -m trainer.main                          the ten-minute demo on a laptop\n"
        "  python -m trainer.main --recipe tiny            a 0.16 M model from scratch: a full sigmoid\n"
        "  python -m trainer.main --model.path ./my-llm --data.source train.jsonl\n",
    )
    parser.add_argument(
        "--recipe", metavar="NAME_OR_FILE",
        help=f"recipe to start from: a .yaml file or one of {recipes} (default: {DEFAULT_RECIPE})",
    )  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="continue the run in --run-dir")
    parser.add_argument(
        "--dry-run", action="store_true", help="print config, device split and memory estimate; start nothing"
    )
    _add_section(parser, Config, "")
    return parser


def _add_section(parser: argparse._ActionsContainer, cls: type[Any], prefix: str) -> None:
    docs, hints = field_docs(cls), get_type_hints(cls)
    for f in dataclasses.fields(cls):
        hint, key = hints[f.name], f"{prefix}{f.name}"
        if dataclasses.is_dataclass(hint):
            group = parser if prefix else parser.add_argument_group(f"{key} (--{key}.KEY VALUE)")
            _add_section(group, hint, f"{key}.")  # type: ignore[arg-type]  # hint is a class
            continue
        default = f.default if f.default is not dataclasses.MISSING else f.default_factory()  # type: ignore[operator]  # one is set
        text = f"{docs[f.name]} [{_type_name(hint)}; default: {default!r}]".replace("%", "%%")
        flags = dict.fromkeys((f"--{key}", f"--{key.replace('_', '-')}"))
        parser.add_argument(*flags, dest=key, metavar="VALUE", help=textwrap.fill(text, 84))


def check(config: Config) -> None:
    """ConfigError if values contradict each other or their range; types are checked already."""
    rules: list[tuple[bool, str]] = [
        (config.pipeline.steps >= 1, f"pipeline.steps is {config.pipeline.steps}; expected 1 or more"),
        (
            config.pipeline.prompts_per_step >= 1,
            f"pipeline.prompts_per_step is {config.pipeline.prompts_per_step}; expected 1 or more",
        ),
        (
            config.pipeline.completions_per_prompt >= 2,
            f"pipeline.completions_per_prompt is {config.pipeline.completions_per_prompt}; expected 2 or "
            "more, since the advantage is taken against the group's mean",
        ),
        (config.pipeline.max_lag >= 0, f"pipeline.max_lag is {config.pipeline.max_lag}; expected 0 or more"),
        (config.pipeline.deadline_s > 0, "pipeline.deadline_s must be above 0 seconds"),
        (0 < config.pipeline.npr_threshold <= 1, "pipeline.npr_threshold must lie in (0, 1]"),
        (
            config.engine.temperature > 0,
            "engine.temperature must be above 0: RL needs samples, not the argmax",
        ),
        (config.engine.slots >= 1, "engine.slots must be 1 or more"),
        (config.engine.max_new_tokens >= 1, "engine.max_new_tokens must be 1 or more"),
        (config.objective.max_ratio > 0, "objective.max_ratio must be above 0"),
        (config.seed >= 0, f"seed is {config.seed}; expected 0 or more"),
        (config.data.size >= 0, f"data.size is {config.data.size}; expected 0 (all) or more"),
        (
            config.engine.interruption.answer_tokens >= 1,
            "engine.interruption.answer_tokens must be 1 or more",
        ),
        (config.learner.lr > 0, "learner.lr must be above 0"),
        (config.learner.grad_clip >= 0, "learner.grad_clip must be above 0, or 0 to turn clipping off"),
        (config.learner.micro_batch_tokens >= 1, "learner.micro_batch_tokens must be 1 or more"),
        (config.evaluation.every >= 1, "evaluation.every must be 1 or more steps"),
        (config.evaluation.samples >= 1, "evaluation.samples must be 1 or more"),
        (
            config.data.held_out >= 1,
            "data.held_out must be 1 or more prompts: without them there is no curve",
        ),
        (config.verifier.workers >= 1, "verifier.workers must be 1 or more"),
        (config.verifier.timeout_s > 0, "verifier.timeout_s must be above 0 seconds"),
        (
            config.logging.keep_checkpoints >= 1,
            "logging.keep_checkpoints must be 1 or more: a run goes on from the newest",
        ),
        (
            1 <= config.engine.interruption.lo <= config.engine.interruption.hi,
            f"engine.interruption: expected 1 <= lo <= hi, given lo {config.engine.interruption.lo}, "
            f"hi {config.engine.interruption.hi}",
        ),
    ]
    for holds, message in rules:
        if not holds:
            raise ConfigError(message)


def to_yaml(config: Config) -> str:
    """The resolved config as a recipe file that reproduces it."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, list | tuple) else value

    return yaml.safe_dump(plain(dataclasses.asdict(config)), sort_keys=False, allow_unicode=True)


if __name__ == "__main__":
    sys.stdout.write(to_yaml(parse(sys.argv[1:]).config))
