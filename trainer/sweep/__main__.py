"""`python -m trainer.sweep`: trains recipes × seeds on one task, and says which is best at which budget."""

import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from trainer.cli import Parser, fail
from trainer.config import Config, ConfigError
from trainer.config.values import Range
from trainer.gpus import number_as_listed
from trainer.roles import stop_signals
from trainer.run_folder import complete
from trainer.scaling.reading.options import Options
from trainer.sweep.axes import read_axes
from trainer.sweep.curves import go_on_from, keep_curves
from trainer.sweep.executors import Cluster, LocalExecutor
from trainer.sweep.halving import RUNGS, stop_recipes
from trainer.sweep.progress import View, clock, time_left
from trainer.sweep.results import write_results
from trainer.sweep.schedule import train
from trainer.sweep.spec import ASKED, Sweep, load, load_status


@dataclass(frozen=True, kw_only=True)
class Arguments(Options):
    """The options of a sweep, and where and how its runs train."""

    task: Annotated[str | None, "NAME"] = None
    """the task that all train on: a name or a .yaml file"""
    out: Annotated[Path, "FOLDER"]
    """folder of the sweep"""
    seeds: Annotated[int, "N", Range(1)] = 3
    """runs of each recipe"""
    vary: Annotated[tuple[str, ...], "KEY=VALUE,VALUE"] = ()
    """train each recipe with each of these values of a key, such as learner.lr=1e-4,3e-4; given again: with
    each combination"""
    zip: bool = False
    """pair the values of several --vary (the first of each, the second, ...) instead of combining all"""
    budget: Annotated[float, "HOURS", Range(0)] = 0.0
    """compute of each run, in device-hours of its ledger (default: up to pipeline.steps)"""
    jobs: Annotated[int, "N", Range(0)] = 0
    """runs at a time (default: 1 on a CPU, as many as fit on the GPUs, all on a cluster)"""
    gpus_per_run: Annotated[int, "N", Range(0)] = 0
    """GPUs of each run (default: an equal share)"""
    halving: bool = False
    """stop recipes that will not win, at 25, 37.5, 50 and 75 % of the budget"""
    executor: Literal["here", "slurm", "local"] = "here"
    """this machine, a Slurm cluster through submitit, or submitit's processes on this machine"""
    executor_options: Annotated[tuple[str, ...], "KEY=VALUE"] = ()
    """parameters of submitit's executor, such as timeout_min=600 gpus_per_node=8 slurm_partition=gpu"""
    dry_run: bool = False
    """print the commands of the runs; start nothing"""
    compute_column: Annotated[str | None, "NAME"] = None
    """compute of the results, such as compute/flops, which does not depend on how busy the machine is
    (default: compute/total, in device-hours)"""
    keep_curves: Annotated[Path | None, "DIR"] = None
    """copy the curve of each run (a few kB) here, from which `table` makes the results again, and from which
    a sweep in a new --out goes on: runs that ended are not trained again"""
    write: bool = False
    """with `table` and a folder of kept curves: write report and pictures there, too"""

    def sweep(self, recipes: Sequence[str], overrides: tuple[str, ...]) -> Sweep:
        """The sweep that is asked for; without recipes, that of the folder."""
        if not recipes and not self.vary and (self.out / ASKED).is_file():
            return load(self.out)
        if not recipes or not self.task:
            raise ConfigError(
                "expected one or more recipes and a --task; or --out with the folder of a sweep"
            )
        task, *names = (
            str(Path(name).resolve()) if name.endswith((".yaml", ".yml")) else name
            for name in (self.task, *recipes)
        )
        rungs = RUNGS if self.halving else ()
        return Sweep(
            folder=self.out, recipes=tuple(names), task=task, seeds=self.seeds, budget=self.budget,
            rungs=rungs, vary=read_axes(self.vary), zip=self.zip, overrides=overrides,
        )  # fmt: skip

    def executor_of(self, sweep: Sweep) -> LocalExecutor | Cluster:
        """The executor of its runs."""
        options: dict[str, Any] = {"gpus_per_node": self.gpus_per_run} if self.gpus_per_run else {}
        for text in self.executor_options:
            key, sign, value = text.partition("=")
            if not sign or self.executor == "here":
                raise ConfigError(f"--executor-options {text}: expected KEY=VALUE, with --executor slurm")
            options[key] = yaml.safe_load(value)
        if self.executor == "here":
            return LocalExecutor(sweep.folder, self.jobs, self.gpus_per_run)
        return Cluster(sweep.folder, self.executor, self.jobs or len(sweep.runs), options)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: every run is complete. 1: some failed. 2: wrong input. 130: stopped, and can go on."""
    words = list(sys.argv[1:] if argv is None else argv)
    table = words[:1] == ["table"]
    if table:
        words[:1] = ["--out"]
    if argv is None and (table or "--dry-run" in words):  # this is the process's own work
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a traceback
    mark = words.index("--") if "--" in words else len(words)
    number_as_listed()
    try:
        parsed = _parser().parse_intermixed_args(words[:mark])
        arguments = Arguments.from_arguments(parsed)
        sweep = load(arguments.out) if table else arguments.sweep(parsed.recipes, tuple(words[mark + 1 :]))
        if arguments.dry_run:
            _checked(sweep)
            print(plan(sweep, arguments.executor_of(sweep).jobs))
            return 0
        curves = arguments.keep_curves
        code = 0 if table else _train(sweep, arguments.executor_of(sweep), curves)
        if code < 128:
            print(write_results(sweep, arguments.compute_column, arguments.write))
        if curves:
            keep_curves(sweep, curves)
    except ConfigError as e:
        return fail(str(e), 2)
    errors = {} if table else load_status(sweep.folder).errors
    for name, error in errors.items():
        print(f"error: {name}: {error}", file=sys.stderr)
    return code


def _checked(sweep: Sweep) -> dict[str, Config]:
    """Each recipe's configuration, after a note of what its files set and the run will not have."""
    launches = sweep.check()
    named = {notice: name for name, launch in reversed(launches.items()) for notice in launch.notices}
    for notice, name in reversed(named.items()):  # once for all points of the axes
        print(f"note: {name}: {notice}", file=sys.stderr)
    return {name: launch.config for name, launch in launches.items()}


