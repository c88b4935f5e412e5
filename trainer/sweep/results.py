"""What a sweep shows: the paper's table, whether ceilings differ, who wins at which budget, and the cost."""

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from io import StringIO
from typing import Any

import numpy as np

from trainer.jsonl import nan_to_null, read_lines, write_atomic
from trainer.scaling.__main__ import main as scaling
from trainer.scaling.commands.compare import to_json
from trainer.scaling.compare import DIFFERENT, EQUIVALENT, INCONCLUSIVE, Comparison, at_ceiling, compare
from trainer.scaling.compare_text import budget_sentences, recipe_sentences, reward_at, seed_sentence
from trainer.scaling.fit import MIN_POINTS, Estimate, estimate
from trainer.scaling.guards import warnings
from trainer.scaling.reading.groups import read_groups
from trainer.scaling.reading.read import Reading, add_input_arguments, same_unit
from trainer.scaling.text import amount, amounts, interval, paragraph, percent
from trainer.sweep.progress import clock
from trainer.sweep.spec import Status, Sweep, load_status

BUDGETS = (0.25, 0.5, 1.0, 2.0)  # shares of the largest compute at which the recipes are ranked
LISTED = 3  # recipes named at each budget
KINDS = {"total": "training", "evaluation": "evaluation", "startup": "start-up"}  # of compute, in the ledger
VERDICTS = {DIFFERENT: "is lower", EQUIVALENT: "is equivalent", INCONCLUSIVE: "may be lower or not"}


def write_results(sweep: Sweep) -> str:
    """Write results.json, table.txt, report.html and pictures into the sweep's folder; returns the table."""
    status, (inputs, short) = load_status(sweep.folder), inputs_of(sweep)
    costs, cost = cost_of(sweep, status)
    content: dict[str, Any] = {"cost": costs, "left_out": short, "stopped": status.stopped}
    parts: list[str] = []
    if inputs:
        groups = read(inputs)
        curves = {name: [reading.curve for reading in of] for name, of in groups.items()}
        unit = same_unit([curve for of in curves.values() for curve in of])
        last = max(curve.points[-1].compute for of in curves.values() for curve in of)
        comparison = compare(curves, [share * last for share in BUDGETS])
        rows = list(table(comparison, last))
        content |= to_json(comparison, groups, unit) | {"table": list(map(asdict, rows))}
        parts = [describe(rows, unit, last)]
        sentences = [
            *recipe_sentences(comparison), seed_sentence(comparison), *verdicts(comparison, rows[0].recipe),
            *budget_sentences(comparison), *(f"Note: {warning}" for warning in warnings(groups)),
        ]  # fmt: skip
        parts += [paragraph(sentence, "") for sentence in sentences] + [winners(comparison, unit)]
        with redirect_stdout(StringIO()):  # it names the files
            folder = str(sweep.folder)
            scaling(["report", *inputs, "--out", f"{folder}/report.html", "--png", folder])
    if short:
        parts.append(f"Left out, with fewer than {MIN_POINTS} evaluations: {', '.join(short)}.")
    text = "\n\n".join([*parts, *stopped(status, sweep), cost])
    write_atomic(sweep.folder / "results.json", json.dumps(nan_to_null(content), indent=1))
    write_atomic(sweep.folder / "table.txt", text + "\n")
    return text


def inputs_of(sweep: Sweep) -> tuple[list[str], list[str]]:
    """The curves as `python -m trainer.scaling` takes them, and the runs with too few evaluations."""
    inputs, short = [], []
    for name, runs in sweep.groups.items():
        paths = {run.name: run.folder / "metrics.jsonl" for run in runs}
        lines = {k: read_lines(path) if path.is_file() else () for k, path in paths.items()}
        points = {
            k: sum(r.get("compute/total", 0) > 0 and "eval/pass_rate" in r for r in v)
            for k, v in lines.items()
        }
        short += [k for k, n in points.items() if n < MIN_POINTS]
        if enough := [str(sweep.folder / k) for k, n in points.items() if n >= MIN_POINTS]:
            inputs.append(f"{name}={','.join(enough)}")
    return inputs, short


def read(inputs: Sequence[str]) -> dict[str, list[Reading]]:
    """The curves by recipe."""
    parser = argparse.ArgumentParser()
    add_input_arguments(parser)
    return read_groups(parser.parse_args(["--", *inputs]))


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
        one, draws = recipe.sigmoid, recipe.draws
        if common is not None:
            one, draws = at_ceiling(one, draws, common)
        level = comparison.confidence
        B, C_mid = (estimate(getattr(one, k), getattr(draws, k), level) for k in ("B", "C_mid"))
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


def verdicts(comparison: Comparison, best: str) -> Iterator[str]:
    """Which ceilings differ from the highest one by more than seeds explain."""
    against: dict[str, list[str]] = {}
    for pair in comparison.pairs:
        if best in (pair.a, pair.b) and not pair.doubts:
            other, sign = (pair.b, -1) if pair.a == best else (pair.a, 1)
            against.setdefault(pair.verdict, []).append(f"{other} ({sign * pair.A.value:+.3f})")
    for verdict, says in VERDICTS.items():
        if names := against.get(verdict):
            yield f"Against {best}, the ceiling {says}: {', '.join(names)}."


def winners(comparison: Comparison, unit: str) -> str:
    """The recipes that are likely the best at some budgets."""
    lines = [f"Best at a budget ({unit}), with its probability, other seeds allowed for:"]
    for at, standings in comparison.budgets:
        first = sorted(((s.best, s) for s in standings if s.best), key=lambda one: -one[0])[:LISTED]
        texts = [f"{s.recipe} {percent(best)} (R {reward_at(s)})" for best, s in first]
        lines.append(f"  {amount(at):>8}  {', '.join(texts) or 'no two recipes are ranked'}")
    return "\n".join(lines)


def stopped(status: Status, sweep: Sweep) -> Iterator[str]:
    """What halving has stopped, and what that saved."""
    for name, why in status.stopped.items():
        at, chance = f"{why['share']:.0%}", percent(why["probability"])
        yield f"{name} was stopped at {at} of the budget, where its probability to be the best was {chance}."
    if status.stopped:
        saved = sum(1 - why["share"] for why in status.stopped.values()) / len(sweep.groups)
        yield f"That saved {saved:.0%} of the sweep's compute."


def cost_of(sweep: Sweep, status: Status) -> tuple[dict[str, float], str]:
    """Device-hours and wall seconds of all runs, from their ledgers; also as a sentence."""
    paths = [run.folder / "ledger.json" for run in sweep.runs]
    books = [json.loads(path.read_text()) for path in paths if path.is_file()]
    costs = {kind: sum(book["compute"][kind] for book in books) for kind in KINDS}
    costs |= {"runs_wall_s": sum(book["wall_s"] for book in books), "sweep_wall_s": status.wall_s}
    hours = ", ".join(f"{amount(costs[kind])} of {name}" for kind, name in KINDS.items())
    times = f"{clock(costs['runs_wall_s'])} of runs in {clock(status.wall_s)}"
    return costs, f"Cost of {len(books)} of {len(paths)} runs: {hours}, in device-hours; {times}."
