"""`plan`: how long a pilot must be, and how often evaluated, to identify the ceiling."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, ClassVar

from rich.console import Console
from rich.progress import Progress

from trainer.config import ConfigError
from trainer.scaling.commands import add_options, check_outputs, readings_of, write_json
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
from trainer.scaling.reading.arguments import Options, flag
from trainer.scaling.reading.options import ReadOptions
from trainer.scaling.reading.read import Reading, same_unit
from trainer.scaling.text import amount, interval, paragraph, sources

BUDGETS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0)  # × C_mid
FURTHER = (1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0)  # × what the pilot has spent
NOISE = 0.005
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


@dataclass(frozen=True, kw_only=True)
class Assumptions(Options):
    """A run that is planned without a pilot."""

    group: ClassVar[tuple[str, ...]] = ("without a pilot", "your assumptions, with --r0 and --unit")

    c_mid: Annotated[tuple[float, ...] | None, "C"] = None
    """compute at which half of the gain is reached, in --unit: one number, or LOW HIGH for all between them,
    uniform in the logarithm"""
    a: Annotated[tuple[float, float] | None, ("LOW", "HIGH")] = None
    """range of the ceiling A, a reward (default: 0.5 0.75)"""
    b: Annotated[tuple[float, float] | None, ("LOW", "HIGH")] = None
    """range of the efficiency B (default: 1.1 2.5)"""
    autocorrelation: Annotated[float | None, "RHO"] = None
    """correlation of the errors of neighbouring evaluations, from 0 (default) to 1; in many runs it is not 0,
    and a run must then be longer"""


@dataclass(frozen=True, kw_only=True)
class Plans(Options):
    """The plans to try."""

    group: ClassVar[tuple[str, ...]] = ("plans",)

    noise: Annotated[float | None, "SD"] = None
    """standard deviation of an evaluation, on 0 to 1 (default: the pilot's, else 0.005); after a pilot with
    correlated errors, those of the simulated evaluations are correlated, too"""
    budgets: Annotated[tuple[float, ...] | None, "X"] = None
    """budgets of the whole run to try, in multiples of C_mid (default: 1 1.5 2 3 4 6 10), after one pilot in
    multiples of its compute (default: 1.25 1.5 2 3 4 6 10)"""
    evaluations: Annotated[tuple[int, ...], "N"] = (10, 20, 40)
    """numbers of evaluations to try, equally spaced, after a pilot"""
    eval_cost: Annotated[float, "C"] = 0.0
    """cost of one evaluation, in the unit of compute (default: 0)"""
    within: Annotated[float, "D"] = WITHIN
    """A is known if its 90% interval reaches no further than this"""
    runs: Annotated[int, "N"] = 24
    """simulated runs for each plan"""


@dataclass(frozen=True, kw_only=True)
class PlanCommand(Plans, Assumptions, ReadOptions):
    """A pilot, or the assumptions without one; the plans to try."""

    json: Annotated[Path | None, "FILE"] = None
    """write the table here"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command line."""
    add_options(command, PlanCommand, EXAMPLES, nargs="*")


def run(args: argparse.Namespace) -> None:
    """Print the table, and the cheapest plan."""
    options = PlanCommand.from_arguments(args)
    check_outputs(options.json)
    _check(options, bool(args.inputs))
    readings, known = readings_of(args.inputs, options) if args.inputs else [], False
    if len(readings) == 1:
        prospect, fit, unit = _pilot(readings[0], options)
        known = is_known(fit, options.within)
        budgets = [fit.compute_range[1] * x for x in sorted(options.budgets or FURTHER)]
    else:
        assumed = _pilots(readings, options) if readings else (_assumed(options), options.unit or "GPU-hours")
        prospect, unit = assumed
        budgets = [prospect.C_mid * x for x in sorted(options.budgets or BUDGETS)]
    if not budgets[-1] < MAX_COMPUTE:
        raise ConfigError(
            f"a budget of {budgets[-1]:g} {unit}: expected one below {MAX_COMPUTE:g}; is the unit right?"
        )
    cells = [] if known else _simulated(prospect, budgets, options)
    if options.json:
        best = cheapest(cells)
        write_json(options.json, {
            "unit": unit, "within": options.within, "noise": prospect.noise, "runs": options.runs,
            "known": known, "autocorrelated": max(prospect.correlation_length, prospect.autocorrelation) > 0,
            "plans": [asdict(cell) for cell in cells], "cheapest": best and asdict(best),
        })  # fmt: skip
    if known:
        text = f"The pilot already identifies A to ±{options.within:g}: no more is needed"
        print(paragraph(f"{text}. For more precision, give a smaller --within.", ""))
    else:
        print(describe(prospect, cells, unit, options))


def _simulated(prospect: Prospect, budgets: Sequence[float], options: PlanCommand) -> list[Cell]:
    """Simulate every plan, with a progress bar on standard error."""
    evaluations = sorted(set(options.evaluations))
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the workers: one core each
    fits = len(budgets) * len(evaluations) * len(prospect.sigmoids)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("simulating", total=fits)
        return simulate(
            prospect, budgets, evaluations, options.eval_cost, options.within,
            workers=_cores() if fits >= PARALLEL_FROM else 1,
            progress=lambda: bar.advance(task),
        )  # fmt: skip


def describe(prospect: Prospect, cells: Sequence[Cell], unit: str, options: PlanCommand) -> str:
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
        f"Probability that the 90% interval of A reaches no further than ±{options.within:g}, and median "
        f"error of A, from {options.runs} simulated runs each:"
    )
    table = ["  ".join(map(str.rjust, row, widths)) for row in (head, *rows)]
    best = cheapest(cells)
    conclusion = (
        f"None of these plans reaches {CHANCE:.0%}. Try larger --budgets or more --evaluations, evaluate "
        "with less --noise (more samples), or accept less precision (--within)."
    )
    if best is not None:
        cost = f", {amount(best.cost)} with the cost of evaluations" if options.eval_cost else ""
        conclusion = (
            f"The cheapest plan that reaches {CHANCE:.0%}: up to {amount(best.budget, 4)} {unit} "
            f"({best.budget / scale:.3g} {scale_name}{cost}), with {best.evaluations}{more} equally spaced "
            f"evaluations: {best.chance:.0%}."
        )
    margin = 1.645 * max(cell.chance_se for cell in cells)
    uncertain = (
        f"With {options.runs} runs each, the probabilities are known to ±{margin:.0%} (90% intervals)."
    )
    if best is not None:
        uncertain += (
            " That plan is the first whose share of runs is high enough, which is optimistic with few runs: "
            "repeat it alone with more --runs."
        )
    return "\n".join([paragraph(text, ""), *table, "", paragraph(conclusion, ""), paragraph(uncertain, "")])


