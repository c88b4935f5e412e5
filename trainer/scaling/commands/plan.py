"""`plan`: how long a pilot must be, and how often evaluated, to identify the ceiling."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from trainer.config import ConfigError
from trainer.scaling.commands import as_typed, check_outputs, write_json
from trainer.scaling.curve.fit import MIN_POINTS, Fit
from trainer.scaling.plan import (
    A_RANGE,
    B_RANGE,
    CHANCE,
    WITHIN,
    Cell,
    Prospect,
    after_pilot,
    cheapest,
    is_known,
    like_pilots,
    prior,
    simulate,
)
from trainer.scaling.reading.options import ReadOptions, add_input_arguments, flag
from trainer.scaling.reading.read import Reading, read_inputs, same_unit
from trainer.scaling.text import amount, interval, paragraph, sources

BUDGETS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0)  # × C_mid
FURTHER = (1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0)  # × what the pilot has spent
EVALUATIONS = (10, 20, 40)
NOISE, RUNS = 0.005, 24
PARALLEL_FROM = 60  # fits; for fewer, starting processes takes longer
COARSE = 0.1  # share of the rise from which the precision asked for is called coarse
MAX_COMPUTE = 1e305  # multiples of more overflow
EXAMPLES = """\
Give one input, the pilot, whose continuation is simulated; several pilots, for a new run like them; or none,
but --c-mid and --r0.

examples:
  python -m trainer.scaling plan --c-mid 2500 --r0 0.3 --noise 0.005 --eval-cost 20
  python -m trainer.scaling plan --c-mid 1000 6000 --r0 0.3 --autocorrelation 0.6
  python -m trainer.scaling plan pilot.csv --budgets 1.5 2 3 --evaluations 10 20
  python -m trainer.scaling plan pilot-1.csv pilot-2.csv pilot-3.csv
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """A pilot, or the assumptions without one; the plans to try."""
    add_input_arguments(command, nargs="*")
    command.formatter_class, command.epilog = argparse.RawDescriptionHelpFormatter, EXAMPLES
    add = command.add_argument_group("without a pilot", "your assumptions, with --r0 and --unit").add_argument
    add(
        "--c-mid", type=float, nargs="+", metavar="C",
        help="compute at which half of the gain is reached, in --unit: one number, or LOW HIGH for all "
        "between them, uniform in the logarithm",
    )  # fmt: skip
    for name, what, usual in (("--a", "ceiling A, a reward", A_RANGE), ("--b", "efficiency B", B_RANGE)):
        add(
            name, type=float, nargs=2, metavar=("LOW", "HIGH"),
            help=f"range of the {what} (default: {usual[0]} {usual[1]})",
        )  # fmt: skip
    add(
        "--autocorrelation", type=float, metavar="RHO",
        help="correlation of the errors of neighbouring evaluations, from 0 (default) to 1; in many runs "
        "it is not 0, and a run must then be longer",
    )  # fmt: skip
    add = command.add_argument_group("plans").add_argument
    add(
        "--noise", type=float, metavar="SD",
        help=f"standard deviation of an evaluation, on 0 to 1 (default: the pilot's, else {NOISE}); "
        "after a pilot with correlated errors, those of the simulated evaluations are correlated, too",
    )  # fmt: skip
    add(
        "--budgets", type=float, nargs="+", metavar="X",
        help=f"budgets of the whole run to try, in multiples of C_mid (default: {as_typed(BUDGETS)}), "
        f"after one pilot in multiples of its compute (default: {as_typed(FURTHER)})",
    )  # fmt: skip
    add(
        "--evaluations", type=int, nargs="+", default=EVALUATIONS, metavar="N",
        help="numbers of evaluations to try, equally spaced, after a pilot "
        f"(default: {as_typed(EVALUATIONS)})",
    )  # fmt: skip
    add(
        "--eval-cost", type=float, default=0.0, metavar="C",
        help="cost of one evaluation, in the unit of compute (default: 0)",
    )  # fmt: skip
    add(
        "--within", type=float, default=WITHIN, metavar="D",
        help=f"A is known if its 90%% interval reaches no further than this (default: {WITHIN})",
    )  # fmt: skip
    add("--runs", type=int, default=RUNS, metavar="N", help=f"simulated runs for each plan (default: {RUNS})")
    command.add_argument("--json", type=Path, metavar="FILE", help="write the table here")


