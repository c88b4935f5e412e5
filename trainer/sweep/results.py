"""What a sweep shows: the paper's table, whether ceilings differ, who wins at which budget, and the cost."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from io import StringIO
from typing import Any

import numpy as np

from trainer.jsonl import nan_to_null, read_lines, write_atomic
from trainer.scaling.__main__ import main as scaling
from trainer.scaling.compare import (
    DIFFERENT,
    EQUIVALENT,
    INCONCLUSIVE,
    Comparison,
    at_ceiling,
    compare,
)
from trainer.scaling.fit import MIN_POINTS, Estimate, estimate
from trainer.scaling.reading.groups import read_groups
from trainer.scaling.reading.read import Reading, add_input_arguments, same_unit
from trainer.scaling.text import amount, amounts, interval, percent
from trainer.sweep.progress import clock
from trainer.sweep.spec import Run, Status, Sweep, load_status

BUDGETS = (0.25, 0.5, 1.0, 2.0)  # shares of the largest compute at which the recipes are ranked
LISTED = 3  # recipes named at each budget
KINDS = ("total", "evaluation", "startup")  # of compute, in the ledger


def write_results(sweep: Sweep) -> str:
    """Write results.json, table.txt, report.html and pictures into the sweep's folder; returns the table."""
    status, cost = load_status(sweep.folder), cost_of(sweep.runs)
    inputs, short = inputs_of(sweep)
    content: dict[str, Any] = {"cost": cost | {"sweep_wall_s": status.wall_s}, "left_out": short}
    content |= {"stopped": status.stopped, "errors": status.errors}
    parts = [f"Left out, with fewer than {MIN_POINTS} evaluations: {', '.join(short)}."] if short else []
    if inputs:
        groups = read(inputs)
        curves = {name: [reading.curve for reading in of] for name, of in groups.items()}
        unit = same_unit([curve for of in curves.values() for curve in of])
        last = max(curve.points[-1].compute for of in curves.values() for curve in of)
        comparison = compare(curves, [share * last for share in BUDGETS])
        rows = list(table(comparison, last))
        content |= {"unit": unit, "recipes": list(map(asdict, rows))}
        content["pairs"] = [asdict(pair) for pair in comparison.pairs]
        content["budgets"] = [{"compute": at, "ranks": list(map(asdict, s))} for at, s in comparison.budgets]
        notes = {note for of in groups.values() for reading in of for note in reading.notes}
        parts = [describe(rows, unit, last), seeds(comparison), *verdicts(comparison, rows[0].recipe),
                 winners(comparison, unit), *sorted(notes), *parts]  # fmt: skip
        with redirect_stdout(StringIO()):  # it names the files
            folder = str(sweep.folder)
            scaling(["report", *inputs, "--out", f"{folder}/report.html", "--png", folder])
    parts += [*stopped(status, sweep), costs(cost, status, len(sweep.runs))]
    text = "\n\n".join(filter(None, parts))
    write_atomic(sweep.folder / "results.json", json.dumps(nan_to_null(content), indent=1))
    write_atomic(sweep.folder / "table.txt", text + "\n")
    return text


def inputs_of(sweep: Sweep) -> tuple[list[str], list[str]]:
    """The curves as `python -m trainer.scaling` takes them, and the runs with too few evaluations."""
    inputs, short = [], []
    for name, runs in sweep.groups.items():
        enough = [run for run in runs if evaluations(run) >= MIN_POINTS]
        short += [run.name for run in runs if run not in enough]
        if enough:
            inputs.append(f"{name}={','.join(str(run.folder) for run in enough)}")
    return inputs, short


def read(inputs: Sequence[str]) -> dict[str, list[Reading]]:
    """The curves by recipe."""
    parser = argparse.ArgumentParser()
    add_input_arguments(parser)
    return read_groups(parser.parse_args(["--", *inputs]))


def evaluations(run: Run) -> int:
    """Beyond R0."""
    path = run.folder / "metrics.jsonl"
    rows = read_lines(path) if path.is_file() else ()
    return sum("eval/pass_rate" in row and row["compute/total"] > 0 for row in rows)


@dataclass(frozen=True, slots=True)
class Row:
    """A recipe in the table."""

    recipe: str
    runs: int
    doubts: tuple[str, ...]  # flags because of which the ceiling is not identified
    A: Estimate
    B: Estimate
    C_mid: Estimate
    common_A: float | None  # the ceiling at which B and C_mid are; None: each recipe's own
    r2: float  # mean over the runs
    reward: Estimate  # at the last compute


