"""Cross-checks of `fit`: the paper's procedure instead of ours, and other families of curves."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from trainer.config import ConfigError
from trainer.scaling import Curve, EvalPoint
from trainer.scaling.alternatives.families import FamilyFit, compare_families
from trainer.scaling.alternatives.paper import FLAGS, PaperFit, PaperGrid, paper_fit
from trainer.scaling.text import amount

PAPER_UNIT = "GPU-hours"  # of C_mid in the paper's grid


def add_cross_check_arguments(command: argparse.ArgumentParser) -> None:
    """The procedure and the families, in a group of their own."""
    add = command.add_argument_group("procedures").add_argument
    add(
        "--procedure", choices=("ours", "paper"), default="ours",
        help="paper: that of arXiv 2510.13786, a grid over A and C_mid without weights or intervals",
    )  # fmt: skip
    grid = PaperGrid()
    add(
        "--paper-A", type=float, nargs=3, default=grid.A, metavar=("LOW", "HIGH", "STEP"),
        help=f"the paper's grid of A (default: {_plain(grid.A)})",
    )  # fmt: skip
    add(
        "--paper-c-mid", type=float, nargs=3, metavar=("LOW", "HIGH", "N"),
        help=f"the paper's grid of C_mid (default: {_plain(grid.C_mid)}, in {PAPER_UNIT})",
    )  # fmt: skip
    add(
        "--paper-spacing", choices=("linear", "log"), default="linear",
        help="spacing of the grid of C_mid (default: %(default)s)",
    )  # fmt: skip
    add(
        "--families",
        action="store_true",
        help="compare the sigmoid with a logistic, a power law and log-power",
    )


def _plain(numbers: Sequence[float]) -> str:
    """As on the command line."""
    return " ".join(f"{x:g}" for x in numbers)


def fit_as_paper(curve: Curve, args: argparse.Namespace) -> PaperFit:
    """The paper's fit. ConfigError: no R0, or no grid for this unit."""
    R0 = curve.R0.pass_rate if isinstance(curve.R0, EvalPoint) else curve.R0
    if R0 is None:
        raise ConfigError(f"{curve.name}: the paper's procedure needs R0: a point at compute 0, or --r0")
    if args.paper_c_mid is None and curve.unit != PAPER_UNIT:
        raise ConfigError(
            f"{curve.name}: the paper's grid of C_mid is in {PAPER_UNIT}, the compute in {curve.unit}; "
            "set --paper-c-mid LOW HIGH N"
        )
    grid = PaperGrid(tuple(args.paper_A), tuple(args.paper_c_mid or PaperGrid().C_mid), args.paper_spacing)
    try:
        return paper_fit([p.compute for p in curve.points], [p.pass_rate for p in curve.points], R0, grid)
    except ConfigError as e:
        raise ConfigError(f"{curve.name}: {e}") from e


def explain_paper(found: PaperFit, unit: str) -> str:
    """For a terminal."""
    (a, b, step), (low, high, n) = found.grid.A, found.grid.C_mid
    lines = [
        "The paper's procedure (least squares on a grid; no weights, no intervals):",
        f"  A {found.A:.3f}, B {found.B:.2f}, C_mid {amount(found.C_mid, 4)} {unit}, with R0 {found.R0:.3f}",
        f"  grid: A from {a:g} to {b:g} by {step:g}, C_mid from {low:g} to {high:g} "
        f"at {n:g} {found.grid.spacing} steps",
        *(f"  {FLAGS[flag]}" for flag in found.flags),
    ]
    return "\n".join(lines)


def paper_json(found: PaperFit, curve: Curve) -> dict[str, Any]:
    """With the keys of the default fit, the ends of the intervals null."""
    numbers = {k: {"value": getattr(found, k), "low": None, "high": None} for k in ("A", "B", "C_mid", "R0")}
    compute = [p.compute for p in curve.points]
    return {
        **numbers,
        "flags": list(found.flags),
        "sse": found.sse,
        "grid": asdict(found.grid),
        "points": len(compute),
        "compute_range": [compute[0], compute[-1]],
    }


def cross_checks(curve: Curve, args: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    """Paragraphs for a terminal and entries for the JSON; empty if none was asked for."""
    if not args.families:
        return [], {}
    families = compare_families(curve)
    return [explain_families(families)], {"families": [f.to_json() for f in families]}


def explain_families(families: Sequence[FamilyFit]) -> str:
    """A table."""
    best = min((f.aicc for f in families if f.aicc is not None), default=math.nan)
    rows = [
        "Families of curves (ahead: median error in the second half, predicted from the first):",
        f"  {'':10} {'SSE':>8} {'ΔAICc':>8} {'ahead':>7}  parameters",
    ]
    for f in families:
        aicc = "–" if f.aicc is None else f"+{f.aicc - best:.1f}"
        ahead = "–" if f.held_out is None else f"{f.held_out:.4f}"
        numbers = ", ".join(f"{k} {v:.4g}" for k, v in asdict(f.curve).items())
        rows.append(f"  {f.family:10} {f.sse:8.2g} {aicc:>8} {ahead:>7}  {numbers}")
    return "\n".join(rows)
