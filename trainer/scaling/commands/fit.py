"""`fit`: the sigmoid of any run's metrics with intervals, and what the data do not identify."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from trainer.config import ConfigError
from trainer.scaling.commands import ForecastCommand, Json, Picture, sources, write_json
from trainer.scaling.curve.fit import Fit
from trainer.scaling.curve.paper import FamilyFit, compare_families
from trainer.scaling.curve.sigmoid import Curve
from trainer.scaling.forecast import backtest, error_at_2x
from trainer.scaling.layout import amounts, interval, paragraph, short_names, table
from trainer.scaling.plot import plot, reward_title
from trainer.scaling.reading.read import Reading, read_inputs, same_unit
from trainer.scaling.text import describe_backtest, determined, explain, r_squared, why_not


@dataclass(frozen=True, kw_only=True)
class Command(ForecastCommand):
    """Options: further output, and the files to write."""

    examples: ClassVar[str] = """\
examples:
  python -m trainer.scaling fit run.csv --plot curve.png
  python -m trainer.scaling fit trainer_state.json --reward-column eval_reward --devices 8
  python -m trainer.scaling fit verl.jsonl --reward-column val-core/aime24/acc/mean@16 --devices 64
"""

    families: bool = False
    """compare the sigmoid with an exponential, a logistic and power laws: how well each predicts"""
    details: bool = False
    """with 3 runs or more: everything about each, instead of a table"""
    json: Json = None
    """write the fits here, by input"""
    plot: Picture = None
    """plot all inputs in this file (.png, .svg or .pdf)"""

    def run(self, inputs: Sequence[str]) -> None:
        """Print the fits, also of data that do not identify the ceiling: the text says so."""
        readings = read_inputs(inputs, self)
        curves = list(map(self.curve, readings))
        if self.plot:
            same_unit(curves)
        fits, texts, results = list[Fit](), list[str](), {}
        for reading, curve in zip(readings, curves, strict=True):
            fits.append(fit := self._fit(curve))
            test = backtest(curve, None, self.confidence, self.within, self.earlier)
            said = [explain(fit, curve.unit), describe_backtest(test, curve.unit)]
            said += map(paragraph, self.describe_prior(curve) if fit.predictable else ())
            content = fit.to_json() | {"error_at_2x": error_at_2x(test), "backtest": test and asdict(test)}
            if self.families:
                families = compare_families(curve)
                said.append(_explain_families(families))
                content["families"] = [asdict(family) for family in families]
            results[curve.name] = self._to_json(reading, content)
            texts.append("\n".join(filter(None, [sources([reading]), *said])))
        labels = short_names([curve.name for curve in curves])
        if self.plot:
            columns = [reading.reward_column for reading in readings]
            plot(list(zip(labels, curves, fits, strict=True)), self.plot, reward_title(columns))
        write_json(self.json, results)
        if len(fits) < 3 or self.details or self.families:
            print("\n\n".join(texts))
        else:
            print(_table(labels, fits, readings))

    def _fit(self, curve: Curve) -> Fit:
        if len(curve.evaluations) < 2:
            points = "one point" if curve.evaluations else "no point"
            raise ConfigError(f"{curve.name}: there is {points}; expected several, at increasing compute")
        return self.fit(curve)

    def _to_json(self, reading: Reading, content: dict[str, Any]) -> dict[str, Any]:
        """The unit, the fit and its cross-checks, and what was read; the band last."""
        source = {name: getattr(reading, name) for name in ("compute", "reward", "error", "notes")}
        source |= {"reward_range": list(self.reward_range), "drop_before": self.drop_before}
        band = content.pop("band")
        return {"unit": reading.curve.unit, **content, "source": source, "band": band}


def _table(labels: Sequence[str], fits: Sequence[Fit], readings: Sequence[Reading]) -> str:
    """A row for each run, then what was read and why some ceilings are not identified."""
    rows: list[tuple[str, ...]] = [("run", "ceiling A", "efficiency B", "midpoint C_mid", "R²")]
    units = list(dict.fromkeys(reading.curve.unit for reading in readings))
    for name, fit, reading in zip(labels, fits, readings, strict=True):
        A, B = interval(fit.A, ".3f", fit.identified), interval(fit.B, ".2f", fit.identified)
        C_mid = amounts(fit.C_mid, fit.identified) + (f" {reading.curve.unit}" if units[1:] else "")
        shown = fit.predictable, determined(fit, fit.B), determined(fit, fit.C_mid)
        cells = [cell if show else "–" for cell, show in zip((A, B, C_mid), shown, strict=True)]
        rows.append((name, *(cell.replace(" to ", "–") for cell in cells), r_squared(fit)))
    unit = "" if units[1:] else f"; C_mid in {units[0]}"
    caption = f"({fits[0].confidence:.0%} intervals{unit}; a range alone: the ceiling is not identified)"
    unknown = [
        f"{name}: {why_not(fit)}" for name, fit in zip(labels, fits, strict=True) if not fit.identified
    ]
    texts = [paragraph(text, "") for text in (caption, *unknown)]
    details = "More about each run: --details. Do they differ? python -m trainer.scaling compare."
    return "\n".join([*table(rows), *texts, sources(readings), paragraph(details, "")])


def _explain_families(families: Sequence[FamilyFit]) -> str:
    best = min((f.aicc for f in families if f.aicc is not None), default=math.nan)
    rows = [("family", "ahead", "ΔAICc", "SSE", "parameters")]
    for f in sorted(families, key=lambda f: math.inf if f.held_out is None else f.held_out):
        aicc = "–" if f.aicc is None else f"+{f.aicc - best:.1f}"
        ahead = "–" if f.held_out is None else f"{f.held_out:.4f}"
        numbers = ", ".join(f"{k} {v:.4g}" for k, v in f.curve.items())
        rows.append((f.family, ahead, aicc, f"{f.sse:.2g}", numbers))
    about = (
        "Families of curves. Ahead: median error in the second half, predicted from the first.",
        "ΔAICc takes errors to be independent. The logistic's L is R0, where that is known.",
    )
    return "\n".join([*about, *(f"  {line}" for line in table(rows))])
