"""`python -m trainer.sweep`: trains recipes × seeds on one task, and says which is best at which budget."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from trainer.cli import Parser
from trainer.config import ConfigError
from trainer.gpus import number_as_listed
from trainer.run_folder import complete
from trainer.sweep.curves import keep_curves
from trainer.sweep.executors import Cluster, LocalExecutor
from trainer.sweep.halving import RUNGS, stop_recipes
from trainer.sweep.progress import View, clock, time_left
from trainer.sweep.results import write_results
from trainer.sweep.schedule import stops, train
from trainer.sweep.spec import ASKED, Sweep, load, load_status


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: every run is complete. 1: some failed. 2: wrong input. 130: stopped, and can go on."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    table = arguments[:1] == ["table"]
    if table:
        arguments[:1] = ["--out"]
    mark = arguments.index("--") if "--" in arguments else len(arguments)
    number_as_listed()
    try:
        args = _parser().parse_intermixed_args(arguments[:mark])
        sweep = load(args.out) if table else _asked(args, tuple(arguments[mark + 1 :]))
        if args.dry_run:
            sweep.check()
            print(plan(sweep, args))
            return 0
        code = 0 if table else _train(sweep, args)
        if code < 128:
            print(write_results(sweep, args.compute_column))
            if args.keep_curves:
                keep_curves(sweep, args.keep_curves)
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    errors = {} if table else load_status(sweep.folder).errors
    for name, error in errors.items():
        print(f"error: {name}: {error}", file=sys.stderr)
    return code


def _train(sweep: Sweep, args: argparse.Namespace) -> int:
    """Train what is not complete, one rung after the other; returns the exit code."""
    executor = _executor(args, sweep)
    with sweep.claim(sweep.check()), stops() as came:
        status = load_status(sweep.folder)
        executor.open()
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
        usage="%(prog)s RECIPE ... --task T --seeds N --budget H --out FOLDER [-- --KEY VALUE ...]\n"
        "       %(prog)s --out FOLDER   go on with the sweep of this folder\n"
        "       %(prog)s table FOLDER   make its results again, from the curves",
        description=(__doc__ or "").partition(": ")[2],
        epilog="What follows -- holds for every run, as on trainer.main's command line. Started again, a "
        "sweep skips complete runs, goes on with broken ones from checkpoints, and tries failed ones again.",
    )
    rungs = ", ".join(f"{100 * r:g}" for r in RUNGS)
    numbers = {
        "seeds": (3, "runs of each recipe (default: 3)"),
        "budget": (0.0, "compute of each run, in device-hours of its ledger (default: up to pipeline.steps)"),
        "jobs": (0, "runs at a time (default: 1 on a CPU, as many as fit on the GPUs, all on a cluster)"),
        "gpus-per-run": (0, "GPUs of each run (default: an equal share)"),
    }
    add = parser.add_argument
    add("recipes", nargs="*", metavar="RECIPE", help="recipes that ship with the trainer, or .yaml files")
    add("--task", help="the task that all train on: a name or a .yaml file")
    add("--out", type=Path, required=True, metavar="FOLDER", help="folder of the sweep")
    for name, (default, text) in numbers.items():
        add(f"--{name}", type=type(default), default=default, metavar="N", help=text)
    add("--halving", action="store_true", help=f"stop recipes that will not win, at {rungs} %% of the budget")
    text = "this machine, a Slurm cluster through submitit, or submitit's processes on this machine"
    add("--executor", choices=("here", "slurm", "local"), default="here", help=text)
    text = "parameters of submitit's executor, such as timeout_min=600 gpus_per_node=8 slurm_partition=gpu"
    add("--executor-options", nargs="+", default=[], metavar="KEY=VALUE", help=text)
    add("--dry-run", action="store_true", help="print the commands of the runs; start nothing")
    text = "compute of the results, such as compute/flops, which does not depend on how busy the machine is "
    add("--compute-column", metavar="NAME", help=f"{text}(default: compute/total, in device-hours)")
    text = "copy the curve of each run (a few kB) here, from which `table` makes the results again"
    add("--keep-curves", type=Path, metavar="DIR", help=text)
    return parser


def _asked(args: argparse.Namespace, overrides: tuple[str, ...]) -> Sweep:
    if not args.recipes and (args.out / ASKED).is_file():
        return load(args.out)
    if not args.recipes or not args.task:
        raise ConfigError("expected one or more recipes and a --task; or --out with the folder of a sweep")
    task, *recipes = (
        str(Path(name).resolve()) if name.endswith((".yaml", ".yml")) else name
        for name in (args.task, *args.recipes)
    )
    return Sweep(
        folder=args.out, recipes=tuple(recipes), task=task, seeds=args.seeds, budget=args.budget,
        rungs=RUNGS if args.halving else (), overrides=overrides,
    )  # fmt: skip


def _executor(args: argparse.Namespace, sweep: Sweep) -> LocalExecutor | Cluster:
    options: dict[str, Any] = {}
    for text in args.executor_options:
        key, sign, value = text.partition("=")
        if not sign or args.executor == "here":
            raise ConfigError(f"--executor-options {text}: expected KEY=VALUE, with --executor slurm")
        options[key] = yaml.safe_load(value)
    if args.jobs < 0 or args.gpus_per_run < 0:
        raise ConfigError(f"--jobs {args.jobs}, --gpus-per-run {args.gpus_per_run}: expected 0 or more")
    if args.executor == "here":
        return LocalExecutor(sweep.folder, args.jobs, args.gpus_per_run)
    options |= {"gpus_per_node": args.gpus_per_run} if args.gpus_per_run else {}
    return Cluster(sweep.folder, args.executor, args.jobs or len(sweep.runs), options)


def plan(sweep: Sweep, args: argparse.Namespace) -> str:
    """The commands that would run, and how long they would take, once the pace of a run is known."""
    status, jobs = load_status(sweep.folder), _executor(args, sweep).jobs
    remaining = [run for run in sweep.runs if run.recipe not in status.stopped]
    runs = [run for run in remaining if not complete(run.folder, sweep.budget)]
    seconds = time_left(sweep, status, jobs)
    time = "" if seconds is None else f" Time left: {clock(seconds)}."
    commands = "\n".join(" ".join(run.command(sweep.budget)) for run in runs)
    return f"{commands}\n{len(runs)} of {len(sweep.runs)} runs are to be trained.{time}"


if __name__ == "__main__":
    sys.exit(main())
