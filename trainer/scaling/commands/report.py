"""`report`: one HTML page for one or many runs, complete in itself; pictures for papers on demand."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from trainer.config import ConfigError
from trainer.scaling.commands import GroupCommand
from trainer.scaling.comparability import check_seeds
from trainer.scaling.reading.read import read_groups
from trainer.scaling.report.run import runs_of


@dataclass(frozen=True, kw_only=True)
class Command(GroupCommand):
    """Several seeds of one recipe: NAME=RUN,RUN,... instead of RUN_OR_FILE.

    examples:
      python -m trainer.scaling report ours=seed1.csv,seed2.csv baseline=seed3.csv --svg pictures
      python -m trainer.scaling report runs.toml --out report.html
    """

    out: Annotated[Path, "FILE"] = Path("report.html")
    """the page"""
    svg: Annotated[Path | None, "DIR"] = None
    """write curves.svg and efficiency.svg here"""

    def run(self, inputs: Sequence[str]) -> None:
        """Write the page and the pictures, and say where they are."""
        from trainer.scaling.report.page import draw, write  # Jinja2 is not needed for --help

        if not self.out.parent.is_dir():  # before any work, so that a wrong name costs nothing
            raise ConfigError(f"--out {self.out}: there is no folder {self.out.parent}; make it first")
        if self.svg and self.svg.exists() and not self.svg.is_dir():
            raise ConfigError(f"{self.svg} is a file; expected a folder for the pictures")
        groups = read_groups(inputs, self)
        check_seeds(groups)
        runs = runs_of(groups, self.confidence, self.within)
        print(write(runs, self.out, self.same_metric))
        if self.svg:
            print(*draw(runs, self.svg, "svg"), sep="\n")
