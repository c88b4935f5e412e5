"""`fit`: the sigmoid of any run's metrics, with what it cannot tell."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from trainer.config import ConfigError
from trainer.scaling import Curve, EvalPoint, Fit, explain, fit_curve, plot_curve
from trainer.scaling.read import add_input_arguments, read_curves


def add_arguments(command: argparse.ArgumentParser) -> None:
    """What to fit, and where to write it."""
    add_input_arguments(command)
    command.add_argument("--json", type=Path, help="write the fits here, by input")
    command.add_argument("--plot", type=Path, help="write the picture here (.png or .svg); for one input")


def run(args: argparse.Namespace) -> None:
    """Print the fits; also where the data identify nothing, which is said."""
    _check_outputs(args)
    results = {}
    for curve in read_curves(args):
        result = _fit(curve)
        results[curve.name] = result.to_json()
        print(f"{curve.name}\n{explain(result, curve.unit)}")
        if args.plot:
            start = [curve.R0] if isinstance(curve.R0, EvalPoint) else []
            plot_curve([*start, *curve.points], result, args.plot, curve.unit, Path(curve.name).stem)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1, allow_nan=False))


def _fit(curve: Curve) -> Fit:
    try:
        return fit_curve(curve)
    except ConfigError as e:
        raise ConfigError(f"{curve.name}: {e}") from e


def _check_outputs(args: argparse.Namespace) -> None:
    """Before any work, so that a wrong name costs nothing."""
    if args.plot and len(args.inputs) > 1:
        raise ConfigError(f"--plot draws one input and {len(args.inputs)} were given; plot them one by one")
    if args.plot and args.plot.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot {args.plot}: expected a name ending in .png, .svg or .pdf")
    for out in (args.json, args.plot):
        if out and not out.parent.is_dir():
            raise ConfigError(f"{out}: there is no folder {out.parent}; make it first")
