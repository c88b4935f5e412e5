"""`plan`: how long a pilot must be, and how often evaluated, to identify the ceiling."""

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Annotated, ClassVar

from rich.console import Console
from rich.progress import Progress

from trainer.config import ConfigError
from trainer.config.values import Range
from trainer.gpus import cpu_cores
from trainer.scaling import plan
from trainer.scaling.commands import Json, ReadCommand, sources, write_json
from trainer.scaling.curve.fit import Fit
from trainer.scaling.curve.points import MIN_POINTS
from trainer.scaling.layout import Block, Rows, amount, grouped, interval, paragraph
from trainer.scaling.plan import Cell, Prospect
from trainer.scaling.reading.options import ABOVE_0, Options, ReadOptions, flag
from trainer.scaling.reading.read import Reading, read_inputs, same_unit

BUDGETS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0)  # × C_mid, or × what the pilot has spent


@dataclass(frozen=True, kw_only=True)
class Assumptions(Options):
    """A run that is planned without a pilot."""

    group: ClassVar[tuple[str, ...]] = ("without a pilot", "your assumptions, with --r0 and --unit")

    c_mid: Annotated[tuple[float, ...] | None, "C", Range(above=0, most=1e300)] = None
    """compute at which half of the gain is reached, in --unit: one number, or LOW HIGH for all between them,
    uniform in the logarithm"""
    a: Annotated[tuple[float, float] | None, ("LOW", "HIGH")] = None
    """range of the ceiling A, a reward (default: 0.5 0.75)"""
    autocorrelation: Annotated[float | None, "RHO", Range(0, most=0.99)] = None
    """correlation of the errors of neighbouring evaluations, from 0 (default) to 1; in many runs it is not 0,
    and a run must then be longer"""


@dataclass(frozen=True, kw_only=True)
class Plans(Options):
    """The plans to try."""

    group: ClassVar[tuple[str, ...]] = ("plans",)

    noise: Annotated[float | None, "SD", ABOVE_0] = None
    """standard deviation of an evaluation, on 0 to 1 (default: the pilot's, else 0.005); after a pilot with
    correlated errors, those of the simulated evaluations are correlated, too"""
    budgets: Annotated[tuple[float, ...], "X", ABOVE_0] = ()
    """budgets of the whole run to try, in multiples of C_mid (default: 1 1.5 2 3 4 6 10), after one pilot in
    multiples of its compute (default: 1.25 1.5 2 3 4 6 10)"""
    evaluations: Annotated[tuple[int, ...], "N", Range(1)] = (10, 20, 40)
    """numbers of evaluations to try, equally spaced, after a pilot"""
    eval_cost: Annotated[float, "C", Range(0)] = 0.0
    """cost of one evaluation, in the unit of compute (default: 0)"""
    within: Annotated[float, "D", ABOVE_0] = plan.WITHIN
    """A is known if its 90% interval reaches no further than this"""
    runs: Annotated[int, "N", Range(5)] = 24
    """simulated runs for each plan"""