def _pilots(readings: Sequence[Reading], options: PlanCommand) -> tuple[Prospect, str]:
    """A new run like several pilots, and the unit of their compute."""
    unit = same_unit([reading.curve for reading in readings])
    prospect, fits = like_pilots([reading.curve for reading in readings], options.runs, options.noise)
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


def _pilot(reading: Reading, options: PlanCommand) -> tuple[Prospect, Fit, str]:
    curve = reading.curve
    prospect, fit = after_pilot(curve, options.runs, options.noise)
    A = interval(fit.A, ".3f", fit.identified)
    text = (
        f"Pilot: {fit.points} evaluations up to {amount(fit.compute_range[1])} {curve.unit}, A {A}, noise "
        f"{prospect.noise:.2g} per evaluation."
    )
    for name in {"not-sigmoid", "other-shape"}.intersection(fit.flags):
        text += f" The simulations assume a sigmoid, but {fit.describe(name)}."
    if prospect.correlation_length and not is_known(fit, options.within):
        text += " The errors of neighbouring points are correlated, also in the simulations."
    text += _relative(options.within, fit.A.value - fit.R0.value)
    print("\n".join([sources([reading]), paragraph(text)]))
    return prospect, fit, curve.unit


def _relative(within: float, rise: float) -> str:
    """What a precision means where the rise is small."""
    share = within / max(rise, 1e-9)
    text = (
        f" ±{within:g} is {share:.0%} of a rise of {rise:.2f}: for more precision, give a smaller --within."
    )
    return text if share > COARSE else ""


