"""The commands of `python -m trainer.scaling`, one module each; options of the fit; how files are written."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.jsonl import nan_to_null
from trainer.scaling.earlier import Earlier, learn
from trainer.scaling.reading.groups import curves_of, read_groups
from trainer.scaling.reading.options import ReadOptions

PICTURES = (".png", ".svg", ".pdf")


def add_fit_arguments(command: argparse.ArgumentParser) -> None:
    """--confidence and --within: pass them on to `fit_curve`, which checks them."""
    add = command.add_argument_group("fit").add_argument
    add(
        "--confidence", type=float, default=0.9, metavar="P",
        help="probability of the intervals (default: %(default)s)",
    )  # fmt: skip
    add(
        "--within", type=float, metavar="D",
        help="call the ceiling identified if its interval reaches no further than D from its value, on a "
        "scale from 0 to 1 (default: if it is no wider than a fifth of the rise from R0, and than 0.10)",
    )  # fmt: skip


def add_like_argument(command: argparse.ArgumentParser) -> None:
    """--like: pass it on to `read_like`."""
    command.add_argument(
        "--like", nargs="+", default=[], metavar="RUN",
        help="finished runs of the same kind, seeds of one recipe as NAME=RUN,RUN: forecasts learn from them "
        "which law such runs follow, how steep it is, and how far off forecasts of them would have been",
    )  # fmt: skip


def read_like(args: argparse.Namespace) -> Earlier | None:
    """The information in the runs of --like; None: there are none."""
    options = ReadOptions.from_arguments(args)
    return learn(curves_of(read_groups(args.like, options))) if args.like else None


def check_outputs(json_path: Path | None, picture: Path | None = None) -> None:
    """Refuse output files that cannot be written, before any work is done."""
    for path, endings in ((json_path, (".json",)), (picture, PICTURES)):
        if path and path.suffix not in endings:
            raise ConfigError(f"{path}: expected a name ending in {' or '.join(endings)}")
        if path and not path.parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.parent}; make it first")


def write_json(path: Path, content: Any) -> None:
    """What is unknown or infinite becomes null."""
    path.write_text(json.dumps(nan_to_null(content), indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def as_typed(numbers: Sequence[float]) -> str:
    """Numbers as on a command line, for help texts."""
    return " ".join(f"{x:g}" for x in numbers)
