"""`backtest`: were finished runs forecast rightly from their beginnings?"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

from trainer.config import ConfigError
from trainer.scaling.commands import ForecastCommand, Json, sources, write_json
from trainer.scaling.curve.points import MIN_FORECAST
from trainer.scaling.forecast import CARRIED, Backtest, backtest, summarize
from trainer.scaling.layout import Block, Rows, amount, interval, short_names
from trainer.scaling.reading.read import read_inputs


@dataclass(frozen=True, kw_only=True)
class Command(ForecastCommand):
    """Forecast the last quarter of each run from its beginning.

    examples:
      python -m trainer.scaling backtest run-*.csv
      python -m trainer.scaling backtest scalerl.csv --fit-until 8000 --details   the paper: up to 8k, of 16k
      python -m trainer.scaling backtest runs.toml --like runs.toml    with what the other recipes' runs say
    """

    fit_until: Annotated[tuple[str, ...], "UNTIL"] = ("10%", "25%", "50%")
    """fit each run up to this share of its compute, such as 25%, or up to this compute (default:
    10% 25% 50%); the last quarter of the run is forecast"""
    details: bool = False
    """a row for each run, too"""
    json: Json = None
    """write everything here"""

    def run(self, inputs: Sequence[str]) -> None:
        """Print a row for each --fit-until."""
        limits = {text: _limit(text) for text in self.fit_until}
        readings = read_inputs(inputs, self)
        names, each_limit, content = [reading.curve.name for reading in readings], {}, {}
        for text, (value, is_share) in limits.items():
            tests = each_limit[text] = list[Backtest | None]()
            for curve in map(self.curve, readings):
                share = value / 100 * curve.points[-1].compute if is_share and curve.points else value
                tests.append(backtest(curve, share, self.confidence, self.within, self.earlier))
            content[text] = {
                "summary": summarize(tests),
                "runs": {name: test and asdict(test) for name, test in zip(names, tests, strict=True)},
            }
        write_json(self.json, content)
        blocks = [self._summary({text: summarize(tests) for text, tests in each_limit.items()})]
        if self.details:
            blocks += [_details(text, names, tests) for text, tests in each_limit.items()]
        print("\n\n".join([*map(str, blocks), sources(readings)]))

    def _summary(self, summaries: Mapping[str, Mapping[str, float]]) -> Block:
        level = f"{self.confidence:.0%}"
        head = ("until", "forecast", "identified", "error", "bias", "held", "width", "level", "carried")
        forms = ["{error:.3f}", "{bias:+.3f}", "{coverage:.0%}", "{width:.3f}"]
        forms += ["{level_error:.3f}, {level_coverage:.0%}", "{carried_error:.3f}"]
        rows: Rows = [head]
        for until, s in summaries.items():
            cells = (form.format_map(s) if s["forecast"] else "–" for form in forms)
            rows.append((until, f"{s['forecast']} of {s['runs']}", str(s["identified"]), *cells))
        about = (
            "The forecast of the last evaluation and what was measured, over runs: median |error|, median "
            f"of measured − predicted (bias), share of the {level} intervals that hold it, their width. "
            "Level: the mean of the last quarter, its median |error| and the share that is held. Carried: "
            f"its error if a run stays where it is (the mean of the last {CARRIED} evaluations seen, a "
            f"quarter at most). A run with fewer than {MIN_FORECAST} evaluations up to there, or none "
            "after it, or that has fallen, has no forecast."
        )
        if self.like:
            about += " Each forecast knows the runs of --like, but not those of the run's own recipe."
        return Block(rows, notes=[about])


def _limit(text: str) -> tuple[float, bool]:
    """The number, and True if it is a share of the run's compute."""
    number, is_share = text.removesuffix("%"), text.endswith("%")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not 0 < value < (100 if is_share else math.inf):
        raise ConfigError(
            f"--fit-until {text}: expected a share such as 25%, or an amount of compute above 0"
        )
    return value, is_share


def _details(until: str, names: Sequence[str], tests: Sequence[Backtest | None]) -> Block:
    rows: Rows = [(f"until {until}", "seen", "points", "predicted", "measured", "error")]
    for name, test in zip(short_names(names), tests, strict=True):
        seen = ("–", "") if test is None else (amount(test.seen), str(test.points))
        cells = ("too few before, or none after" if test is None else "no forecast", "", "")
        if test and test.predictable:
            end = test.end
            missed = "" if end.inside else " *"
            cells = (interval(end.predicted, "A"), f"{end.measured:.3f}", f"{end.error:+.3f}{missed}")
        rows.append((name, *seen, *cells))
    starred = any(cell.endswith("*") for row in rows for cell in row)
    return Block(rows, notes=["(* outside the interval)"] * starred)
