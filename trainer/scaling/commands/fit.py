"""`fit`: the sigmoid of any run's metrics with intervals, and what the data do not identify."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from trainer.config import ConfigError
from trainer.scaling.commands import ForecastCommand, Json, Picture, sources, write_json
from trainer.scaling.curve.fit import Fit, fit_curve
from trainer.scaling.curve.paper import FamilyFit, compare_families
from trainer.scaling.curve.sigmoid import Curve
from trainer.scaling.forecast import backtest, error_at_2x
from trainer.scaling.layout import FORMS, Block, Rows, amount, interval, level, paragraph, short_names
from trainer.scaling.parts import by_difficulty, by_task, shared_start
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
    by: Literal["task", "difficulty"] | None = None
    """of one run: a fit of each task or held-out set (columns such as eval/NAME/pass_rate), or of each third
    of the held-out prompts by their pass rates (run folders of ours), with one start-up transient for all"""
    json: Json = None
    """write the fits here, by input"""
    plot: Picture = None
    """plot all inputs in this file (.png, .svg or .pdf)"""

    def run(self, inputs: Sequence[str]) -> None:
        """Print the fits, also of data that do not identify the ceiling: the text says so."""
        if self.by:
            return self._parts(inputs)
        readings = read_inputs(inputs, self)
        curves = list(map(self.curve, readings))
        if self.plot:
            same_unit(curves)
        fits, texts, results = list[Fit](), list[str](), {}
        for reading, curve in zip(readings, curves, strict=True):
            _check_points(curve, reading)
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

    def _parts(self, inputs: Sequence[str]) -> None:
        """Print a row for each task of a run, or each third of its prompts."""
        if len(inputs) != 1 or self.like or self.families or self.details:
            raise ConfigError(
                "--by is of one run, without --like (its parts are learned from each other), "
                "--families and --details"
            )
        if self.by == "task":
            tasks = by_task(inputs[0], self)
            readings, curves = list(tasks.values()), {name: self.curve(task) for name, task in tasks.items()}
        else:
            reading, curves = by_difficulty(inputs[0], self)
            readings = [reading]
        for curve in curves.values():
            _check_points(curve, readings[0])
        fits = {
            name: fit_curve(curve, self.confidence, self.within, prior)
            for (name, curve), prior in zip(curves.items(), shared_start(list(curves.values())), strict=True)
        }
        if self.plot:
            parts = [(name, curve, fits[name]) for name, curve in curves.items()]
            plot(parts, self.plot, reward_title([reading.reward_column for reading in readings]))
        write_json(
            self.json, {name: {"unit": curves[name].unit} | fit.to_json() for name, fit in fits.items()}
        )
        print(f"{_parts_table(self.by or '', curves, fits)}\n{sources(readings)}")


def _check_points(curve: Curve, reading: Reading) -> None:
    """ConfigError: the curve is a single evaluation, or none."""
    if len(curve.evaluations) < 2:
        points = "one point" if curve.evaluations else "no point"
        text = f"{curve.name}: there is {points}; expected several, at increasing compute."
        raise ConfigError(" ".join([text, *reading.notes]))


def _parts_table(by: str, curves: Mapping[str, Curve], fits: Mapping[str, Fit]) -> Block:
    """A row for each part of a run: its level at the end of the data, its forecast and its ceiling."""
    ends = {curve.points[-1].compute: curve.unit for curve in curves.values() if curve.points}
    last = max(ends)
    rows: Rows = [(by, f"at {amount(last)} {ends[last]}", "at 2× the compute", "ceiling A")]
    notes = [f"({level(next(iter(fits.values())).confidence)} intervals; one start-up transient for all)"]
    for name, fit in fits.items():
        ahead = [interval(fit.at(c), "A") if fit.has_forecast else "–" for c in (last, 2 * last)]
        rows.append((name, *ahead, parameters(fit).get("A", "–")))
        notes += [] if fit.has_forecast else [f"{name}: there is no forecast: {fit.reasons}"]
    return Block(rows, notes=notes)


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
    confidence = level(fits[rows[1][0]].confidence)
    notes = [f"({confidence} intervals{unit}; a range alone: the ceiling is not identified)"]
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