def table(comparison: Comparison, last: float) -> Iterator[Row]:
    """The recipes whose ceiling is identified, the highest first, and then the others.

    B and C_mid are compared at one ceiling, the mean, as in the paper, unless two ceilings differ.
    """
    known = [recipe.sigmoid.A for recipe in comparison.recipes if not recipe.doubts]
    differ = any(pair.verdict == DIFFERENT for pair in comparison.pairs)
    common = float(np.mean(known)) if len(known) > 1 and not differ else None
    for recipe in sorted(comparison.recipes, key=lambda r: (bool(r.doubts), -r.sigmoid.A)):
        sigmoid, draws = recipe.sigmoid, recipe.draws
        if common is not None:
            sigmoid, draws = at_ceiling(sigmoid, draws, common)
        B, C_mid = (
            estimate(getattr(sigmoid, k), getattr(draws, k), comparison.confidence) for k in ("B", "C_mid")
        )
        r2 = float(np.mean([fit.r2 for fit in recipe.fits]))
        A, end = recipe.estimate("A"), recipe.reward(last)
        yield Row(recipe.name, len(recipe.fits), recipe.doubts, A, B, C_mid, common, r2, end)


def describe(rows: Sequence[Row], unit: str, last: float) -> str:
    """The table as text."""
    at = "" if rows[0].common_A is None else f" at A={rows[0].common_A:.3f}"
    lines = [["recipe", "runs", "A", f"B{at}", f"C_mid{at}", "R²", f"R at {amount(last)}"]]
    for row in rows:
        cells = [f"{row.A.low:.2f} to {row.A.high:.2f}: not identified", "", ""]
        if not row.doubts:
            cells = [interval(row.A, ".3f"), interval(row.B, ".2f"), amounts(row.C_mid)]
        cells = [row.recipe, str(row.runs), *cells, f"{row.r2:.3f}", interval(row.reward, ".3f")]
        lines.append([cell.replace(" to ", "–") for cell in cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    return "\n".join([*text, f"(90% intervals, which hold the variance over seeds; compute in {unit})"])


def seeds(comparison: Comparison) -> str:
    """How far runs of one recipe differ, as measured in this sweep."""
    if not comparison.seeds:
        return "There is one run of each recipe: the variance over seeds is the paper's, not measured here."
    sd = interval(comparison.spread["A"], ".3f")
    return f"The ceilings of runs of one recipe have a standard deviation of {sd}, measured in this sweep."


def verdicts(comparison: Comparison, best: str) -> Iterator[str]:
    """Which ceilings differ from the highest one by more than seeds explain."""
    against: dict[str, list[str]] = {}
    for pair in comparison.pairs:
        if best in (pair.a, pair.b) and not pair.doubts:
            other, sign = (pair.b, 1) if pair.a == best else (pair.a, -1)
            apart = f"{other} ({-sign * pair.A.value:+.3f})"
            against.setdefault(pair.verdict, []).append(apart)
    texts = {DIFFERENT: "is lower", EQUIVALENT: "is equivalent", INCONCLUSIVE: "may be lower or not"}
    for verdict, says in texts.items():
        if names := against.get(verdict):
            yield f"Against {best}, the ceiling {says}: {', '.join(names)}."


def winners(comparison: Comparison, unit: str) -> str:
    """The recipes that are likely the best at some budgets."""
    lines = [f"Best at a budget, by the probability that another sweep would agree ({unit}):"]
    for at, standings in comparison.budgets:
        first = sorted(standings, key=lambda s: -s.best)[:LISTED]
        texts = [f"{s.recipe} {percent(s.best)} (R {interval(s.reward, '.3f')})" for s in first if s.best > 0]
        lines.append(f"  {amount(at):>8}  {', '.join(texts)}")
    return "\n".join(lines)


def stopped(status: Status, sweep: Sweep) -> Iterator[str]:
    """What halving has stopped, and what that saved."""
    for name, why in status.stopped.items():
        yield (
            f"{name} was stopped at {why['share']:.0%} of the budget: the probability that it is the best at "
            f"the whole budget was {percent(why['probability'])}."
        )
    if status.stopped:
        saved = sum((1 - why["share"]) for why in status.stopped.values()) / len(sweep.groups)
        yield f"That saved {saved:.0%} of the sweep's compute."


def cost_of(runs: Sequence[Run]) -> dict[str, float]:
    """Device-hours and wall seconds of all runs, from their ledgers."""
    paths = [run.folder / "ledger.json" for run in runs]
    books = [json.loads(path.read_text()) for path in paths if path.is_file()]
    sums = {kind: sum(book["compute"][kind] for book in books) for kind in KINDS}
    return sums | {"wall_s": sum(book["wall_s"] for book in books), "runs": len(books)}


def costs(cost: Mapping[str, float], status: Status, runs: int) -> str:
    """The cost in a sentence."""
    total, evaluation, startup = (amount(cost[kind]) for kind in KINDS)
    return (
        f"Cost of {cost['runs']:.0f} of {runs} runs: {total} device-hours of training, {evaluation} of "
        f"evaluation, {startup} of start-up; {clock(cost['wall_s'])} of runs in {clock(status.wall_s)}."
    )
