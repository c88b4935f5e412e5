"""`backtest`: were finished runs forecast rightly from their beginnings?"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from trainer.config import ConfigError
from trainer.scaling.backtest import Backtest, backtest, summarize
from trainer.scaling.commands import (
    ForecastOptions,
    add_options,
    check_outputs,
    read_like,
    readings_of,
    write_json,
)
from trainer.scaling.curve.fit import MIN_FORECAST
from trainer.scaling.earlier import Earlier
from trainer.scaling.reading.read import Reading
from trainer.scaling.text import amount, interval, paragraph, short_names, sources, table

EXAMPLES = """\
examples:
  python -m trainer.scaling backtest run-*.csv
  python -m trainer.scaling backtest scalerl.csv --fit-until 8000 --details    the paper: up to 8k, then 16k
  python -m trainer.scaling backtest runs.toml --like runs.toml    with what the other recipes' runs say
"""


@dataclass(frozen=True, kw_only=True)
class BacktestCommand(ForecastOptions):
    """Which runs, up to where they are fitted, and where to write the result."""

    fit_until: Annotated[tuple[str, ...], "UNTIL"] = ("10%", "25%", "50%")
    """fit each run up to this share of its compute, such as 25%, or up to this compute (default:
    10% 25% 50%); the last quarter of the run is forecast"""
    details: bool = False
    """a row for each run, too"""
    json: Annotated[Path | None, "FILE"] = None
    """write everything here"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command line."""
    add_options(command, BacktestCommand, EXAMPLES)


def run(args: argparse.Namespace) -> None:
    """Print a row for each --fit-until."""
    options = BacktestCommand.from_arguments(args)
    check_outputs(options.json)
    limits = {text: _limit(text) for text in options.fit_until}
    readings, like = readings_of(args.inputs, options), read_like(options)
    tests = {
        text: [_test(reading, value, is_share, like, options) for reading in readings]
        for text, (value, is_share) in limits.items()
    }
    if options.json:
        names = [reading.curve.name for reading in readings]
        content = {
            until: {
                "summary": asdict(summarize(found)),
                "runs": {n: test and asdict(test) for n, test in zip(names, found, strict=True)},
            }
            for until, found in tests.items()
        }
        write_json(options.json, content)
    print(describe(readings, tests, options))


def _limit(text: str) -> tuple[float, bool]:
    """The number, and whether it is a share of the run's compute."""
    try:
        value, is_share = float(text.removesuffix("%")), text.endswith("%")
    except ValueError:
        value, is_share = 0.0, False
    if not 0 < value < (100 if is_share else float("inf")):
        raise ConfigError(
            f"--fit-until {text}: expected a share such as 25%, or an amount of compute above 0"
        )
    return value, is_share


def _test(
    reading: Reading, value: float, is_share: bool, like: Earlier | None, options: BacktestCommand
) -> Backtest | None:
    points = reading.curve.points
    until = value / 100 * points[-1].compute if is_share and points else value
    return backtest(reading.curve, until, options.confidence, options.within, like)


def describe(
    readings: Sequence[Reading], tests: dict[str, list[Backtest | None]], options: BacktestCommand
) -> str:
    """For a terminal."""
    level = f"{options.confidence:.0%}"
    rows: list[tuple[str, ...]] = [
        ("until", "forecast", "identified", "error", "bias", f"{level} holds", "width", "last quarter")
    ]
    for until, found in tests.items():
        s = summarize(found)
        cells = ("–",) * 5
        if s.forecast:
            quarter = f"{s.quarter_error:.3f}, {s.quarter_held:.0%}"
            cells = (f"{s.error:.3f}", f"{s.bias:+.3f}", f"{s.held:.0%}", f"{s.width:.3f}", quarter)
        rows.append((until, f"{s.forecast} of {s.runs}", str(s.identified), *cells))
    about = (
        "The forecast of the last evaluation and what was measured, over runs: median |error|, median of "
        f"measured − predicted (bias), share of the {level} intervals that hold it, their median width. Last "
        "quarter: the mean |error| of its evaluations, median over runs, and the share that is held. A "
        f"run with fewer than {MIN_FORECAST} evaluations up to there, or none after it, that has not yet "
        "risen, or has fallen, has no forecast."
    )
    if options.like:
        about += " Each forecast knows the runs of --like, but not those of the run's own recipe."
    parts = ["\n".join(table(rows)), paragraph(about, "")]
    if options.details:
        parts += [_details(until, readings, found) for until, found in tests.items()]
    return "\n\n".join([*parts, sources(readings)])


def _details(until: str, readings: Sequence[Reading], tests: Sequence[Backtest | None]) -> str:
    names = short_names([reading.curve.name for reading in readings])
    rows: list[tuple[str, ...]] = [(f"until {until}", "seen", "points", "predicted", "measured", "error")]
    for name, test in zip(names, tests, strict=True):
        if test is None:
            rows.append((name, "–", "too few before, or none after", "", "", ""))
        elif not test.predictable:
            rows.append((name, amount(test.seen), str(test.points), "no forecast", "", ""))
        else:
            end, missed = test.end, "" if test.end.inside else " *"
            predicted = interval(end.predicted, ".3f").replace(" to ", "–")
            cells = (predicted, f"{end.measured:.3f}", f"{end.error:+.3f}{missed}")
            rows.append((name, amount(test.seen), str(test.points), *cells))
    return "\n".join([*table(rows), "(* outside the interval)"])
