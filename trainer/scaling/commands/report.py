"""`report`: one HTML page for one or many runs, complete in itself; pictures for papers on demand."""

import argparse
from pathlib import Path

from trainer.config import ConfigError
from trainer.jsonl import write_atomic
from trainer.scaling.plot import plot_curves, plot_efficiency
from trainer.scaling.reading.read import add_input_arguments, read_curves
from trainer.scaling.report import page, runs_of


def add_arguments(command: argparse.ArgumentParser) -> None:
    """What to report, and where."""
    add_input_arguments(command)
    command.add_argument("--out", type=Path, default=Path("report.html"), help="the page (report.html)")
    command.add_argument("--png", type=Path, metavar="DIR", help="write curves.png and efficiency.png here")
    command.add_argument("--svg", type=Path, metavar="DIR", help="the same as .svg")


def run(args: argparse.Namespace) -> None:
    """Write the page and the pictures, and say where they are."""
    if not args.out.parent.is_dir():  # before any work, so that a wrong name costs nothing
        raise ConfigError(f"--out {args.out}: there is no folder {args.out.parent}; make it first")
    for folder in (args.png, args.svg):
        if folder is not None and folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is a file; expected a folder for the pictures")
    runs = runs_of(read_curves(args))
    write_atomic(args.out, page(runs))
    print(args.out)
    named = [(r.name, r.curve, r.fit) for r in runs]
    for folder, ending in ((args.png, "png"), (args.svg, "svg")):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for name, draw in (("curves", plot_curves), ("efficiency", plot_efficiency)):
                draw(named, folder / f"{name}.{ending}")
                print(folder / f"{name}.{ending}")
