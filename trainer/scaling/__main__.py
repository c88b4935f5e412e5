"""`python -m trainer.scaling fit RUN_OR_CSV`: the sigmoid of any run's metrics, with what it cannot tell."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.scaling import Fit, explain, fit, plot_curve
from trainer.scaling.fit import EvalPoint

COMPUTE = ("compute/total", "compute", "gpu_hours", "core_hours", "flops", "step")
REWARD = ("eval/pass_rate", "pass_rate", "reward", "val_reward", "accuracy")
ERROR = ("eval/pass_rate_se", "pass_rate_se", "reward_se", "se")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: fitted (also where the data identify nothing, which is said). 2: wrong input."""
    parser = argparse.ArgumentParser(prog="python -m trainer.scaling", description=__doc__)
    command = parser.add_subparsers(required=True).add_parser(
        "fit", help="fit the sigmoid to one or more runs"
    )
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
        "--r0", type=float, help="reward at zero compute (default: the point of least compute)"
    )
    command.add_argument("--json", type=Path, help="write the fits here, by input")
    command.add_argument("--plot", type=Path, help="write the picture here (.png or .svg); for one input")
    args = parser.parse_args(argv)
    try:
        results = {}
        for name in args.inputs:
            points, result, unit = fit_file(Path(name), args)
            results[name] = result.to_json()
            print(f"{name}\n{explain(result, unit)}")
            if args.plot:
                plot_curve(points, result, args.plot, unit, Path(name).stem)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1))
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


def fit_file(path: Path, args: argparse.Namespace) -> tuple[list[EvalPoint], Fit, str]:
    """The points of a file, their fit, and the unit of compute."""
    rows = _rows(path / "metrics.jsonl" if path.is_dir() else path)
    columns = set().union(*rows)
    compute = _column(args.compute_column, COMPUTE, columns, path, "--compute-column")
    reward = _column(args.reward_column, REWARD, columns, path, "--reward-column")
    error = args.se_column or next((c for c in ERROR if c in columns), None)
    if args.se_column and args.se_column not in columns:
        raise ConfigError(f"{path}: no column {args.se_column!r}; there are {', '.join(sorted(columns))}")
    points = []
    for i, row in enumerate(rows, 1):
        if row.get(reward) not in (None, ""):
            c, r = (_number(row, key, path, i) for key in (compute, reward))
            se = _number(row, error, path, i) if error else 0.0
            points.append(EvalPoint(int(row.get("step") or i), c, r, se))
    if not points:
        raise ConfigError(f"{path}: no row holds {reward!r}")
    points.sort(key=lambda p: p.compute)
    if len({p.compute for p in points}) < len(points):
        raise ConfigError(f"{path}: two points have the same {compute!r}; expected one point per compute")
    first = points[0]
    start, rest = (
        (args.r0, [p for p in points if p.compute > 0])
        if args.r0 is not None
        else (first.pass_rate, points[1:])
    )
    result = fit(
        [p.compute for p in rest],
        [p.pass_rate for p in rest],
        [p.pass_rate_se for p in rest] if error else None,
        R0=start, R0_se=first.pass_rate_se if args.r0 is None else 0.0,
    )  # fmt: skip
    ledger = path / "ledger.json"
    unit = json.loads(ledger.read_text())["unit"] if ledger.is_file() else compute
    return points, result, unit


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; give a run folder, or a .csv or .jsonl file")
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            rows: list[dict[str, Any]] = list(csv.DictReader(file))
    else:
        try:
            rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        except ValueError as e:
            raise ConfigError(f"{path}: not JSON lines: {e}") from e
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
        return float(row[key])
    except (KeyError, TypeError, ValueError) as e:
        raise ConfigError(f"{path}: row {line}: {key!r} is {row.get(key)!r}; expected a number") from e


if __name__ == "__main__":
    sys.exit(main())
