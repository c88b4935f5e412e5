"""`predict`: the reward that a budget buys, the budget that a reward takes, with intervals and in money."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.scaling.commands.text import check_outputs, percent, write_json
from trainer.scaling.fit import FLAGS, Estimate, Fit, fit_curve
from trainer.scaling.kernel_cost import MODELS
from trainer.scaling.points import Curve
from trainer.scaling.predict import KERNELS, Needed, Reached, Shift, compute_for, kernel_shift, reward_at
from trainer.scaling.reading.read import add_input_arguments, read_curves
from trainer.scaling.text import amount, amounts, paragraph, words

FAR = 10.0  # times the data's compute: so far no forecast has ever been checked
EXAMPLES = """\
examples:
  python -m trainer.scaling predict run.csv --at 24000 50000 --price 2.5
  python -m trainer.scaling predict run.csv --reach 0.6 --kernel ours --measured-with naive
"""


@dataclass(frozen=True, slots=True)
class Foreseen:
    """Of one input: what the budgets buy, and what the rewards cost."""

    curve: Curve
    fit: Fit
    shift: Shift | None
    reached: Sequence[Reached]
    needed: Sequence[Needed]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """What to foresee, its price, another kernel."""
    add_input_arguments(command)
    command.formatter_class, command.epilog = argparse.RawDescriptionHelpFormatter, EXAMPLES
    add = command.add_argument
    add(
        "--at", type=float, nargs="+", default=[], metavar="BUDGET",
        help="tell the reward at these budgets, in the unit of compute",
    )  # fmt: skip
    add(
        "--reach", type=float, nargs="+", default=[], metavar="REWARD",
        help="tell the budget for these rewards, on 0 to 1",
    )  # fmt: skip
    add("--price", type=float, metavar="MONEY", help="of one unit of compute: tell budgets in money, too")
    add("--currency", metavar="NAME", default="USD", help="of --price (default: USD)")
    add("--json", type=Path, metavar="FILE", help="write all of it here")
    add = command.add_argument_group(
        "another loss kernel", "it changes the GPU-hours of a step; the account: docs/gpu-hours.md"
    ).add_argument
    add("--kernel", choices=KERNELS, help="the run to foresee uses this one")
    add("--measured-with", choices=KERNELS, help="the runs given used this one")
    add("--model", default="8b", metavar="SIZE", help=f"of both: {', '.join(MODELS)} (default: 8b)")
    add(
        "--kernel-rates", type=Path, metavar="FILE",
        help="kernels.json of bench/gpu_suite.sh: rates measured on your GPU, in place of published ones",
    )  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Print what is foreseen, of each input."""
    _check(args)
    shift = _shift(args)
    results, told = {}, []
    for curve in read_curves(args):
        fit = _fit(curve)
        if shift and curve.unit != "GPU-hours":
            raise ConfigError(
                f"{curve.name}: compute is in {curve.unit}; --kernel changes the GPU-hours of a step: give "
                "compute in them (--gpu-hours-per-step, --devices or --unit)"
            )
        factor = shift.factor if shift else 1.0
        foreseen = Foreseen(
            curve, fit, shift,
            [reward_at(fit, budget, factor) for budget in args.at],
            [compute_for(fit, reward, factor) for reward in args.reach],
        )  # fmt: skip
        told.append(describe(foreseen, args))
        results[curve.name] = to_json(foreseen, args)
    if args.json:
        write_json(args.json, results)
    print("\n".join(told))


def describe(foreseen: Foreseen, args: argparse.Namespace) -> str:
    """For a terminal."""
    curve, fit, shift = foreseen.curve, foreseen.fit, foreseen.shift
    lines = [curve.name, *(paragraph(text) for text in _warnings(curve, fit))]
    if shift:
        lines.append(paragraph(_shift_words(shift)))
    for r in foreseen.reached:
        cost = f" ({_money(r.budget, args)})" if args.price else ""
        far = f"; {amount(r.ahead)}× the data: unchecked" if r.ahead > FAR else ""
        lines.append(f"  at {amount(r.budget, 6)} {curve.unit}{cost}: reward {words(r.reward, '.3f')}{far}")
    lines += [paragraph(_needed_words(n, curve.unit, args)) for n in foreseen.needed]
    return "\n".join(lines)