def _train(sweep: Sweep, executor: LocalExecutor | Cluster, curves: Path | None) -> int:
    """Train what is not complete, here or in the curves, one rung after the other; returns the exit code."""
    configs = _checked(sweep)
    with sweep.claim(configs), stop_signals() as came:
        if curves:
            go_on_from(curves, sweep, configs)
        status = load_status(sweep.folder)
        with View(sweep, executor.jobs) as view:
            for share in (*sweep.rungs, 1.0):
                runs = [run for run in sweep.runs if run.recipe not in status.stopped]
                train(runs, share * sweep.budget, executor, status, view, came)
                if not came and share < 1 and share not in status.decided:
                    stop_recipes(sweep, share, status)
    if came:
        done = sum(complete(run.folder, sweep.budget) for run in sweep.runs)
        text = f"stopped: {done} of {len(sweep.runs)} runs are complete; the same command goes on"
        print(text, file=sys.stderr)
        return 130
    return 1 if status.errors else 0


def _parser() -> Parser:
    parser = Parser(
        prog="python -m trainer.sweep",
        usage="%(prog)s RECIPE ... --task T --seeds N --budget H [--vary KEY=VALUE,VALUE] --out FOLDER "
        "[-- --KEY VALUE ...]\n"
        "       %(prog)s --out FOLDER   go on with the sweep of this folder\n"
        "       %(prog)s table FOLDER   make its results again, from the curves",
        description=(__doc__ or "").partition(": ")[2],
        epilog="What follows -- holds for every run, as on trainer.main's command line. Started again, a "
        "sweep skips complete runs, goes on with broken ones from checkpoints, and tries failed ones again.",
    )
    text = "recipes that ship with the trainer, or .yaml files"
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=text)
    Arguments.add_to(parser)
    return parser


def plan(sweep: Sweep, jobs: int) -> str:
    """The commands that would run, and how long they would take, once the pace of a run is known."""
    status = load_status(sweep.folder)
    remaining = [run for run in sweep.runs if run.recipe not in status.stopped]
    runs = [run for run in remaining if not complete(run.folder, sweep.budget)]
    seconds = time_left(sweep, status, jobs)
    time = "" if seconds is None else f" Time left: {clock(seconds)}."
    commands = "\n".join(shlex.join(run.command(sweep.budget)) for run in runs)
    return f"{commands}\n{len(runs)} of {len(sweep.runs)} runs are to be trained.{time}"


if __name__ == "__main__":
    sys.exit(main())
