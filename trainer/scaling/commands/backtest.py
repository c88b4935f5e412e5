"""`backtest`: were finished runs forecast rightly from their beginnings?"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, ClassVar

from trainer.config import ConfigError
from trainer.scaling.commands import ForecastCommand, Json, sources, write_json
from trainer.scaling.curve.points import MIN_FORECAST
from trainer.scaling.forecast import Backtest, backtest, summarize
from trainer.scaling.layout import amount, interval, paragraph, short_names, table
from trainer.scaling.reading.read import read_inputs

Tests = Mapping[str, Sequence[Backtest | None]]  # by limit, one for each run


@dataclass(frozen=True, kw_only=True)
class Command(ForecastCommand):
    """Options: the compute up to which the runs are fitted, and the file for the result."""

    examples: ClassVar[str] = """\
examples:
  python -m trainer.scaling backtest run-*.csv
  python -m trainer.scaling backtest scalerl.csv --fit-until 8000 --details    the paper: up to 8k, then 16k
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
        names = [reading.curve.name for reading in readings]
        tests: dict[str, list[Backtest | None]] = {text: [] for text in limits}
        for text, (value, is_share) in limits.items():
            for curve in map(self.curve, readings):
                share = value / 100 * curve.points[-1].compute if is_share and curve.points else value
                tests[text].append(backtest(curve, share, self.confidence, self.within, self.earlier))
        content = {
            until: {
                "summary": asdict(summarize(each)),
                "runs": {name: test and asdict(test) for name, test in zip(names, each, strict=True)},
            }
            for until, each in tests.items()
        }
        write_json(self.json, content)
        texts = [self._summary(tests)]
        if self.details:
            texts += [_details(until, names, each) for until, each in tests.items()]
        print("\n\n".join([*texts, sources(readings)]))

    def _summary(self, tests: Tests) -> str:
        level = f"{self.confidence:.0%}"
        head = ("until", "forecast", "identified", "error", "bias", f"{level} holds", "width", "last quarter")
        rows: list[tuple[str, ...]] = [head]
        for until, each in tests.items():
            s = summarize(each)
            cells = ("–",) * 5
            if s.forecast:
                quarter = f"{s.quarter_error:.3f}, {s.quarter_coverage:.0%}"
                cells = (f"{s.error:.3f}", f"{s.bias:+.3f}", f"{s.coverage:.0%}", f"{s.width:.3f}", quarter)
            rows.append((until, f"{s.forecast} of {s.runs}", str(s.identified), *cells))
        about = (
            "The forecast of the last evaluation and what was measured, over runs: median |error|, median of "
            f"measured − predicted (bias), share of the {level} intervals that hold it, their median width. "
            "Last quarter: the mean |error| of its evaluations, median over runs, and the share that is "
            f"held. A run with fewer than {MIN_FORECAST} evaluations up to there, or none after it, that has "
            "not yet risen, or has fallen, has no forecast."
        )
        if self.like:
            about += " Each forecast knows the runs of --like, but not those of the run's own recipe."
        return "\n".join([*table(rows), "", paragraph(about, "")])


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


def _details(until: str, names: Sequence[str], tests: Sequence[Backtest | None]) -> str:
    rows: list[tuple[str, ...]] = [(f"until {until}", "seen", "points", "predicted", "measured", "error")]
    for name, test in zip(short_names(names), tests, strict=True):
        seen = ("–", "") if test is None else (amount(test.seen), str(test.points))
        cells = ("too few before, or none after" if test is None else "no forecast", "", "")
        if test and test.predictable:
            predicted = interval(test.end.predicted, ".3f").replace(" to ", "–")
            missed = "" if test.end.inside else " *"
            cells = (predicted, f"{test.end.measured:.3f}", f"{test.end.error:+.3f}{missed}")
        rows.append((name, *seen, *cells))
    return "\n".join([*table(rows), "(* outside the interval)"])