def _assumed(options: PlanCommand) -> Prospect:
    if options.c_mid is None or options.r0 is None:
        raise ConfigError("plan: give the run or file of a pilot, or your assumptions as --c-mid and --r0")
    C_mid = (options.c_mid[0], options.c_mid[-1])
    if not (len(options.c_mid) <= 2 and 0 < C_mid[0] <= C_mid[1] < float("inf")):
        given = " ".join(f"{x:g}" for x in options.c_mid)
        raise ConfigError(f"--c-mid {given}: expected a compute above 0, or LOW HIGH with 0 < LOW ≤ HIGH")
    A, B = options.a or A_RANGE, options.b or B_RANGE
    if not 0 <= options.r0 < A[0] <= A[1] <= 1:
        raise ConfigError(f"--r0 {options.r0:g} --a {A[0]:g} {A[1]:g}: expected 0 ≤ R0 < low ≤ high ≤ 1")
    if not 0 < B[0] <= B[1] < float("inf"):
        raise ConfigError(f"--b {B[0]:g} {B[1]:g}: expected 0 < low ≤ high")
    rho = options.autocorrelation or 0.0
    if not 0 <= rho < 1:
        raise ConfigError(f"--autocorrelation {rho:g}: expected a correlation of at least 0 and below 1")
    noise = NOISE if options.noise is None else options.noise
    prospect = prior(C_mid, options.r0, noise, options.runs, A, B, rho)
    at = amount(C_mid[0])
    if C_mid[0] < C_mid[1]:
        at = f"from {at} to {amount(C_mid[1])} (the multiples below are of {amount(prospect.C_mid)})"
    errors = f", errors of neighbouring evaluations correlated by {rho:g}" if rho else ""
    text = (
        f"Assumed: A from {A[0]:g} to {A[1]:g}, B from {B[0]:g} to {B[1]:g}, C_mid {at}, R0 {options.r0:g} "
        f"measured before step 1, noise {noise:g} per evaluation{errors}."
    )
    print(paragraph(text + _relative(options.within, A[0] - options.r0), ""))
    return prospect


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check(options: PlanCommand, pilot: bool) -> None:
    _check_unused(options, pilot)
    least = 1 if pilot else MIN_POINTS
    least_budget = 1.0 if pilot else 0.0
    for name, values, low, expected in (
        ("--noise", [] if options.noise is None else [options.noise], 0.0, "above 0"),
        ("--budgets", options.budgets or [], least_budget, f"above {least_budget:g}"),
        ("--evaluations", options.evaluations, least - 1, f"of at least {least}"),
        ("--within", [options.within], 0.0, "above 0"),
        ("--runs", [options.runs], 4, "of at least 5"),
    ):
        if wrong := [x for x in values if not low < x < float("inf")]:
            raise ConfigError(f"{name} {wrong[0]:g}: expected a number {expected}")
    if not 0 <= options.eval_cost < float("inf"):
        raise ConfigError(f"--eval-cost {options.eval_cost:g}: expected a compute of at least 0")


def _check_unused(options: PlanCommand, pilot: bool) -> None:
    """ConfigError: an option would be ignored."""
    if pilot:
        for option in fields(Assumptions):
            if getattr(options, option.name) is not None:
                raise ConfigError(
                    f"{flag(option.name)} is for planning without a pilot; give one or the other"
                )
        return
    unset = ReadOptions(r0=options.r0, unit=options.unit)
    names = [option.name for option in fields(ReadOptions)]
    if unused := [flag(name) for name in names if getattr(options, name) != getattr(unset, name)]:
        raise ConfigError(
            f"{', '.join(unused)}: only for reading a pilot, and there is none; give its file, or omit this"
        )
