"""The options of a sweep (sweep.yaml in its folder), the runs that it consists of, and their status.

FOLDER/sweep.yaml     what was asked, and the settings in which the recipes differ
FOLDER/R-S/           the run folder of recipe R, seed S: it says whether the run is complete
                      (a recipe at a point of the axes of `--vary` is one of its own, as scalerl-lr_0.0003)
FOLDER/logs/R-S.log   what the run printed
FOLDER/runs.toml      the runs with enough evaluations, for `python -m trainer.scaling`
FOLDER/status.json    errors of the last attempts, recipes stopped early, wall time
"""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import IO, Any

import yaml

from trainer.cli import NAME, NAME_CHARACTERS, Launch, parse, to_yaml
from trainer.config import Config, ConfigError
from trainer.config.typed import fields
from trainer.jsonl import write_atomic
from trainer.run_folder import latest, lock_folder
from trainer.sweep.axes import Axes, Point, points, suffix

TRAINER = (sys.executable, "-m", "trainer.main")
ASKED, STATUS = "sweep.yaml", "status.json"
OURS = (
    "--recipe", "--task", "--seed", "--run-dir", "--run_dir", "--resume", "--dry-run",
    "--pipeline.max_compute", "--pipeline.max-compute",
)  # fmt: skip
FIXED = ("task", "budget", "rungs", "zip", "overrides")  # what all runs of a folder have in common