def to_json(foreseen: Foreseen, args: argparse.Namespace) -> dict[str, Any]:
    """Everything `describe` tells; money beside compute where there is a price."""
    fit, shift = foreseen.fit, foreseen.shift

    def cost(x: float) -> dict[str, Any]:
        return {"cost": x * args.price} if args.price else {}

    return {
        "unit": foreseen.curve.unit,
        "identified": fit.identified,
        "flags": fit.flags,
        "confidence": fit.confidence,
        "A": asdict(fit.A),
        "price": {"per_unit": args.price, "currency": args.currency} if args.price else None,
        "kernel": asdict(shift) if shift else None,
        "at": [asdict(r) | cost(r.budget) for r in foreseen.reached],
        "reach": [asdict(n) | {"cost": {k: v * args.price for k, v in asdict(n.compute).items()}}
                  if args.price else asdict(n) for n in foreseen.needed],
    }  # fmt: skip


def _warnings(curve: Curve, fit: Fit) -> list[str]:
    if fit.identified:
        return [f"The law's ceiling: A {words(fit.A, '.3f')}; {fit.confidence:.0%} intervals."]
    last = f"{amount(fit.compute_range[1])} {curve.unit}"
    text = f"The ceiling is not identified: {fit.reasons}. "
    if "falling" in fit.flags:
        return [text + "Below is what a sigmoid would do: no forecast."]
    return [text + f"Up to {last} the numbers below rest on data; beyond, trust the intervals, no number."]


def _shift_words(shift: Shift) -> str:
    def source(text: str) -> str:
        return text.split(":")[0]

    new, old = shift.kernel, shift.measured_with
    return (
        f"Measured with {old.name} ({old.tflops:.0f} TF/s, {source(old.source)}), told for {new.name} "
        f"({new.tflops:.0f} TF/s, {source(new.source)}): a step of {shift.model} takes {shift.factor:.3f} of "
        "the GPU-hours (python -m bench.gpu_hours has the account)."
    )


def _needed_words(n: Needed, unit: str, args: argparse.Namespace) -> str:
    e = n.compute
    start = f"reward {n.reward:g}: "
    if e.high == 0:
        return f"{start}there from the start."
    cost = f"; {_money_range(e, args)}" if args.price else ""
    if e.value < float("inf"):
        surely = "" if n.chance > 0.99 else f"; {percent(n.chance)} of the draws ever reach it"
        return f"{start}{amounts(e)} {unit}{cost}{surely}"
    if e.low == float("inf"):
        return f"{start}never: {percent(n.chance)} of the draws reach it at any budget."
    return (
        f"{start}never by the likeliest law; {percent(n.chance)} of the draws reach it, "
        f"not before {amount(e.low)} {unit}."
    )


def _money(x: float, args: argparse.Namespace) -> str:
    return f"{amount(x * args.price)} {args.currency}"


def _money_range(e: Estimate, args: argparse.Namespace) -> str:
    scaled = Estimate(*(x * args.price for x in (e.value, e.low, e.high)))
    return f"{amounts(scaled)} {args.currency}"


def _fit(curve: Curve) -> Fit:
    fit = fit_curve(curve)
    if fit.draws is None:
        raise ConfigError(
            f"{curve.name}: {FLAGS['too-few-points']}: nothing can be foreseen; evaluate more often"
        )
    return fit


def _check(args: argparse.Namespace) -> None:
    check_outputs((args.json, (".json",)))
    if not args.at and not args.reach:
        raise ConfigError("predict: nothing is asked; give --at BUDGET..., --reach REWARD..., or both")
    for name, values, high in (("--at", args.at, float("inf")), ("--reach", args.reach, 1.0)):
        if wrong := [x for x in values if not 0 < x <= high or x == float("inf")]:
            expected = "a budget above 0" if high > 1 else "a reward in (0, 1], whatever --reward-range is"
            raise ConfigError(f"{name} {wrong[0]:g}: expected {expected}")
    if args.price is not None and not 0 < args.price < float("inf"):
        raise ConfigError(f"--price {args.price:g}: expected an amount of money above 0")


def _shift(args: argparse.Namespace) -> Shift | None:
    if args.kernel is None and args.measured_with is None:
        if args.kernel_rates:
            raise ConfigError("--kernel-rates was given without --kernel and --measured-with")
        return None
    if args.kernel is None or args.measured_with is None:
        raise ConfigError("--kernel and --measured-with go together: what to foresee, and what the runs used")
    suite = None
    if args.kernel_rates:
        try:
            suite = json.loads(args.kernel_rates.read_text())
        except (OSError, ValueError) as e:
            raise ConfigError(f"--kernel-rates {args.kernel_rates}: {e}") from e
    try:
        return kernel_shift(args.model, args.kernel, args.measured_with, suite)
    except (KeyError, TypeError, AttributeError) as e:
        raise ConfigError(
            f"--kernel-rates {args.kernel_rates}: expected kernels.json of the GPU suite"
        ) from e
