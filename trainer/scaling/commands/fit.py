"""`fit`: the sigmoid of any run's metrics with intervals, and what the data do not identify."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainer.config import ConfigError
from trainer.scaling.commands import ForecastCommand, Json, Picture, sources, write_json
from trainer.scaling.curve.fit import Fit
from trainer.scaling.curve.paper import FamilyFit, compare_families
from trainer.scaling.forecast import backtest, error_at_2x
from trainer.scaling.layout import FORMS, Block, Rows, paragraph, short_names
from trainer.scaling.plot import plot, reward_title
from trainer.scaling.reading.read import Reading, read_inputs, same_unit
from trainer.scaling.text import describe_backtest, explain, parameters, r_squared, why_not


@dataclass(frozen=True, kw_only=True)
class Command(ForecastCommand):
    """Fit each run for itself.

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
            if len(curve.evaluations) < 2:
                points = "one point" if curve.evaluations else "no point"
                raise ConfigError(f"{curve.name}: there is {points}; expected several, at increasing compute")
            fits.append(fit := self.fit(curve))
            test = backtest(curve, None, self.confidence, self.within, self.earlier)
            said = [explain(fit, curve.unit), describe_backtest(test, curve.unit)]
            said += map(paragraph, self.describe_prior(curve) if fit.predictable else ())
            content: dict[str, Any] = {"unit": curve.unit} | fit.to_json()
            content |= {"error_at_2x": error_at_2x(test), "backtest": test and asdict(test)}
            if self.families:
                families = compare_families(curve)
                said.append(_families(families))
                content["families"] = [asdict(family) for family in families]
            source = {name: getattr(reading, name) for name in ("compute", "reward", "error", "notes")}
            source |= {"reward_range": list(self.reward_range), "drop_before": self.drop_before}
            content |= {"source": source, "band": content.pop("band")}
            results[curve.name] = content
            texts.append("\n".join(filter(None, [sources([reading]), *said])))
        labels = short_names([curve.name for curve in curves])
        if self.plot:
            columns = [reading.reward_column for reading in readings]
            plot(list(zip(labels, curves, fits, strict=True)), self.plot, reward_title(columns))
        write_json(self.json, results)
        each = len(fits) < 3 or self.details or self.families
        print("\n\n".join(texts) if each else _table(dict(zip(labels, fits, strict=True)), readings))


def _table(fits: dict[str, Fit], readings: Sequence[Reading]) -> str:
    """A row for each run, then what was read and why some ceilings are not identified."""
    rows: Rows = [("run", "ceiling A", "efficiency B", "midpoint C_mid", "R²")]
    units = {reading.curve.unit for reading in readings}
    for (name, fit), reading in zip(fits.items(), readings, strict=True):
        known = parameters(fit)
        if "C_mid" in known and len(units) > 1:
            known["C_mid"] += f" {reading.curve.unit}"
        rows.append((name, *(known.get(parameter, "–") for parameter in FORMS), r_squared(fit)))
    unit = "" if len(units) > 1 else f"; C_mid in {units.pop()}"
    level = f"{fits[rows[1][0]].confidence:.0%}"
    notes = [f"({level} intervals{unit}; a range alone: the ceiling is not identified)"]
    notes += [f"{name}: {why_not(fit)}" for name, fit in fits.items() if not fit.identified]
    details = "More about each run: --details. Do they differ? python -m trainer.scaling compare."
    return "\n".join([str(Block(rows, notes=notes)), sources(readings), paragraph(details, "")])


def _families(families: Sequence[FamilyFit]) -> str:
    best = min((f.aicc for f in families if f.aicc is not None), default=math.nan)
    rows: Rows = [("family", "ahead", "ΔAICc", "SSE", "parameters")]
    for f in sorted(families, key=lambda f: math.inf if f.held_out is None else f.held_out):
        aicc = "–" if f.aicc is None else f"+{f.aicc - best:.1f}"
        ahead = "–" if f.held_out is None else f"{f.held_out:.4f}"
        numbers = ", ".join(f"{k} {v:.4g}" for k, v in f.curve.items())
        rows.append((f.family, ahead, aicc, f"{f.sse:.2g}", numbers))
    about = (
        "Families of curves. Ahead: median error in the second half, predicted from the first. ΔAICc takes "
        "errors to be independent. The logistic's L is R0, where that is known."
    )
    return str(Block(rows, notes=[about]))
