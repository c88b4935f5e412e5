"""`plan`: how much of a pilot to spend, and evaluated how often, before the ceiling is known."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from trainer.config import ConfigError
from trainer.scaling.commands.text import check_outputs, write_json
from trainer.scaling.fit import LEAST_POINTS
from trainer.scaling.plan import (
    A_RANGE,
    B_RANGE,
    CHANCE,
    WITHIN,
    Cell,
    Prospect,
    after_pilot,
    cheapest,
    prior,
    simulate,
)
from trainer.scaling.read import add_input_arguments, read_curves
from trainer.scaling.words import amount, paragraph, words

BUDGETS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0)  # × C_mid
FURTHER = (1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0)  # × what the pilot has spent
EVALUATIONS = (10, 20, 40)
NOISE, RUNS = 0.005, 24
WORTH_IT = 60  # fits from which starting processes pays
WANDERS = 0.5  # probability from which it is told


def add_arguments(command: argparse.ArgumentParser) -> None:
    """A pilot, or what is assumed without one; the plans to try."""
    add_input_arguments(command, nargs="*")
    command.epilog = (
        "Give one input, the pilot: what it leaves open is simulated. Or none, and --c-mid and --r0."
    )
    add = command.add_argument_group("without a pilot").add_argument
    add("--c-mid", type=float, metavar="C", help="guess of the compute at which half of the rise is won")
    add("--a", type=float, nargs=2, default=A_RANGE, metavar=("LOW", "HIGH"), help=f"range of A {A_RANGE}")
    add("--b", type=float, nargs=2, default=B_RANGE, metavar=("LOW", "HIGH"), help=f"range of B {B_RANGE}")
    add = command.add_argument_group("plans").add_argument
    add("--noise", type=float, metavar="SD", help=f"of an evaluation (default: the pilot's, else {NOISE})")
    add(
        "--budgets", type=float, nargs="+", metavar="X",
        help="to try, in multiples of C_mid, with a pilot of what it has spent",
    )  # fmt: skip
    add(
        "--evaluations",
        type=int,
        nargs="+",
        default=EVALUATIONS,
        metavar="N",
        help="to try; beyond the pilot",
    )
    add("--eval-cost", type=float, default=0.0, metavar="C", help="of one evaluation, in compute (0)")
    add("--within", type=float, default=WITHIN, metavar="D", help=f"A is known when within ± this ({WITHIN})")
    add("--runs", type=int, default=RUNS, metavar="N", help=f"simulated for each plan ({RUNS})")
    command.add_argument("--json", type=Path, help="write the table here")


def run(args: argparse.Namespace) -> None:
    """Print the table, and the cheapest plan."""
    _check(args)
    if args.inputs:
        prospect, unit, unspent = _pilot(args)
        budgets = [unspent * x for x in sorted(args.budgets or FURTHER)]
    else:
        prospect, unit = _assumed(args), args.unit or "GPU-hours"
        budgets = [args.c_mid * x for x in sorted(args.budgets or BUDGETS)]
    evaluations = sorted(set(args.evaluations))
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers': one core each
    fits = len(budgets) * len(evaluations) * len(prospect.laws)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("simulating", total=fits)
        cells = simulate(
            prospect, budgets, evaluations, args.eval_cost, args.within,
            workers=_cores() if fits >= WORTH_IT else 1,
            progress=lambda: bar.advance(task),
        )  # fmt: skip
    print(describe(prospect, cells, unit, args))
    if args.json:
        best = cheapest(cells)
        content = {"unit": unit, "within": args.within, "noise": prospect.noise, "runs": args.runs}
        content |= {"plans": [asdict(cell) for cell in cells], "cheapest": asdict(best) if best else None}
        write_json(args.json, content)


def describe(prospect: Prospect, cells: Sequence[Cell], unit: str, args: argparse.Namespace) -> str:
    """For a terminal."""
    evaluations = list(dict.fromkeys(cell.evaluations for cell in cells))
    more = " more" if prospect.seen.points else ""
    scale = prospect.seen.points[-1].compute if more else prospect.C_mid
    of = "× spent" if more else "× C_mid"
    head = [f"{unit}", of, *(f"{'+' if more else ''}{n} evaluations" for n in evaluations)]
    rows = []
    for budget in dict.fromkeys(cell.budget for cell in cells):
        row = [cell for cell in cells if cell.budget == budget]
        told = [f"{cell.chance:.0%}  ±{cell.error:.3f}" for cell in row]
        rows.append([amount(budget, 4), f"{budget / scale:.3g}", *told])
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = [
        paragraph(
            f"Chance that the 90% interval of A reaches no further than ±{args.within:g}, and the median "
            f"error of A, over {args.runs} simulated runs each:", "",
        )
    ]  # fmt: skip
    lines += ["  ".join(x.rjust(w) for x, w in zip(row, widths, strict=True)) for row in (head, *rows)]
    lines += ["", paragraph(_best_words(cells, unit, scale, of, more, args), "")]
    worst = max(cell.doubt for cell in cells)
    lines.append(paragraph(f"By the number of simulations, a chance is uncertain by up to ±{worst:.0%}.", ""))
    return "\n".join(lines)


def _best_words(
    cells: Sequence[Cell], unit: str, scale: float, of: str, more: str, args: argparse.Namespace
) -> str:
    best = cheapest(cells)
    if best is None:
        return (
            f"None of these reaches {CHANCE:.0%}. Try larger --budgets or more --evaluations, evaluate with "
            "less --noise (more samples), or ask for less (--within)."
        )
    cost = f", {amount(best.cost)} with the cost of evaluations" if args.eval_cost else ""
    spend = f"up to {amount(best.budget, 4)} {unit} ({best.budget / scale:.3g} {of}{cost})"
    return (
        f"The cheapest that reaches {CHANCE:.0%}: {spend}, with {best.evaluations}{more} evaluations at "
        f"equal distances: {best.chance:.0%}."
    )


def _pilot(args: argparse.Namespace) -> tuple[Prospect, str, float]:
    curves = read_curves(args)
    if len(curves) > 1:
        raise ConfigError(f"plan: there are {len(curves)} runs; expected one, the pilot")
    prospect, fit = after_pilot(curves[0], args.runs, args.noise)
    spent, unit = fit.compute_range[1], curves[0].unit
    if "falling" in fit.flags:
        raise ConfigError(
            f"{curves[0].name}: the score has fallen from its peak; no sigmoid foresees such a run"
        )
    print(
        paragraph(
            f"After {curves[0].name}: {fit.points} evaluations up to {amount(spent)} {unit}, A "
            f"{words(fit.A, '.3f')}, noise {prospect.noise:.2g} per evaluation.", "",
        )
    )  # fmt: skip
    if fit.wander > WANDERS:
        print(
            paragraph(
                "Careful: neighbouring points of the pilot err together. The simulated ones do not, so the "
                "chances are too good.", "",
            )
        )  # fmt: skip
    return prospect, unit, spent


def _assumed(args: argparse.Namespace) -> Prospect:
    if args.c_mid is None or args.r0 is None:
        raise ConfigError("plan: give a pilot's run or file, or --c-mid and --r0 as you guess them")
    if not 0 < args.c_mid < float("inf"):
        raise ConfigError(f"--c-mid {args.c_mid:g}: expected a compute above 0")
    if not 0 <= args.r0 < args.a[0] <= args.a[1] <= 1:
        raise ConfigError(
            f"--r0 {args.r0:g} --a {args.a[0]:g} {args.a[1]:g}: expected 0 ≤ R0 < low ≤ high ≤ 1"
        )
    if not 0 < args.b[0] <= args.b[1]:
        raise ConfigError(f"--b {args.b[0]:g} {args.b[1]:g}: expected 0 < low ≤ high")
    noise = NOISE if args.noise is None else args.noise
    text = (
        f"Assumed: A from {args.a[0]:g} to {args.a[1]:g}, B from {args.b[0]:g} to {args.b[1]:g}, C_mid "
        f"{amount(args.c_mid)}, R0 {args.r0:g} measured before step 1, noise {noise:g} per evaluation."
    )
    print(paragraph(text, ""))
    return prior(args.c_mid, args.r0, noise, args.runs, tuple(args.a), tuple(args.b))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check(args: argparse.Namespace) -> None:
    check_outputs((args.json, (".json",)))
    if args.inputs and args.c_mid is not None:
        raise ConfigError("--c-mid is for planning without a pilot; give one or the other")
    least = 1 if args.inputs else LEAST_POINTS
    least_budget = 1.0 if args.inputs else 0.0
    for name, values, low, expected in (
        ("--noise", [] if args.noise is None else [args.noise], 0.0, "above 0"),
        ("--budgets", args.budgets or [], least_budget, f"above {least_budget:g}"),
        ("--evaluations", args.evaluations, least - 1, f"of at least {least}"),
        ("--within", [args.within], 0.0, "above 0"),
        ("--runs", [args.runs], 4, "of at least 5"),
    ):
        if wrong := [x for x in values if not low < x < float("inf")]:
            raise ConfigError(f"{name} {wrong[0]:g}: expected a number {expected}")
    if not 0 <= args.eval_cost < float("inf"):
        raise ConfigError(f"--eval-cost {args.eval_cost:g}: expected a compute of at least 0")
