"""`fit`: the sigmoid of any run's metrics with intervals, and what the data do not identify."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from trainer.config import ConfigError
from trainer.scaling import Curve, EvalPoint, Fit, explain, fit_curve
from trainer.scaling.backtest import backtest, error_at_2x
from trainer.scaling.commands import (
    ForecastOptions,
    add_options,
    check_outputs,
    read_like,
    readings_of,
    write_json,
)
from trainer.scaling.curve.average import DEFAULT
from trainer.scaling.curve.least_squares import FamilyFit, compare_families
from trainer.scaling.curve.paper import FLAGS, PaperFit, PaperGrid, paper_fit
from trainer.scaling.earlier import Earlier, describe_prior, prior_after
from trainer.scaling.plot import Named, plot_curves, reward_title
from trainer.scaling.reading.arguments import Options
from trainer.scaling.reading.read import Reading, same_unit
from trainer.scaling.text import (
    amount,
    amounts,
    describe_backtest,
    determined,
    interval,
    paragraph,
    r_squared,
    short_names,
    sources,
    table,
    why_not,
)

MANY = 3  # runs from which a table replaces the details
EXAMPLES = """\
examples:
  python -m trainer.scaling fit run.csv --plot curve.png
  python -m trainer.scaling fit trainer_state.json --reward-column eval_reward --devices 8
  python -m trainer.scaling fit verl.jsonl --reward-column val-core/aime24/acc/mean@16 --devices 64
"""
PAPER_UNIT = "GPU-hours"  # of C_mid in the paper's grid


@dataclass(frozen=True, kw_only=True)
class Procedures(Options):
    """Other ways to fit."""

    group: ClassVar[tuple[str, ...]] = ("procedures",)

    procedure: Literal["ours", "paper"] = "ours"
    """paper: that of arXiv 2510.13786, a grid over A and C_mid without weights or intervals"""
    paper_A: Annotated[tuple[float, float, float], ("LOW", "HIGH", "STEP")] = PaperGrid().A
    """the paper's grid of A"""
    paper_c_mid: Annotated[tuple[float, float, float] | None, ("LOW", "HIGH", "N")] = None
    """the paper's grid of C_mid (default: 100 40000 100, in GPU-hours)"""
    paper_spacing: Literal["linear", "log"] = "linear"
    """spacing of the grid of C_mid"""
    families: bool = False
    """compare the sigmoid with an exponential, a logistic and power laws: how well each predicts"""


@dataclass(frozen=True, kw_only=True)
class FitCommand(Procedures, ForecastOptions):
    """What to fit, by which procedure, and where to write it."""

    details: bool = False
    """with 3 runs or more: everything about each, instead of a table"""
    json: Annotated[Path | None, "FILE"] = None
    """write the fits here, by input"""
    plot: Annotated[Path | None, "FILE"] = None
    """plot all inputs in this file (.png, .svg or .pdf)"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command line."""
    add_options(command, FitCommand, EXAMPLES)


def run(args: argparse.Namespace) -> None:
    """Print the fits, also of data that do not identify the ceiling: the text says so."""
    options = FitCommand.from_arguments(args)
    check_outputs(options.json, options.plot)
    if options.plot and options.procedure == "paper":
        raise ConfigError("--plot shows the intervals of --procedure ours; --procedure paper has none")
    readings, like = readings_of(args.inputs, options), read_like(options)
    if options.plot:
        same_unit([reading.curve for reading in readings])
    labels = short_names([reading.curve.name for reading in readings])
    results: dict[str, Any] = {}
    paragraphs: list[str] = []
    drawn: list[Named] = []
    for reading, label in zip(readings, labels, strict=True):
        curve = reading.curve
        if options.procedure == "paper":
            paper = _fit_as_paper(curve, options)
            texts, content = [_explain_paper(paper, curve.unit)], _paper_json(paper, curve)
        else:
            fit = _fit(curve, like, options)
            test = backtest(curve, None, options.confidence, options.within, like)
            texts = [text for text in (explain(fit, curve.unit), describe_backtest(test, curve.unit)) if text]
            if like and fit.predictable:
                texts.append(paragraph(describe_prior(prior_after(like, curve), like.without(curve))))
            content = fit.to_json() | {"error_at_2x": error_at_2x(test), "backtest": test and asdict(test)}
            drawn.append((label, curve, fit))
        if options.families:
            families = compare_families(curve)
            texts.append(_explain_families(families))
            content["families"] = [asdict(family) for family in families]
        results[curve.name] = _to_json(reading, content, options)
        paragraphs.append("\n".join([sources([reading]), *texts]))
    if options.plot:
        plot_curves(drawn, options.plot, reward_title([reading.reward_column for reading in readings]))
    if options.json:
        write_json(options.json, results)
    if len(drawn) < MANY or options.details or options.families:
        print("\n\n".join(paragraphs))
    else:
        print(_table(drawn, readings))


