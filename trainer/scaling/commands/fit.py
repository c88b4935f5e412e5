"""`fit`: the sigmoid of any run's metrics, with what it cannot tell."""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.scaling import Curve, EvalPoint, Fit, explain, fit_curve, plot_curve
from trainer.scaling.commands.beside import (
    add_beside_arguments,
    beside,
    explain_paper,
    fit_as_paper,
    paper_json,
)
from trainer.scaling.read import Reading, add_input_arguments, read_inputs

WIDTH = 88  # of a terminal line


def add_arguments(command: argparse.ArgumentParser) -> None:
    """What to fit, and where to write it."""
    add_input_arguments(command)
    add_beside_arguments(command)
    command.add_argument("--json", type=Path, help="write the fits here, by input")
    command.add_argument(
        "--plot", type=Path, help="write the picture here (.png, .svg or .pdf); of several, NAME-RUN each"
    )


def run(args: argparse.Namespace) -> None:
    """Print the fits; also where the data identify nothing, which is said."""
    _check_outputs(args)
    readings = read_inputs(args)
    results = {}
    for i, reading in enumerate(readings):
        curve = reading.curve
        source = textwrap.fill(str(reading), WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        if args.procedure == "paper":
            found = fit_as_paper(curve, args)
            words, content = explain_paper(found, curve.unit), paper_json(found, curve)
        else:
            result = _fit(curve)
            words, content = explain(result, curve.unit), result.to_json()
        more, entries = beside(curve, args)
        results[curve.name] = _to_json(reading, {**content, **entries}, args)
        if i:
            print()
        print("\n".join([curve.name, source, words, *more]))
        if args.plot:
            path = args.plot if len(readings) == 1 else _beside(args.plot, curve.name, i)
            _plot(curve, result, path)
            print(f"  picture: {path}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1, allow_nan=False, ensure_ascii=False))


def _fit(curve: Curve) -> Fit:
    held = len(curve.points) + isinstance(curve.R0, EvalPoint)
    if held < 2:
        raise ConfigError(f"{curve.name}: there is {held} point; expected several, at growing compute")
    try:
        return fit_curve(curve)
    except ConfigError as e:
        raise ConfigError(f"{curve.name}: {e}") from e


def _to_json(reading: Reading, content: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The fit and what is told beside it, with the unit of compute, the procedure and what was read."""
    source = {"compute": reading.compute, "reward": reading.reward, "error": reading.error}
    given = {"reward_range": list(args.reward_range), "drop_before": args.drop_before}
    told = {"unit": reading.curve.unit, "procedure": args.procedure}
    return {**told, **content, "source": {**source, **given}}


def _plot(curve: Curve, result: Fit, path: Path) -> None:
    start = [curve.R0] if isinstance(curve.R0, EvalPoint) else []
    plot_curve([*start, *curve.points], result, path, curve.unit, Path(curve.name).stem)


def _beside(path: Path, name: str, i: int) -> Path:
    """`curve.png` and the run `a/b.csv`: `curve-1-b.png`."""
    run = re.sub(r"[^\w.-]+", "_", Path(name).stem)
    return path.with_name(f"{path.stem}-{i + 1}-{run}{path.suffix}")


def _check_outputs(args: argparse.Namespace) -> None:
    """Before any work, so that a wrong name costs nothing."""
    if args.plot and args.procedure == "paper":
        raise ConfigError("--plot draws the bands of --procedure ours; --procedure paper has none")
    if args.plot and args.plot.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot {args.plot}: expected a name ending in .png, .svg or .pdf")
    for out in (args.json, args.plot):
        if out and not out.parent.is_dir():
            raise ConfigError(f"{out}: there is no folder {out.parent}; make it first")
