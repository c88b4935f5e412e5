"""The results of a sweep: the comparison of its recipes, those that halving stopped, and the cost."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from trainer.accounting.run_account import ledger_of
from trainer.jsonl import nan_to_null, read_lines, write_atomic
from trainer.scaling.commands.compare import describe, to_json
from trainer.scaling.comparability import incomparable
from trainer.scaling.compare import compare_fits, without_ranking
from trainer.scaling.curve.points import MIN_POINTS
from trainer.scaling.frontier import draw, frontier, table
from trainer.scaling.layout import amount, paragraph, percent
from trainer.scaling.reading.options import ReadOptions
from trainer.scaling.reading.read import Reading, read_groups, same_unit
from trainer.scaling.reading.tables import read_tables
from trainer.scaling.report import page
from trainer.scaling.report.run import fits_of, runs_of
from trainer.sweep.curves import CURVES, METRICS
from trainer.sweep.progress import clock
from trainer.sweep.spec import Status, Sweep, load_status

INPUTS = "runs.toml"  # in the sweep's folder; `python -m trainer.scaling` reads it too
KINDS = {"total": "training", "evaluation": "evaluation", "startup": "start-up"}  # of compute, in the ledger


def write_results(sweep: Sweep, compute_column: str | None = None, write: bool = False) -> str:
    """Write results.json, table.txt, report.html and pictures into the sweep's folder; returns the table. A
    folder of kept curves, which may be one of documents, gets them only with `write`."""
    status, (groups, short) = load_status(sweep.folder), read(sweep, compute_column)
    costs, cost = cost_of(sweep, status)
    content: dict[str, Any] = {"cost": costs, "left_out": short, "stopped": status.stopped}
    texts, notes, runs = list[str](), list[str](), runs_of(groups)
    if runs:
        unit = same_unit([run.curve for run in runs])
        going = [run.curve.points[-1].compute for run in runs if run.recipe not in status.stopped]
        comparison = compare_fits(fits_of(runs), end=min(going) if status.stopped and going else None)
        comparison = without_ranking(comparison, incomparable(groups, same_metric=False))
        r2 = {r.name: float(np.mean([r.fits[i].r2 for i in r.used])) for r in comparison.recipes}
        errors = {Path(run.curve.name).name: e for run in runs if (e := run.error_at_2x) is not None}
        content |= to_json(comparison, groups, unit) | {"r2": r2, "error_at_2x": errors}
        axes = {axis: rows for axis, values in sweep.axes.items() if (rows := frontier(comparison, values))}
        content["axes"] = {axis: list(map(asdict, rows)) for axis, rows in axes.items()}
        frontiers = [table(axis, rows, unit, comparison.confidence) for axis, rows in axes.items()]
        texts += [*map(str, frontiers), describe(comparison, groups, unit)]
        notes.append(f"R², mean over runs: {', '.join(f'{name} {x:.3f}' for name, x in r2.items())}.")
        if errors:
            error = f"{np.median(np.abs(list(errors.values()))):.3f}, median of {len(errors)} runs"
            notes.append(f"Error of a fit of the first half, at twice its compute: {error}.")
    if short:
        notes.append(f"Left out, with fewer than {MIN_POINTS} evaluations: {', '.join(short)}.")
    text = "\n\n".join([*texts, *(paragraph(note, "") for note in (*notes, *stopped(status, sweep), cost))])
    if sweep.curves_only and not write:
        return text
    write_atomic(sweep.folder / "results.json", json.dumps(nan_to_null(content), indent=1))
    write_atomic(sweep.folder / "table.txt", text + "\n")
    if runs:
        page.write(runs, sweep.folder / "report.html", frontiers=frontiers)
        page.draw(runs, sweep.folder, "png")
        if axes:
            draw(axes, sweep.folder / "frontier.png", unit)
    return text


def read(sweep: Sweep, compute_column: str | None = None) -> tuple[dict[str, list[Reading]], list[str]]:
    """The curves by recipe, which runs.toml then lists, and the runs with too few evaluations."""
    if sweep.curves_only:
        tables = read_tables(sweep.folder / CURVES / "*")[1]
    else:
        paths = {run.name: run.folder / METRICS for run in sweep.runs}
        tables = {name: list(read_lines(path)) for name, path in paths.items() if path.is_file()}
    enough = {name for name, rows in tables.items() if _evaluations(rows) >= MIN_POINTS}
    listed = ""
    for name, runs in sweep.groups.items():
        paths_of = [f"{CURVES}/" * sweep.curves_only + run.name for run in runs if run.name in enough]
        if paths_of:
            listed += f'[recipe."{name}"]\nruns = {json.dumps(paths_of, ensure_ascii=False)}\n'
    write_atomic(sweep.folder / INPUTS, listed)
    options = ReadOptions(compute_column=compute_column)
    groups = read_groups([str(sweep.folder / INPUTS)], options) if listed else {}
    return groups, [run.name for runs in sweep.groups.values() for run in runs if run.name not in enough]


def _evaluations(rows: Sequence[Mapping[str, Any]]) -> int:
    """The number of evaluations after the start."""
    return len({row["step"] for row in rows if "eval/pass_rate" in row and float(row["compute/total"]) > 0})


def stopped(status: Status, sweep: Sweep) -> Iterator[str]:
    """The recipes that halving has stopped, and the compute saved, as sentences."""
    for name, why in status.stopped.items():
        share, best = f"{why['share']:.0%}", percent(why["probability"])
        yield f"{name} was stopped at {share} of the budget, where its probability to be the best was {best}."
    if status.stopped:
        saved = sum(1 - why["share"] for why in status.stopped.values()) / len(sweep.groups)
        yield f"That saved {saved:.0%} of the sweep's compute."


def cost_of(sweep: Sweep, status: Status) -> tuple[dict[str, float], str]:
    """Device-hours and wall seconds of all runs, from their ledgers; also as a sentence."""
    curves = sweep.folder / CURVES
    folders = [curves / run.name if sweep.curves_only else run.folder for run in sweep.runs]
    books = [ledger for folder in folders if (ledger := ledger_of(folder))]
    costs = {kind: sum(book["compute"][kind] for book in books) for kind in KINDS}
    costs |= {"runs_wall_s": sum(book["wall_s"] for book in books), "sweep_wall_s": status.wall_s}
    hours = ", ".join(f"{amount(costs[kind])} of {name}" for kind, name in KINDS.items())
    times = f"{clock(costs['runs_wall_s'])} of runs in {clock(status.wall_s)}"
    return costs, f"Cost of {len(books)} of {len(sweep.runs)} runs: {hours}, in device-hours; {times}."