@dataclass(frozen=True, slots=True)
class Run:
    """One recipe with one seed."""

    recipe: str  # its name, without folder and ending, and with the values of the axes
    folder: Path
    start: tuple[str, ...]  # the command, but for the compute

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def log(self) -> Path:
        """The file that all its attempts print to."""
        return self.folder.parent / "logs" / f"{self.name}.log"

    @property
    def lock(self) -> Path:
        """A file that is locked while it trains."""
        return self.folder.parent / "jobs" / f"{self.name}.lock"

    def command(self, compute: float) -> list[str]:
        """The command to train up to a compute (0: to the last step), from the newest checkpoint if any."""
        limit = ["--pipeline.max_compute", repr(compute)] if compute else []
        return [*self.start, *limit, *(["--resume"] if latest(self.folder) else [])]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The options of a sweep, and its runs."""

    folder: Path
    recipes: tuple[str, ...]  # names of shipped recipes, or files
    task: str
    seeds: int
    budget: float  # device-hours of each run; 0: its pipeline.steps are the only limit
    rungs: tuple[float, ...] = ()  # shares of the budget at which recipes may be stopped
    vary: Axes = field(default_factory=dict)
    zip: bool = False  # the axes' values are paired
    overrides: tuple[str, ...] = ()
    curves_only: bool = False  # a copy by --keep-curves, without the run folders

    @cached_property
    def points(self) -> dict[str, tuple[str, Point]]:
        """The file or name of each recipe, and its values on the axes, by its name with these values."""
        named = [
            (Path(recipe).stem + suffix(point), (recipe, point))
            for recipe in self.recipes
            for point in points(self.vary, self.zip)
        ]
        names = [name for name, _ in named]
        if repeated := {n for n in names if names.count(n) > 1}:
            raise ConfigError(f"two recipes are named {repeated.pop()!r}; expected each name once")
        return dict(named)

    @property
    def axes(self) -> dict[str, dict[str, str]]:
        """The values of the recipes on each axis; paired axes are one, and several recipes are one, too."""
        keys = [tuple(self.vary)] if self.zip else [(key,) for key in self.vary]
        axes = {
            ", ".join(axis): {
                name: ", ".join(point[key] for key in axis) for name, (_, point) in self.points.items()
            }
            for axis in keys
        }
        if axes and len(self.recipes) > 1:
            axes["recipe"] = {name: Path(recipe).stem for name, (recipe, _) in self.points.items()}
        return axes

    @cached_property
    def groups(self) -> dict[str, list[Run]]:
        """The runs by the name of their recipe."""
        runs: dict[str, list[Run]] = {}
        for name, (recipe, point) in self.points.items():
            runs[name] = []
            flags = [f"--{key}={text}" for key, text in point.items()]
            for seed in range(self.seeds):
                folder = self.folder / f"{name}-{seed}"
                command = (*TRAINER, "--recipe", recipe, "--task", self.task, "--seed", str(seed), *flags)
                runs[name].append(Run(name, folder, (*command, "--run-dir", str(folder), *self.overrides)))
        return runs

    @property
    def runs(self) -> list[Run]:
        """The first seed of every recipe, then the second, and so on: there is a table early."""
        return [run for seed in zip(*self.groups.values(), strict=True) for run in seed]

    def check(self) -> dict[str, Launch]:
        """Each recipe's launch. ConfigError, one line, if anything is wrong, or the folder is not of this
        sweep, to which recipes, values of axes and seeds may be added."""
        self.check_whole()
        if (self.folder / ASKED).is_file():
            before = load(self.folder)
            before.check_whole()
            self.check_extends(before)
        elif self.folder.exists() and (self.folder.is_file() or any(self.folder.iterdir())):
            raise ConfigError(f"{self.folder} is in use already, and not by a sweep; give another --out")
        if wrong := [n for n in self.points if not re.fullmatch(NAME, n)]:
            raise ConfigError(f"recipe {wrong[0]!r}: expected a name {NAME_CHARACTERS}")
        if self.rungs and not self.budget:
            raise ConfigError("--halving needs --budget: runs stop at shares of it")
        for origin, flags in (("--", self.overrides), ("--vary", [f"--{key}" for key in self.vary])):
            if reserved := [flag for flag in flags if flag.startswith(OURS)]:
                raise ConfigError(f"{origin} {reserved[0]}: the sweep sets this for each run; leave it out")
        fixed = [o.partition("=")[0][2:].replace("-", "_") for o in self.overrides if o.startswith("--")]
        if twice := set(fixed) & set(self.vary):
            raise ConfigError(f"{min(twice)} is varied, and follows -- as well; expected one of the two")
        launches = {name: parse(runs[0].start[len(TRAINER) :]) for name, runs in self.groups.items()}
        if self.rungs and (
            falls := [n for n, x in launches.items() if x.config.learner.schedule != "constant"]
        ):
            raise ConfigError(
                f"--halving: the learning rate of {falls[0]} would fall to its end at each rung, where "
                "pipeline.max_compute ends its runs; expected learner.schedule constant"
            )
        names_by_run: dict[str, str] = {}
        for name, launch in launches.items():
            other = names_by_run.setdefault(to_yaml(replace(launch.config, run_dir="", seed=0)), name)
            if other != name:
                raise ConfigError(
                    f"recipes {other} and {name} would train the same run on task {self.task}: every key in "
                    "which they differ is replaced by the task, --vary or what follows --; expected two runs"
                )
        return launches

    def check_whole(self) -> None:
        """ConfigError if there are only the curves of this sweep."""
        if self.curves_only:
            raise ConfigError(f"{self.folder} holds kept curves only; give the --out of the sweep itself")

    def check_extends(self, before: "Sweep", plain: Callable[[Any], Any] = lambda value: value) -> None:
        """ConfigError unless this sweep is that one with more recipes, values of axes or seeds.

        `plain` makes a value of this one comparable with that one's.
        """
        for key in FIXED:
            old, new = _plain(getattr(before, key)), plain(_plain(getattr(self, key)))
            if old != new:
                raise ConfigError(
                    f"{before.folder} is of another sweep: its {key} is {old!r}, given {new!r}; give another"
                    " folder"
                )
        known = {*plain(list(self.recipes)), *self.points}
        if missing := {*before.recipes, *before.points} - known or before.seeds > self.seeds:
            what = f"{before.seeds} seeds" if missing is True else f"recipe {min(missing)}"
            raise ConfigError(f"{before.folder} is of a sweep with {what}; more may be added, not fewer")

    def claim(self, configs: dict[str, Config]) -> IO[str]:
        """Write sweep.yaml, and hold the folder's lock until the returned file is closed."""
        lock = lock_folder(self.folder, "--out")
        if (self.folder / ASKED).is_file():  # another sweep may have come first
            self.check_extends(load(self.folder))
        content = {k: _plain(v) for k, v in asdict(self).items() if k != "folder"}
        content["differing"] = differing(configs)
        write_atomic(self.folder / ASKED, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
        for name in ("jobs", "logs"):
            (self.folder / name).mkdir(exist_ok=True)
        return lock


def load(folder: Path) -> Sweep:
    """The sweep of a folder."""
    try:
        content: dict[str, Any] = yaml.safe_load((folder / ASKED).read_text())
    except OSError as e:
        raise ConfigError(f"{folder} holds no sweep ({ASKED}); expected the --out of one") from e
    content.pop("differing", None)
    content |= {k: tuple(v) for k, v in content.items() if isinstance(v, list)}
    return Sweep(folder=folder, **content)


def differing(configs: dict[str, Config]) -> dict[str, dict[str, Any]]:
    """The settings in which the recipes differ, by key."""
    values = {key: {name: attrgetter(key)(c) for name, c in configs.items()} for key in fields()}
    return {
        key: {name: _plain(v) for name, v in by_recipe.items()}
        for key, by_recipe in values.items()
        if key != "run_dir" and len(set(map(repr, by_recipe.values()))) > 1
    }


def _plain(value: Any) -> Any:
    """A value as YAML shows it."""
    if isinstance(value, list | tuple):
        return [asdict(v) if hasattr(v, "__dataclass_fields__") else v for v in value]
    return value


@dataclass
class Status:
    """The outcome of the runs beyond what their folders say; stored in status.json."""

    folder: Path
    errors: dict[str, str] = field(default_factory=dict)  # by run: of its last attempt
    decided: list[float] = field(default_factory=list)  # rungs passed
    stopped: dict[str, dict[str, float]] = field(default_factory=dict)  # by recipe: at which rung, and why
    wall_s: float = 0.0  # that the sweep ran, over all its starts

    def write(self) -> None:
        content = {k: v for k, v in asdict(self).items() if k != "folder"}
        write_atomic(self.folder / STATUS, json.dumps(content, indent=1, ensure_ascii=False))


def load_status(folder: Path) -> Status:
    path = folder / STATUS
    return Status(folder, **(json.loads(path.read_text()) if path.is_file() else {}))