@dataclass(frozen=True, kw_only=True)
class Command(Plans, Assumptions, ReadCommand):
    """Give one input, the pilot, whose continuation is simulated; several pilots, for a new run like them; or
    none, but --c-mid and --r0.

    examples:
      python -m trainer.scaling plan --c-mid 2500 --r0 0.3 --noise 0.005 --eval-cost 20
      python -m trainer.scaling plan --c-mid 1000 6000 --r0 0.3 --autocorrelation 0.6
      python -m trainer.scaling plan pilot.csv --budgets 1.5 2 3 --evaluations 10 20
      python -m trainer.scaling plan pilot-1.csv pilot-2.csv pilot-3.csv
    """

    nargs: ClassVar[str] = "*"

    json: Json = None
    """write the table here"""

    def run(self, inputs: Sequence[str]) -> None:
        """Print the table, and the cheapest plan."""
        self._check_unused(bool(inputs))
        readings = read_inputs(inputs, self)
        unit = same_unit([reading.curve for reading in readings]) if inputs else self.unit or "GPU-hours"
        prospect, known = self._pilots(readings, unit) if inputs else (self._assumed(), False)
        seen = prospect.seen.points
        scale, multiples = (seen[-1].compute, (1.25, *BUDGETS[1:])) if seen else (prospect.C_mid, BUDGETS)
        cells = [] if known else self._simulate(prospect, [scale * x for x in self.budgets or multiples])
        best = plan.cheapest(cells)
        autocorrelated = max(prospect.correlation_length, prospect.autocorrelation) > 0
        content = {"unit": unit, "within": self.within, "noise": prospect.noise, "runs": self.runs}
        content |= {"known": known, "autocorrelated": autocorrelated}
        plans = {"plans": list(map(asdict, cells)), "cheapest": best and asdict(best)}
        write_json(self.json, content | plans)
        if known:
            text = f"The pilot already identifies A to ±{self.within:g}: no more is needed"
            print(paragraph(f"{text}. For more precision, give a smaller --within.", ""))
        else:
            print(self._describe(cells, best, scale, unit, " more" if seen else ""))

    def _check_unused(self, pilot: bool) -> None:
        """ConfigError: an option would be ignored, or is too small here."""
        chosen = [o.name for o in fields(self) if getattr(self, o.name) != o.default]
        assumed = {option.name for option in fields(Assumptions)}
        if pilot and (wrong := [flag(name) for name in chosen if name in assumed]):
            raise ConfigError(f"{wrong[0]} is for planning without a pilot; give one or the other")
        reading = {option.name for option in fields(ReadOptions)} - {"r0", "unit"}
        if not pilot and (wrong := [flag(name) for name in chosen if name in reading]):
            raise ConfigError(
                f"{', '.join(wrong)}: only for reading a pilot, and there is none; give its file, or leave "
                "this out"
            )
        if pilot and min(self.budgets, default=math.inf) <= 1:
            raise ConfigError(
                f"--budgets {min(self.budgets):g}: expected more than 1, what a pilot has spent"
            )
        if not pilot and min(self.evaluations) < MIN_POINTS:
            raise ConfigError(f"--evaluations {min(self.evaluations)}: expected {MIN_POINTS} or more")

    def _assumed(self) -> Prospect:
        """The prospect of a run without a pilot."""
        if self.c_mid is None or self.r0 is None:
            raise ConfigError(
                "plan: give the run or file of a pilot, or your assumptions as --c-mid and --r0"
            )
        low, high, A = self.c_mid[0], self.c_mid[-1], self.a or plan.A_RANGE
        if len(self.c_mid) > 2 or low > high:
            span = " ".join(f"{x:g}" for x in self.c_mid)
            raise ConfigError(f"--c-mid {span}: expected a compute above 0, or LOW HIGH with 0 < LOW ≤ HIGH")
        if not 0 <= self.r0 < A[0] <= A[1] <= 1:
            raise ConfigError(f"--r0 {self.r0:g} --a {A[0]:g} {A[1]:g}: expected 0 ≤ R0 < low ≤ high ≤ 1")
        rho = self.autocorrelation or 0.0
        prospect = plan.prior((low, high), self.r0, self.noise or 0.005, self.runs, A, autocorrelation=rho)
        C_mid = amount(low)
        if low < high:
            C_mid = f"from {C_mid} to {amount(high)} (the multiples below are of {amount(prospect.C_mid)})"
        errors = f", errors of neighbouring evaluations correlated by {rho:g}" if rho else ""
        text = (
            f"Assumed: A from {A[0]:g} to {A[1]:g}, C_mid {C_mid}, R0 {self.r0:g} measured before step 1, "
            f"noise {prospect.noise:g} per evaluation{errors}.{self._relative(A[0] - self.r0)}"
        )
        print(paragraph(text, ""))
        return prospect

    def _pilots(self, readings: Sequence[Reading], unit: str) -> tuple[Prospect, bool]:
        """The prospect of one pilot, or of a new run like several; True if it leaves nothing to plan."""
        curves, known, end = [reading.curve for reading in readings], False, ""
        if len(readings) == 1:
            prospect, fit = plan.after_pilot(curves[0], self.runs, self.noise)
            fits, known = [fit], plan.is_known(fit, self.within)
            text = (
                f"Pilot: {fit.points} evaluations up to {amount(fit.compute_range[1])} {unit}, A "
                f"{interval(fit.A, 'A', fit.identified)}"
            )
            if prospect.correlation_length and not known:
                end = " The errors of neighbouring points are correlated, also in the simulations."
            end += self._relative(fit.A.value - fit.R0.value)
        else:
            prospect, fits = plan.like_pilots(curves, self.runs, self.noise)
            A, C_mid = (_span([getattr(fit, name).value for fit in fits]) for name in ("A", "C_mid"))
            text = f"{len(fits)} pilots, and a new run like them: A {A}, C_mid {C_mid} {unit}, each with its "
            text += "own interval"
        text += f"; noise {prospect.noise:.2g} per evaluation.{_other_shapes(readings, fits)}{end}"
        print("\n".join([sources(readings), paragraph(text)]))
        return prospect, known

    def _relative(self, rise: float) -> str:
        """The precision as a share of the rise, as a sentence; empty where it is at most a tenth of it."""
        if self.within <= 0.1 * rise:
            return ""
        share = self.within / max(rise, 1e-9)
        meant = f"±{self.within:g} is {share:.0%} of a rise of {rise:.2f}"
        return f" {meant}: for more precision, give a smaller --within."

    def _simulate(self, prospect: Prospect, budgets: Sequence[float]) -> list[Cell]:
        """Simulate every plan, with a progress bar on standard error, lines where that is no terminal."""
        budgets, evaluations = sorted(set(budgets)), sorted(set(self.evaluations))
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the workers: one core each
        fits = len(budgets) * len(evaluations) * len(prospect.sigmoids)
        workers = max(1, min(len(cpu_cores()), fits // 30))  # for fewer fits, starting a process takes longer
        shown = (console := Console(stderr=True)).is_terminal
        with Progress(console=console, transient=True, disable=not shown) as bar:
            bar.add_task("simulating", total=fits)
            (task,) = bar.tasks

            def step() -> None:
                bar.advance(task.id)
                n, seconds = task.completed, task.time_remaining
                if seconds and not shown and n % (fits // len(budgets)) == 0:
                    print(f"{n} of {fits} runs simulated, {seconds / 60:.1f} min left", file=sys.stderr)

            return plan.simulate(prospect, budgets, evaluations, self.eval_cost, self.within, workers, step)

    def _describe(
        self, cells: Sequence[Cell], best: Cell | None, scale: float, unit: str, more: str
    ) -> Block:
        """The table and what follows; `more`: evaluations are those after a pilot."""
        scale_name = "× spent" if more else "× C_mid"
        numbers = dict.fromkeys(cell.evaluations for cell in cells)
        rows: Rows = [[unit, scale_name, *(f"{'+' * bool(more)}{n} evaluations" for n in numbers)]]
        for budget, row in grouped((cell.budget, cell) for cell in cells).items():
            results = [f"{cell.chance:.0%}  ±{cell.error:.3f}" for cell in row]
            rows.append([amount(budget, 4), f"{budget / scale:.3g}", *results])
        title = (
            f"Probability that the 90% interval of A reaches no further than ±{self.within:g}, and median "
            f"error of A, from {self.runs} simulated runs each:"
        )
        margin = 1.645 * max(cell.chance_se for cell in cells)
        doubt = f"With {self.runs} runs each, the probabilities are known to ±{margin:.0%} (90% intervals)"
        if best is None:
            conclusion = (
                f"None of these plans reaches {plan.CHANCE:.0%}. Try larger --budgets or more --evaluations, "
                "evaluate with less --noise (more samples), or accept less precision (--within)."
            )
            return Block(rows, paragraph(title, ""), [conclusion, f"{doubt}."])
        cost = f", {amount(best.cost)} with the cost of evaluations" if self.eval_cost else ""
        conclusion = (
            f"The cheapest plan that reaches {plan.CHANCE:.0%}: up to {amount(best.budget, 4)} {unit} "
            f"({best.budget / scale:.3g} {scale_name}{cost}), with {best.evaluations}{more} equally spaced "
            f"evaluations: {best.chance:.0%}."
        )
        doubt += (
            ". That plan is the first whose share of runs is high enough, which is optimistic with few runs: "
            "repeat it alone with more --runs."
        )
        return Block(rows, paragraph(title, ""), [conclusion, doubt])


def _other_shapes(readings: Sequence[Reading], fits: Sequence[Fit]) -> str:
    return "".join(
        f" The simulations assume a sigmoid, but of {reading.curve.name} {fit.describe(name)}."
        for reading, fit in zip(readings, fits, strict=True)
        for name in ("not-sigmoid", "other-shape")
        if name in fit.flags
    )


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.3g} to {max(values):.3g}"
