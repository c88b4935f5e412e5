"""`fit`: the sigmoid of any run's metrics, with what it cannot tell."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.scaling import Curve, EvalPoint, Fit, explain, fit_curve
from trainer.scaling.backtest import backtest, backtest_words
from trainer.scaling.commands.cross_checks import (
    add_beside_arguments,
    beside,
    explain_paper,
    fit_as_paper,
    paper_json,
)
from trainer.scaling.commands.text import check_outputs, write_json
from trainer.scaling.plot import Named, plot_curves
from trainer.scaling.reading.read import Reading, add_input_arguments, read_inputs, same_unit
from trainer.scaling.text import paragraph, short_names


def add_arguments(command: argparse.ArgumentParser) -> None:
    """What to fit, and where to write it."""
    add_input_arguments(command)
    add_beside_arguments(command)
    command.add_argument("--json", type=Path, help="write the fits here, by input")
    command.add_argument("--plot", type=Path, help="write the picture of all here (.png, .svg or .pdf)")


def run(args: argparse.Namespace) -> None:
    """Print the fits; also where the data identify nothing, which is said."""
    check_outputs((args.json, (".json",)), (args.plot, (".png", ".svg", ".pdf")))
    if args.plot and args.procedure == "paper":
        raise ConfigError("--plot draws the bands of --procedure ours; --procedure paper has none")
    readings = read_inputs(args)
    if args.plot:
        same_unit([reading.curve for reading in readings])
    labels = short_names([reading.curve.name for reading in readings])
    results: dict[str, Any] = {}
    told: list[str] = []
    drawn: list[Named] = []
    for reading, label in zip(readings, labels, strict=True):
        curve = reading.curve
        if args.procedure == "paper":
            found = fit_as_paper(curve, args)
            words, content = explain_paper(found, curve.unit), paper_json(found, curve)
        else:
            result = _fit(curve)
            held = backtest(curve)
            words = "\n".join(filter(None, (explain(result, curve.unit), backtest_words(held, curve.unit))))
            content = {**result.to_json(), "backtest": held and asdict(held)}
            drawn.append((label, curve, result))
        more, entries = beside(curve, args)
        results[curve.name] = _to_json(reading, {**content, **entries}, args)
        told.append("\n".join([curve.name, paragraph(str(reading)), words, *more]))
    if args.plot:
        plot_curves(drawn, args.plot)
    if args.json:
        write_json(args.json, results)
    print("\n\n".join(told))


def _fit(curve: Curve) -> Fit:
    held = len(curve.points) + isinstance(curve.R0, EvalPoint)
    if held < 2:
        points = "one point" if held else "no point"
        raise ConfigError(f"{curve.name}: there is {points}; expected several, at growing compute")
    return fit_curve(curve)


def _to_json(reading: Reading, content: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The fit and what is told beside it, with the unit of compute, the procedure and what was read."""
    source = {"compute": reading.compute, "reward": reading.reward, "error": reading.error}
    given = {
        "reward_range": list(args.reward_range),
        "drop_before": args.drop_before,
        "drop_early": args.drop_early,
    }
    told = {"unit": reading.curve.unit, "procedure": args.procedure}
    return {**told, **content, "source": {**source, **given}}
