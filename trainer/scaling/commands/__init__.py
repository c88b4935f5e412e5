"""The commands of `python -m trainer.scaling`, one module each with a class `Command`; what they share."""

import argparse
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

from trainer.jsonl import nan_to_null
from trainer.scaling.curve.average import DEFAULT, Prior
from trainer.scaling.curve.fit import Fit, fit_curve, without_transient
from trainer.scaling.curve.sigmoid import Curve
from trainer.scaling.earlier import Earlier, describe_prior, learn, prior_after
from trainer.scaling.layout import grouped, paragraph
from trainer.scaling.reading.options import ABOVE_0, Options, ReadOptions
from trainer.scaling.reading.read import Reading, curves_of, read_groups

INPUTS = (
    "a run folder; .csv, .tsv, .jsonl, .json or .parquet; a W&B export; TensorBoard events; verl's console "
    "log. NAME=RUN,RUN: seeds of one recipe. RUN@devices=32,reward=aime: options of these runs alone (those "
    "below, also compute, reward, se and time for the columns). A .toml of runs: see docs/logs.md"
)
Budgets = Annotated[tuple[float, ...], "BUDGET", ABOVE_0]


def written_to(*endings: str) -> Callable[[str], Path]:
    """A type for argparse: a file that can be written, so that a wrong name costs no work."""

    def read(text: str) -> Path:
        path = Path(text)
        if path.suffix not in endings:
            raise argparse.ArgumentTypeError(f"{path}: expected a name ending in {' or '.join(endings)}")
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"{path}: there is no folder {path.parent}; make it first")
        return path

    return read


Json = Annotated[Path | None, "FILE", written_to(".json")]
Picture = Annotated[Path | None, "FILE", written_to(".png", ".svg", ".pdf")]


@dataclass(frozen=True, kw_only=True)
class ReadCommand(ReadOptions):
    """A command that reads runs: its options are fields, its docstring ends its --help, `run` prints."""

    nargs: ClassVar[str] = "+"

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        """The inputs, the options and the examples."""
        parser.add_argument("inputs", nargs=cls.nargs, metavar="RUN_OR_FILE", help=INPUTS)
        super().add_to(parser)
        parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, inspect.getdoc(cls)

    def run(self, inputs: Sequence[str]) -> None:
        """ConfigError: one line, what is wrong."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class FitOptions(Options):
    """Options of the fit of a curve; `fit_curve` checks them."""

    group: ClassVar[tuple[str, ...]] = ("fit",)

    confidence: Annotated[float, "P"] = 0.9
    """probability of the intervals"""
    within: Annotated[float | None, "D"] = None
    """call the ceiling identified if its interval reaches no further than D from its value, on a scale from
    0 to 1 (default: if it is no wider than a fifth of the rise from R0, and than 0.10)"""


@dataclass(frozen=True, kw_only=True)
class GroupCommand(FitOptions, ReadCommand):
    """A command that compares recipes."""

    same_metric: bool = False
    """the rewards are the same metric on the same prompts, although their columns, held-out sets or scorers
    are named differently: compare them"""


@dataclass(frozen=True, kw_only=True)
class ForecastCommand(FitOptions, ReadCommand):
    """A command that fits each run for itself, and can learn from finished runs."""

    like: Annotated[tuple[str, ...], "RUN"] = ()
    """finished runs of the same kind, seeds of one recipe as NAME=RUN,RUN: forecasts learn from them which
    law such runs follow, how steep it is, and how far off forecasts of them would have been"""
    drop_early: bool = False
    """leave out the first quarter of the rise if it deviates from the curve"""

    def curve(self, reading: Reading) -> Curve:
        """The curve to fit."""
        return without_transient(reading.curve) if self.drop_early else reading.curve

    @cached_property
    def earlier(self) -> Earlier | None:
        """The information in the runs of --like; None: there are none."""
        return learn(curves_of(read_groups(self.like, self))) if self.like else None

    def fit(self, curve: Curve) -> Fit:
        """A fit whose forecasts know the runs of --like."""
        return fit_curve(curve, self.confidence, self.within, prior=self.prior(curve))

    def prior(self, curve: Curve) -> Prior:
        """The prior of a run, learned from the runs of --like if there are any."""
        return prior_after(self.earlier, curve) if self.earlier else DEFAULT

    def describe_prior(self, curve: Curve) -> list[str]:
        """The same as sentences, if there is --like."""
        return [describe_prior(self.prior(curve), self.earlier.without(curve))] if self.earlier else []


def write_json(path: Path | None, content: Any) -> None:
    """If asked for. Unknown and infinite numbers become null."""
    if path:
        text = json.dumps(nan_to_null(content), indent=1, allow_nan=False, ensure_ascii=False)
        path.write_text(text + "\n")


def sources(readings: Sequence[Reading]) -> str:
    """The columns read, and the notes of the reader; runs that were read alike share the lines."""
    runs = grouped(((str(reading), *reading.notes), reading.curve.name) for reading in readings)
    blocks = ([paragraph(", ".join(names), ""), *map(paragraph, texts)] for texts, names in runs.items())
    return "\n".join(map("\n".join, blocks))