def run(args: argparse.Namespace) -> None:
    """Print the table, and the cheapest plan."""
    _check(args)
    readings, known = read_inputs(args.inputs, ReadOptions.from_arguments(args)) if args.inputs else [], False
    if len(readings) == 1:
        prospect, fit, unit = _pilot(readings[0], args)
        known = is_known(fit, args.within)
        budgets = [fit.compute_range[1] * x for x in sorted(args.budgets or FURTHER)]
    else:
        assumed = _pilots(readings, args) if readings else (_assumed(args), args.unit or "GPU-hours")
        prospect, unit = assumed
        budgets = [prospect.C_mid * x for x in sorted(args.budgets or BUDGETS)]
    if not budgets[-1] < MAX_COMPUTE:
        raise ConfigError(
            f"a budget of {budgets[-1]:g} {unit}: expected one below {MAX_COMPUTE:g}; is the unit right?"
        )
    cells = [] if known else _simulated(prospect, budgets, args)
    if args.json:
        best = cheapest(cells)
        write_json(args.json, {
            "unit": unit, "within": args.within, "noise": prospect.noise, "runs": args.runs,
            "known": known, "autocorrelated": max(prospect.correlation_length, prospect.autocorrelation) > 0,
            "plans": [asdict(cell) for cell in cells], "cheapest": best and asdict(best),
        })  # fmt: skip
    if known:
        text = f"The pilot already identifies A to ±{args.within:g}: no more is needed"
        print(paragraph(f"{text}. For more precision, give a smaller --within.", ""))
    else:
        print(describe(prospect, cells, unit, args))


def _simulated(prospect: Prospect, budgets: Sequence[float], args: argparse.Namespace) -> list[Cell]:
    """Simulate every plan, with a progress bar on standard error."""
    evaluations = sorted(set(args.evaluations))
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the workers: one core each
    fits = len(budgets) * len(evaluations) * len(prospect.sigmoids)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("simulating", total=fits)
        return simulate(
            prospect, budgets, evaluations, args.eval_cost, args.within,
            workers=_cores() if fits >= PARALLEL_FROM else 1,
            progress=lambda: bar.advance(task),
        )  # fmt: skip


def describe(prospect: Prospect, cells: Sequence[Cell], unit: str, args: argparse.Namespace) -> str:
    """For a terminal."""
    evaluations = list(dict.fromkeys(cell.evaluations for cell in cells))
    more = " more" if prospect.seen.points else ""
    scale = prospect.seen.points[-1].compute if more else prospect.C_mid
    scale_name = "× spent" if more else "× C_mid"
    head = [unit, scale_name, *(f"{'+' if more else ''}{n} evaluations" for n in evaluations)]
    rows = []
    for budget in dict.fromkeys(cell.budget for cell in cells):
        row = [cell for cell in cells if cell.budget == budget]
        results = [f"{cell.chance:.0%}  ±{cell.error:.3f}" for cell in row]
        rows.append([amount(budget, 4), f"{budget / scale:.3g}", *results])
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    text = (
        f"Probability that the 90% interval of A reaches no further than ±{args.within:g}, and median "
        f"error of A, from {args.runs} simulated runs each:"
    )
    table = ["  ".join(map(str.rjust, row, widths)) for row in (head, *rows)]
    best = cheapest(cells)
    conclusion = (
        f"None of these plans reaches {CHANCE:.0%}. Try larger --budgets or more --evaluations, evaluate "
        "with less --noise (more samples), or accept less precision (--within)."
    )
    if best is not None:
        cost = f", {amount(best.cost)} with the cost of evaluations" if args.eval_cost else ""
        conclusion = (
            f"The cheapest plan that reaches {CHANCE:.0%}: up to {amount(best.budget, 4)} {unit} "
            f"({best.budget / scale:.3g} {scale_name}{cost}), with {best.evaluations}{more} equally spaced "
            f"evaluations: {best.chance:.0%}."
        )
    margin = 1.645 * max(cell.chance_se for cell in cells)
    uncertain = f"With {args.runs} runs each, the probabilities are known to ±{margin:.0%} (90% intervals)."
    if best is not None:
        uncertain += (
            " That plan is the first whose share of runs is high enough, which is optimistic with few runs: "
            "repeat it alone with more --runs."
        )
    return "\n".join([paragraph(text, ""), *table, "", paragraph(conclusion, ""), paragraph(uncertain, "")])


def _pilots(readings: Sequence[Reading], args: argparse.Namespace) -> tuple[Prospect, str]:
    """A new run like several pilots, and the unit of their compute."""
    unit = same_unit([reading.curve for reading in readings])
    prospect, fits = like_pilots([reading.curve for reading in readings], args.runs, args.noise)
    numbers = zip(*((fit.A.value, fit.C_mid.value) for fit in fits), strict=True)
    A, C_mid = (f"{min(x):.3g} to {max(x):.3g}" for x in numbers)
    text = (
        f"{len(fits)} pilots, and a new run like them: A {A}, C_mid {C_mid} {unit}, each with its own "
        f"interval; noise {prospect.noise:.2g} per evaluation."
    )
    for reading, fit in zip(readings, fits, strict=True):
        for name in {"not-sigmoid", "other-shape"}.intersection(fit.flags):
            text += f" The simulations assume a sigmoid, but of {reading.curve.name} {fit.describe(name)}."
    print("\n".join([sources(readings), paragraph(text)]))
    return prospect, unit


