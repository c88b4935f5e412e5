"""`fit`: the sigmoid of any run's metrics with intervals, and what the data do not identify."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.scaling import Curve, Fit, explain, fit_curve
from trainer.scaling.commands import check_outputs, write_json
from trainer.scaling.commands.cross_checks import (
    add_cross_check_arguments,
    cross_checks,
    explain_paper,
    fit_as_paper,
    paper_json,
)
from trainer.scaling.forecast import backtest
from trainer.scaling.plot import Named, plot_curves
from trainer.scaling.reading.read import Reading, add_input_arguments, read_inputs, same_unit
from trainer.scaling.text import describe_backtest, paragraph, short_names


def add_arguments(command: argparse.ArgumentParser) -> None:
    """What to fit, how, and where to write it."""
    add_input_arguments(command)
    add_cross_check_arguments(command)
    command.add_argument("--json", type=Path, help="write the fits here, by input")
    command.add_argument("--plot", type=Path, help="plot all inputs in this file (.png, .svg or .pdf)")


def run(args: argparse.Namespace) -> None:
    """Print the fits, also of data that do not identify the ceiling: the text says so."""
    check_outputs(args.json, args.plot)
    if args.plot and args.procedure == "paper":
        raise ConfigError("--plot shows the intervals of --procedure ours; --procedure paper has none")
    readings = read_inputs(args)
    if args.plot:
        same_unit([reading.curve for reading in readings])
    labels = short_names([reading.curve.name for reading in readings])
    results: dict[str, Any] = {}
    paragraphs: list[str] = []
    drawn: list[Named] = []
    for reading, label in zip(readings, labels, strict=True):
        curve = reading.curve
        if args.procedure == "paper":
            paper = fit_as_paper(curve, args)
            text, content = explain_paper(paper, curve.unit), paper_json(paper, curve)
        else:
            fit, test = _fit(curve), backtest(curve)
            text = "\n".join(filter(None, (explain(fit, curve.unit), describe_backtest(test, curve.unit))))
            content = {**fit.to_json(), "backtest": test and asdict(test)}
            drawn.append((label, curve, fit))
        more, entries = cross_checks(curve, args)
        results[curve.name] = _to_json(reading, {**content, **entries}, args)
        paragraphs.append("\n".join([curve.name, paragraph(str(reading)), text, *more]))
    if args.plot:
        plot_curves(drawn, args.plot)
    if args.json:
        write_json(args.json, results)
    print("\n\n".join(paragraphs))


def _fit(curve: Curve) -> Fit:
    if len(curve.evaluations) < 2:
        points = "one point" if curve.evaluations else "no point"
        raise ConfigError(f"{curve.name}: there is {points}; expected several, at increasing compute")
    return fit_curve(curve)


def _to_json(reading: Reading, content: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The fit and its cross-checks, with the unit of compute, the procedure and what was read."""
    source = {
        "compute": reading.compute,
        "reward": reading.reward,
        "error": reading.error,
        "reward_range": list(args.reward_range),
        "drop_before": args.drop_before,
        "drop_early": args.drop_early,
    }
    return {"unit": reading.curve.unit, "procedure": args.procedure, **content, "source": source}