def _table(runs: Sequence[Named], readings: Sequence[Reading]) -> str:
    """A row for each run, then what was read and why some ceilings are not identified."""
    rows: list[tuple[str, ...]] = [("run", "ceiling A", "efficiency B", "midpoint C_mid", "R²")]
    units = {curve.unit for _, curve, _ in runs}
    for name, curve, fit in runs:
        A, B = interval(fit.A, ".3f", fit.identified), interval(fit.B, ".2f", fit.identified)
        C_mid = amounts(fit.C_mid, fit.identified) + (f" {curve.unit}" if len(units) > 1 else "")
        shown = fit.predictable, determined(fit, fit.B), determined(fit, fit.C_mid)
        cells = [cell if show else "–" for cell, show in zip((A, B, C_mid), shown, strict=True)]
        rows.append((name, *(cell.replace(" to ", "–") for cell in cells), r_squared(fit)))
    unit = f"; C_mid in {units.pop()}" if len(units) == 1 else ""
    caption = f"({runs[0][2].confidence:.0%} intervals{unit}; a range alone: the ceiling is not identified)"
    texts = [f"{name}: {why_not(fit)}" for name, _, fit in runs if not fit.identified]
    details = "More about each run: --details. Do they differ? python -m trainer.scaling compare."
    texts = [paragraph(text, "") for text in (caption, *texts)]
    return "\n".join([*table(rows), *texts, sources(readings), paragraph(details, "")])


def _fit(curve: Curve, like: Earlier | None, options: FitCommand) -> Fit:
    if len(curve.evaluations) < 2:
        points = "one point" if curve.evaluations else "no point"
        raise ConfigError(f"{curve.name}: there is {points}; expected several, at increasing compute")
    prior = prior_after(like, curve) if like else DEFAULT
    return fit_curve(curve, options.confidence, options.within, prior=prior)


def _to_json(reading: Reading, content: dict[str, Any], options: FitCommand) -> dict[str, Any]:
    """The fit and its cross-checks, the unit of compute, the procedure and what was read; the band last."""
    source = {
        "compute": reading.compute,
        "reward": reading.reward,
        "error": reading.error,
        "notes": reading.notes,
        "reward_range": list(options.reward_range),
        "drop_before": options.drop_before,
        "drop_early": options.drop_early,
    }
    band = {"band": content.pop("band")} if "band" in content else {}
    return {"unit": reading.curve.unit, "procedure": options.procedure, **content, "source": source, **band}


def _fit_as_paper(curve: Curve, options: FitCommand) -> PaperFit:
    """The paper's fit. ConfigError: no R0, or no grid for this unit."""
    R0 = curve.R0.pass_rate if isinstance(curve.R0, EvalPoint) else curve.R0
    if R0 is None:
        raise ConfigError(f"{curve.name}: the paper's procedure needs R0: a point at compute 0, or --r0")
    if options.paper_c_mid is None and curve.unit != PAPER_UNIT:
        raise ConfigError(
            f"{curve.name}: the paper's grid of C_mid is in {PAPER_UNIT}, the compute in {curve.unit}; "
            "set --paper-c-mid LOW HIGH N"
        )
    low, high, count = options.paper_c_mid or PaperGrid().C_mid
    grid = PaperGrid(options.paper_A, (low, high, int(count)), options.paper_spacing)
    try:
        return paper_fit([p.compute for p in curve.points], [p.pass_rate for p in curve.points], R0, grid)
    except ConfigError as e:
        raise ConfigError(f"{curve.name}: {e}") from e


def _explain_paper(found: PaperFit, unit: str) -> str:
    (a, b, step), (low, high, n) = found.grid.A, found.grid.C_mid
    return "\n".join([
        "The paper's procedure (least squares on a grid; no weights, no intervals):",
        f"  A {found.A:.3f}, B {found.B:.2f}, C_mid {amount(found.C_mid, 4)} {unit}, with R0 {found.R0:.3f}",
        f"  grid: A from {a:g} to {b:g} by {step:g}, C_mid from {low:g} to {high:g} "
        f"at {n:g} {found.grid.spacing} steps",
        *(f"  {FLAGS[flag]}" for flag in found.flags),
    ])  # fmt: skip


def _paper_json(found: PaperFit, curve: Curve) -> dict[str, Any]:
    """With the keys of the default fit; the ends of the intervals are null."""
    numbers = {k: {"value": getattr(found, k), "low": None, "high": None} for k in ("A", "B", "C_mid", "R0")}
    ends = [curve.points[0].compute, curve.points[-1].compute]
    return {**asdict(found), **numbers, "points": len(curve.points), "compute_range": ends}


def _explain_families(families: Sequence[FamilyFit]) -> str:
    best = min((f.aicc for f in families if f.aicc is not None), default=math.nan)
    rows = [
        "Families of curves. Ahead: median error in the second half, predicted from the first.",
        "ΔAICc takes errors to be independent. The logistic's L is R0, where that is known.",
        f"  {'':11} {'ahead':>7} {'ΔAICc':>8} {'SSE':>8}  parameters",
    ]
    for f in sorted(families, key=lambda f: math.inf if f.held_out is None else f.held_out):
        aicc = "–" if f.aicc is None else f"+{f.aicc - best:.1f}"
        ahead = "–" if f.held_out is None else f"{f.held_out:.4f}"
        numbers = ", ".join(f"{k} {v:.4g}" for k, v in f.curve.items())
        rows.append(f"  {f.family:11} {ahead:>7} {aicc:>8} {f.sse:8.2g}  {numbers}")
    return "\n".join(rows)