def _pilot(reading: Reading, args: argparse.Namespace) -> tuple[Prospect, Fit, str]:
    curve = reading.curve
    prospect, fit = after_pilot(curve, args.runs, args.noise)
    A = interval(fit.A, ".3f", fit.identified)
    text = (
        f"Pilot: {fit.points} evaluations up to {amount(fit.compute_range[1])} {curve.unit}, A {A}, noise "
        f"{prospect.noise:.2g} per evaluation."
    )
    for name in {"not-sigmoid", "other-shape"}.intersection(fit.flags):
        text += f" The simulations assume a sigmoid, but {fit.describe(name)}."
    if prospect.correlation_length and not is_known(fit, args.within):
        text += " The errors of neighbouring points are correlated, also in the simulations."
    text += _relative(args.within, fit.A.value - fit.R0.value)
    print("\n".join([sources([reading]), paragraph(text)]))
    return prospect, fit, curve.unit


def _relative(within: float, rise: float) -> str:
    """What a precision means where the rise is small."""
    share = within / max(rise, 1e-9)
    text = (
        f" ±{within:g} is {share:.0%} of a rise of {rise:.2f}: for more precision, give a smaller --within."
    )
    return text if share > COARSE else ""


def _assumed(args: argparse.Namespace) -> Prospect:
    if args.c_mid is None or args.r0 is None:
        raise ConfigError("plan: give the run or file of a pilot, or your assumptions as --c-mid and --r0")
    C_mid = (args.c_mid[0], args.c_mid[-1])
    if not (len(args.c_mid) <= 2 and 0 < C_mid[0] <= C_mid[1] < float("inf")):
        given = " ".join(f"{x:g}" for x in args.c_mid)
        raise ConfigError(f"--c-mid {given}: expected a compute above 0, or LOW HIGH with 0 < LOW ≤ HIGH")
    A, B = (tuple(given or usual) for given, usual in ((args.a, A_RANGE), (args.b, B_RANGE)))
    if not 0 <= args.r0 < A[0] <= A[1] <= 1:
        raise ConfigError(f"--r0 {args.r0:g} --a {A[0]:g} {A[1]:g}: expected 0 ≤ R0 < low ≤ high ≤ 1")
    if not 0 < B[0] <= B[1] < float("inf"):
        raise ConfigError(f"--b {B[0]:g} {B[1]:g}: expected 0 < low ≤ high")
    rho = args.autocorrelation or 0.0
    if not 0 <= rho < 1:
        raise ConfigError(f"--autocorrelation {rho:g}: expected a correlation of at least 0 and below 1")
    noise = NOISE if args.noise is None else args.noise
    prospect = prior(C_mid, args.r0, noise, args.runs, A, B, rho)
    at = amount(C_mid[0])
    if C_mid[0] < C_mid[1]:
        at = f"from {at} to {amount(C_mid[1])} (the multiples below are of {amount(prospect.C_mid)})"
    errors = f", errors of neighbouring evaluations correlated by {rho:g}" if rho else ""
    text = (
        f"Assumed: A from {A[0]:g} to {A[1]:g}, B from {B[0]:g} to {B[1]:g}, C_mid {at}, R0 {args.r0:g} "
        f"measured before step 1, noise {noise:g} per evaluation{errors}."
    )
    print(paragraph(text + _relative(args.within, A[0] - args.r0), ""))
    return prospect


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check(args: argparse.Namespace) -> None:
    check_outputs(args.json)
    _check_unused(args)
    least = 1 if args.inputs else MIN_POINTS
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


def _check_unused(args: argparse.Namespace) -> None:
    """Refuse options that would be ignored."""
    if args.inputs:
        for name in ("--c-mid", "--a", "--b", "--autocorrelation"):
            if getattr(args, name.strip("-").replace("-", "_")) is not None:
                raise ConfigError(f"{name} is for planning without a pilot; give one or the other")
        return
    read, unset = ReadOptions.from_arguments(args), ReadOptions(r0=args.r0, unit=args.unit)
    names = [option.name for option in fields(read)]
    if unused := [flag(name) for name in names if getattr(read, name) != getattr(unset, name)]:
        raise ConfigError(
            f"{', '.join(unused)}: only for reading a pilot, and there is none; give its file, or omit this"
        )
