"""Curves from files: run folders of ours, and any table with a compute and a reward column."""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.scaling.points import Curve, EvalPoint, curve_of

COMPUTE = ("compute/total", "compute", "gpu_hours", "core_hours", "flops", "step")
REWARD = ("eval/pass_rate", "pass_rate", "reward", "val_reward", "accuracy")
ERROR = ("eval/pass_rate_se", "pass_rate_se", "reward_se", "se")


def add_input_arguments(command: argparse.ArgumentParser) -> None:
    """What to read, and how; for every command that reads curves."""
    command.add_argument(
        "inputs", nargs="+", metavar="RUN_OR_FILE", help="a run folder, or a .csv or .jsonl file"
    )
    command.add_argument(
        "--compute-column", help=f"column of C (default: the first there is of {', '.join(COMPUTE)})"
    )
    command.add_argument("--reward-column", help=f"column of R (default: the first of {', '.join(REWARD)})")
    command.add_argument(
        "--se-column", help=f"column of R's standard error (default: the first of {', '.join(ERROR)})"
    )
    command.add_argument(
        "--r0", type=float, help="reward at zero compute (default: the point at compute 0, else unknown)"
    )


def read_curves(args: argparse.Namespace) -> list[Curve]:
    """The curves of all inputs, in their order; a curve's name is its input. ConfigError: wrong input."""
    return [_read(Path(name), args) for name in args.inputs]


def _read(path: Path, args: argparse.Namespace) -> Curve:
    rows = _rows(path / "metrics.jsonl" if path.is_dir() else path)
    columns = {c for row in rows for c in row if isinstance(c, str)}
    compute = _column(args.compute_column, COMPUTE, columns, path, "--compute-column")
    reward = _column(args.reward_column, REWARD, columns, path, "--reward-column")
    error = args.se_column or next((c for c in ERROR if c in columns), None)
    if args.se_column and args.se_column not in columns:
        raise ConfigError(f"{path}: no column {args.se_column!r}; there are {', '.join(sorted(columns))}")
    points = []
    for i, row in enumerate(rows, 1):
        if row.get(reward) not in (None, ""):
            c, r = (_number(row, key, path, i) for key in (compute, reward))
            points.append(EvalPoint(i, c, r, _number(row, error, path, i) if error else 0.0))
    if not points:
        raise ConfigError(f"{path}: no row holds {reward!r}")
    if len({p.compute for p in points}) < len(points):
        raise ConfigError(f"{path}: two points have the same {compute!r}; expected one point per compute")
    ledger = path / "ledger.json"
    unit = json.loads(ledger.read_text())["unit"] if ledger.is_file() else compute
    curve = curve_of(str(path), unit, points)
    return curve if args.r0 is None else replace(curve, R0=args.r0)


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; give a run folder, or a .csv or .jsonl file")
    rows: list[dict[str, Any]] = []
    try:
        if path.suffix == ".csv":
            with path.open(newline="", encoding="utf-8-sig") as file:
                rows = list(csv.DictReader(file))
        else:
            *whole, rest = path.read_text(encoding="utf-8").split("\n")
            rows = [json.loads(line) for line in whole if line.strip()]
            with suppress(ValueError):  # a run under way may be writing its last line
                rows.append(json.loads(rest))
            if not all(isinstance(row, dict) for row in rows):
                raise ValueError("a line is not an object")
    except (ValueError, csv.Error) as e:  # UnicodeDecodeError is a ValueError
        kind = "a CSV table" if path.suffix == ".csv" else "JSON lines (a table needs the ending .csv)"
        raise ConfigError(f"{path}: expected {kind}: {e}") from e
    if not rows:
        raise ConfigError(f"{path} is empty")
    return rows


def _column(given: str | None, known: Sequence[str], columns: set[str], path: Path, flag: str) -> str:
    found = given if given is not None else next((c for c in known if c in columns), None)
    if found is None or found not in columns:
        raise ConfigError(
            f"{path}: no column {given or known[0]!r}; set {flag} to one of {', '.join(sorted(columns))}"
        )
    return found


def _number(row: dict[str, Any], key: str, path: Path, line: int) -> float:
    try:
        value = float(row[key])
    except (KeyError, TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{path}: row {line}: {key!r} is {row.get(key)!r}; expected a finite number")
    return value
