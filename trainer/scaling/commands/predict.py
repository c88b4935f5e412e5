"""`predict`: the reward at a budget and the budget for a reward, with intervals, also in money."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.scaling.commands import add_fit_arguments, check_outputs, write_json
from trainer.scaling.fit import Fit, fit_with_draws
from trainer.scaling.kernel_cost import MODELS
from trainer.scaling.predict import KERNELS, Needed, Reached, Shift, compute_for, kernel_shift, reward_at
from trainer.scaling.reading.read import add_input_arguments, read_curves
from trainer.scaling.sigmoid import Curve
from trainer.scaling.text import amount, amounts, interval, paragraph, percent

UNCHECKED = 10.0  # times the compute measured: no forecast that far has been validated
EXAMPLES = """\
examples:
  python -m trainer.scaling predict run.csv --at 24000 50000 --price 2.5
  python -m trainer.scaling predict run.csv --reach 0.6 --kernel ours --measured-with naive
"""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predictions for one input."""

    curve: Curve
    fit: Fit
    shift: Shift | None
    reached: Sequence[Reached]
    needed: Sequence[Needed]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """What to predict, its price, another kernel."""
    add_input_arguments(command)
    add_fit_arguments(command)
    command.formatter_class, command.epilog = argparse.RawDescriptionHelpFormatter, EXAMPLES
    add = command.add_argument
    add(
        "--at", type=float, nargs="+", default=[], metavar="BUDGET",
        help="predict the reward at these budgets, in the unit of compute",
    )  # fmt: skip
    add(
        "--reach", type=float, nargs="+", default=[], metavar="REWARD",
        help="predict the budget for these rewards, on a scale from 0 to 1",
    )  # fmt: skip
    text = "price of one unit of compute, to print budgets in money, too"
    add("--price", type=float, metavar="MONEY", help=text)
    add("--currency", metavar="NAME", default="USD", help="currency of --price (default: USD)")
    add("--json", type=Path, metavar="FILE", help="write everything here")
    add = command.add_argument_group(
        "another loss kernel", "changes the GPU-hours of a step; see docs/gpu-hours.md"
    ).add_argument
    add("--kernel", choices=KERNELS, help="kernel of the run to predict")
    add("--measured-with", choices=KERNELS, help="kernel of the measured runs")
    add("--model", default="8b", metavar="SIZE", help=f"model of both: {', '.join(MODELS)} (default: 8b)")
    add(
        "--kernel-rates", type=Path, metavar="FILE",
        help="kernels.json of bench/gpu_suite.sh: rates measured on your GPU, instead of published ones",
    )  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Print the predictions for each input."""
    _check(args)
    shift = _shift(args)
    results, texts = {}, []
    for curve in read_curves(args):
        fit, _ = fit_with_draws(curve, args.confidence, args.within)
        if shift and curve.unit != "GPU-hours":
            raise ConfigError(
                f"{curve.name}: compute is in {curve.unit}; --kernel changes the GPU-hours of a step: give "
                "compute in GPU-hours (--gpu-hours-per-step, --devices or --unit)"
            )
        factor = shift.factor if shift else 1.0
        prediction = Prediction(
            curve, fit, shift,
            [reward_at(fit, budget, factor) for budget in args.at],
            [compute_for(fit, reward, factor) for reward in args.reach],
        )  # fmt: skip
        texts.append(describe(prediction, args))
        results[curve.name] = to_json(prediction, args)
    if args.json:
        write_json(args.json, results)
    print("\n".join(texts))


def describe(prediction: Prediction, args: argparse.Namespace) -> str:
    """For a terminal."""
    curve, fit, shift = prediction.curve, prediction.fit, prediction.shift
    lines = [curve.name, paragraph(_describe_ceiling(curve, fit))]
    if shift:
        lines.append(paragraph(_describe_shift(shift)))
    for r in prediction.reached:
        cost = f" ({amount(r.budget * args.price)} {args.currency})" if args.price else ""
        far = f"; {amount(r.ahead)}× the data, which is unchecked" if r.ahead > UNCHECKED else ""
        lines.append(
            f"  at {amount(r.budget, 6)} {curve.unit}{cost}: reward {interval(r.reward, '.3f')}{far}"
        )
    lines += [paragraph(_describe_needed(n, curve.unit, args)) for n in prediction.needed]
    return "\n".join(lines)


def to_json(prediction: Prediction, args: argparse.Namespace) -> dict[str, Any]:
    """All numbers of `describe`, with costs if there is a price."""
    fit, shift = prediction.fit, prediction.shift

    def cost(x: float) -> dict[str, Any]:
        return {"cost": x * args.price} if args.price else {}

    return {
        "unit": prediction.curve.unit,
        "identified": fit.identified,
        "flags": fit.flags,
        "confidence": fit.confidence,
        "A": asdict(fit.A),
        "price": {"per_unit": args.price, "currency": args.currency} if args.price else None,
        "kernel": asdict(shift) if shift else None,
        "at": [asdict(r) | cost(r.budget) for r in prediction.reached],
        "reach": [asdict(n) | {"cost": asdict(n.compute.times(args.price))}
                  if args.price else asdict(n) for n in prediction.needed],
    }  # fmt: skip


def _describe_ceiling(curve: Curve, fit: Fit) -> str:
    if fit.identified:
        return f"Ceiling: A {interval(fit.A, '.3f')}; {fit.confidence:.0%} intervals."
    text = f"The ceiling is not identified: {fit.reasons}."
    if "falling" in fit.flags:
        return f"{text} The numbers below are those of a sigmoid, not a forecast of this run."
    last = f"{amount(fit.compute_range[1])} {curve.unit}"
    return f"{text} Beyond {last}, where the data end, use the intervals and not the values."


def _describe_shift(shift: Shift) -> str:
    old, new = (
        f"{head.name} ({head.tflops:.0f} TF/s, {head.source.split(':')[0]})"
        for head in (shift.measured_with, shift.kernel)
    )
    return (
        f"Measured with {old}, predicted for {new}: a step of {shift.model} takes {shift.factor:.3f} times "
        "the GPU-hours (python -m bench.gpu_hours shows the calculation)."
    )


def _describe_needed(n: Needed, unit: str, args: argparse.Namespace) -> str:
    e = n.compute
    start = f"reward {n.reward:g}: "
    if e.high == 0:
        return f"{start}reached from the start."
    cost = f"; {amounts(e.times(args.price))} {args.currency}" if args.price else ""
    if e.value < float("inf"):
        some = "" if n.chance > 0.99 else f"; {percent(n.chance)} of the draws ever reach it"
        return f"{start}{amounts(e)} {unit}{cost}{some}"
    if e.low == float("inf"):
        return f"{start}never: {percent(n.chance)} of the draws reach it at any budget."
    return (
        f"{start}the most likely curve never reaches it; {percent(n.chance)} of the draws do, at "
        f"{amount(e.low)} {unit} or later."
    )


def _check(args: argparse.Namespace) -> None:
    check_outputs(args.json)
    if not args.at and not args.reach:
        raise ConfigError("predict: nothing to predict; give --at BUDGET..., --reach REWARD..., or both")
    for name, values, high in (("--at", args.at, float("inf")), ("--reach", args.reach, 1.0)):
        if wrong := [x for x in values if not 0 < x <= high or x == float("inf")]:
            expected = "a budget above 0" if high > 1 else "a reward in (0, 1], also with --reward-range"
            raise ConfigError(f"{name} {wrong[0]:g}: expected {expected}")
    if args.price is not None and not 0 < args.price < float("inf"):
        raise ConfigError(f"--price {args.price:g}: expected an amount of money above 0")


def _shift(args: argparse.Namespace) -> Shift | None:
    if args.kernel is None and args.measured_with is None:
        if args.kernel_rates:
            raise ConfigError("--kernel-rates was given without --kernel and --measured-with")
        return None
    if args.kernel is None or args.measured_with is None:
        raise ConfigError("--kernel (to predict) and --measured-with (of the runs given) need each other")
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
