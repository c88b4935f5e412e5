"""`report`: one HTML page for one or many runs, complete in itself; pictures for papers on demand."""

import argparse
from pathlib import Path

from trainer.config import ConfigError
from trainer.scaling.commands import add_fit_arguments
from trainer.scaling.comparability import add_same_metric, check_seeds
from trainer.scaling.reading.groups import read_groups
from trainer.scaling.reading.options import ReadOptions, add_input_arguments
from trainer.scaling.report import write

EXAMPLES = """\
Several seeds of one recipe: NAME=RUN,RUN,... instead of RUN_OR_FILE.

examples:
  python -m trainer.scaling report ours=seed1.csv,seed2.csv baseline=seed3.csv --svg pictures
  python -m trainer.scaling report runs.toml --out report.html
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """What to report, and where."""
    add_input_arguments(command)
    add_fit_arguments(command)
    add_same_metric(command)
    command.formatter_class, command.epilog = argparse.RawDescriptionHelpFormatter, EXAMPLES
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
    groups = read_groups(args.inputs, ReadOptions.from_arguments(args))
    check_seeds(groups)
    pictures = {ending: folder for ending in ("png", "svg") if (folder := getattr(args, ending))}
    files = write(groups, args.out, pictures, args.confidence, args.within, args.same_metric)
    print(*files, sep="\n")
