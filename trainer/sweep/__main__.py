"""`python -m trainer.sweep`: trains recipes × seeds on one task, and says which is best at which budget."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from trainer.cli import Parser
from trainer.config import ConfigError
from trainer.run_folder import complete
from trainer.sweep.curves import keep_curves
from trainer.sweep.executors import Cluster, Executor, Here
from trainer.sweep.halving import RUNGS, stop_recipes
from trainer.sweep.progress import View, clock, time_left
from trainer.sweep.results import write_results
from trainer.sweep.schedule import stops, train
from trainer.sweep.spec import ASKED, Status, Sweep, load, load_status, shares


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: every run is complete. 1: some failed. 2: wrong input. 130: stopped, and can go on."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        if given[:1] == ["table"]:
            return _table(given[1:])
        mark = given.index("--") if "--" in given else len(given)
        args = _parser().parse_intermixed_args(given[:mark])
        return _run(args, _asked(args, tuple(given[mark + 1 :])))
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2


def _table(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="python -m trainer.sweep table",
        description="Makes the results of a sweep again, from its curves: no training.",
    )
    parser.add_argument("folder", type=Path, help="the --out of a sweep, or curves kept by --keep-curves")
    _keep_option(parser)
    args = parser.parse_args(argv)
    print(write_results(load(args.folder)))
    if args.keep_curves:
        keep_curves(load(args.folder), args.keep_curves)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m trainer.sweep",
        usage="%(prog)s RECIPE ... --task T --seeds N --budget H --out FOLDER [-- --KEY VALUE ...]\n"
        "       %(prog)s --out FOLDER            go on with the sweep of this folder\n"
        "       %(prog)s table FOLDER            its table and pictures, again",
        description=(__doc__ or "").partition(": ")[2],
        epilog="What follows -- holds for every run, as on trainer.main's command line. Started again, a "
        "sweep skips complete runs, goes on with broken ones from checkpoints, and tries failed ones again.",
    )
    add = parser.add_argument
    add("recipes", nargs="*", metavar="RECIPE", help="recipes that ship with the trainer, or .yaml files")
    add("--task", help="the task that all train on")
    add("--seeds", type=int, default=3, metavar="N", help="runs of each recipe (default: 3)")
    text = "compute of each run, in device-hours of its ledger (default: 0, no limit but pipeline.steps)"
    add("--budget", type=float, default=0.0, metavar="H", help=text)
    add("--out", type=Path, required=True, metavar="FOLDER", help="folder of the sweep")
    shares_ = " and ".join(f"{r:.0%}".replace("%", " %%") for r in RUNGS)
    add("--halving", action="store_true", help=f"stop recipes that will not win, at {shares_} of the budget")
    text = "runs at a time (default: 1 on a CPU, as many as fit on the GPUs, all on a cluster)"
    add("--jobs", type=int, default=0, metavar="N", help=text)
    add("--gpus-per-run", type=int, default=0, metavar="N", help="GPUs of each run (default: an equal share)")
    text = "this machine, a Slurm cluster through submitit, or submitit's processes on this machine"
    add("--executor", choices=("here", "slurm", "local"), default="here", help=text)
    text = "parameters of submitit's executor, such as timeout_min=600 gpus_per_node=8 slurm_partition=gpu"
    add("--executor-options", nargs="+", default=[], metavar="KEY=VALUE", help=text)
    add("--dry-run", action="store_true", help="print the runs, their commands and the time; start nothing")
    _keep_option(parser)
    return parser


def _keep_option(parser: argparse.ArgumentParser) -> None:
    text = "copy the curve of each run (a few kB) here, from which `table` makes the results again"
    parser.add_argument("--keep-curves", type=Path, metavar="DIR", help=text)


def _asked(args: argparse.Namespace, overrides: tuple[str, ...]) -> Sweep:
    if not args.recipes and (args.out / ASKED).is_file():
        return load(args.out)
    if not args.recipes or not args.task:
        raise ConfigError("expected one or more recipes and a --task; or --out with the folder of a sweep")
    recipes = [str(Path(r).resolve()) if r.endswith((".yaml", ".yml")) else r for r in args.recipes]
    task = str(Path(args.task).resolve()) if args.task.endswith((".yaml", ".yml")) else args.task
    return Sweep(
        folder=args.out, recipes=tuple(recipes), task=task, seeds=args.seeds, budget=args.budget,
        rungs=RUNGS if args.halving else (), overrides=overrides,
    )  # fmt: skip


def _executor(args: argparse.Namespace, sweep: Sweep) -> Executor:
    if args.jobs < 0 or args.gpus_per_run < 0:
        raise ConfigError(f"--jobs {args.jobs}, --gpus-per-run {args.gpus_per_run}: expected 0 or more")
    pairs = [text.partition("=") for text in args.executor_options]
    if wrong := [key for key, sign, _ in pairs if not sign]:
        raise ConfigError(f"--executor-options {wrong[0]}: expected KEY=VALUE")
    options: dict[str, Any] = {key: yaml.safe_load(value) for key, _, value in pairs}
    if args.executor == "here":
        if options:
            raise ConfigError("--executor-options are of --executor slurm; leave them out")
        return Here(sweep.folder, args.jobs, args.gpus_per_run)
    if args.gpus_per_run:
        options["gpus_per_node"] = args.gpus_per_run
    return Cluster(sweep.folder, args.executor, args.jobs or len(sweep.runs), options)


def _run(args: argparse.Namespace, sweep: Sweep) -> int:
    configs = sweep.check()
    if args.dry_run:
        print(plan(sweep, args))
        return 0
    with sweep.claim(configs):
        executor, status = _executor(args, sweep), load_status(sweep.folder)
        with stops() as came, View(sweep, executor.jobs) as view:
            for share in shares(sweep):
                runs = [run for run in sweep.runs if run.recipe not in status.stopped]
                train(runs, share * sweep.budget, executor, status, view, came)
                if came:
                    break
                if share < 1 and share not in status.decided:
                    stop_recipes(sweep, share, status)
        return _finish(args, sweep, status, bool(came))


def _finish(args: argparse.Namespace, sweep: Sweep, status: Status, stopped: bool) -> int:
    done = sum(complete(run.folder, sweep.budget) for run in sweep.runs)
    if stopped:
        text = f"stopped: {done} of {len(sweep.runs)} runs are complete; the same command goes on"
        print(text, file=sys.stderr)
        return 130
    print(write_results(sweep))
    if args.keep_curves:
        keep_curves(sweep, args.keep_curves)
    for name, error in status.errors.items():
        print(f"error: {name}: {error}", file=sys.stderr)
    return 1 if status.errors else 0


def plan(sweep: Sweep, args: argparse.Namespace) -> str:
    """The commands that would run, and how long they would take, as far as that is known."""
    runs = [run for run in sweep.runs if not complete(run.folder, sweep.budget)]
    lines = [" ".join(run.command(sweep.budget)) for run in runs]
    lines.append(f"{len(runs)} of {len(sweep.runs)} runs are to be trained.")
    jobs = args.jobs or (1 if args.executor == "here" else len(sweep.runs))
    measured = time_left(sweep, load_status(sweep.folder), jobs)
    if measured is not None:
        lines.append(f"Time left, at the pace so far: {clock(measured)}.")
    elif sweep.budget and args.executor == "here" and not args.gpus_per_run:
        cores = len(os.sched_getaffinity(0))
        hours = len(runs) * sweep.budget / cores
        lines.append(
            f"On the {cores} cores here: {clock(3600 * hours)}, with start-up and evaluations on top."
        )
    else:
        lines.append("How long that takes is known once a run has begun.")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
