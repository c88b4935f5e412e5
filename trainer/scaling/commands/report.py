"""`report`: one HTML page for one or many runs, complete in itself; pictures for papers on demand."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from trainer.config import ConfigError
from trainer.scaling.commands import FitOptions, add_options, groups_of
from trainer.scaling.comparability import add_same_metric, check_seeds
from trainer.scaling.reading.options import ReadOptions
from trainer.scaling.report import write

EXAMPLES = """\
Several seeds of one recipe: NAME=RUN,RUN,... instead of RUN_OR_FILE.

examples:
  python -m trainer.scaling report ours=seed1.csv,seed2.csv baseline=seed3.csv --svg pictures
  python -m trainer.scaling report runs.toml --out report.html
"""


@dataclass(frozen=True, kw_only=True)
class ReportCommand(FitOptions, ReadOptions):
    """What to report, and where."""

    out: Annotated[Path, "FILE"] = Path("report.html")
    """the page"""
    png: Annotated[Path | None, "DIR"] = None
    """write curves.png and efficiency.png here"""
    svg: Annotated[Path | None, "DIR"] = None
    """the same as .svg"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command line."""
    add_options(command, ReportCommand, EXAMPLES)
    add_same_metric(command)


def run(args: argparse.Namespace) -> None:
    """Write the page and the pictures, and say where they are."""
    options = ReportCommand.from_arguments(args)
    if not options.out.parent.is_dir():  # before any work, so that a wrong name costs nothing
        raise ConfigError(f"--out {options.out}: there is no folder {options.out.parent}; make it first")
    for folder in (options.png, options.svg):
        if folder is not None and folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is a file; expected a folder for the pictures")
    groups = groups_of(args.inputs, options)
    check_seeds(groups)
    pictures = {ending: folder for ending in ("png", "svg") if (folder := getattr(options, ending))}
    files = write(groups, options.out, pictures, options.confidence, options.within, args.same_metric)
    print(*files, sep="\n")
