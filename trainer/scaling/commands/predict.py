"""`predict`: the reward at a budget and the budget for a reward, with intervals, also in money."""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from trainer.accounting.kernel_cost import MODELS
from trainer.config import ConfigError
from trainer.scaling.commands import (
    add_fit_arguments,
    add_like_argument,
    check_outputs,
    read_like,
    write_json,
)
from trainer.scaling.curve.average import DEFAULT
from trainer.scaling.curve.fit import Fit, fit_curve
from trainer.scaling.earlier import describe_prior, prior_after
from trainer.scaling.predict import (
    KERNELS,
    Needed,
    Prediction,
    Shift,
    kernel_shift,
    predict,
    shift_of_run,
)
from trainer.scaling.reading.options import ReadOptions, add_input_arguments
from trainer.scaling.reading.read import Reading, read_inputs
from trainer.scaling.text import amount, amounts, assumption, interval, paragraph, percent, sources, why_not

DEVICE_HOURS = ("GPU-hours", "core-hours")
MODEL = "8b"  # whose step is accounted, unless asked for another
UNCHECKED = 10.0  # times the compute measured: no forecast that far has been validated
EXAMPLES = """\
examples:
  python -m trainer.scaling predict run.csv --at 24000 50000 --price 2.5
  python -m trainer.scaling predict percent.csv --reward-range 0 100 --reach 60
  python -m trainer.scaling predict run.csv --reach 0.6 --kernel ours --measured-with naive
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """What to predict, its price, another kernel."""
    add_input_arguments(command)
    add_fit_arguments(command)
    add_like_argument(command)
    command.formatter_class, command.epilog = argparse.RawDescriptionHelpFormatter, EXAMPLES
    add = command.add_argument
    add(
        "--at", type=float, nargs="+", default=[], metavar="BUDGET",
        help="predict the reward at these budgets, in the unit of compute",
    )  # fmt: skip
    add(
        "--reach", type=float, nargs="+", default=[], metavar="REWARD",
        help="predict the budget for these rewards, on the scale of --reward-range (0 to 1)",
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
    add(
        "--model", metavar="SIZE",
        help=f"model of both: {', '.join(MODELS)} (default: {MODEL}); not where a run's own ledger is used",
    )  # fmt: skip
    add(
        "--kernel-rates", type=Path, metavar="FILE",
        help="rates measured on your machine, instead of published ones: kernels.json of `bench gpu`, "
        "bench.kernels.compare's --out or pytest-benchmark's --benchmark-json. With them a run folder of "
        "ours is accounted by its own ledger",
    )  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Print the predictions for each input."""
    _check(args)
    rates = _rates(args)
    low, high = args.reward_range
    reach = [(reward - low) / (high - low) for reward in args.reach]
    results, texts = {}, []
    like = read_like(args)
    for reading in read_inputs(args.inputs, ReadOptions.from_arguments(args)):
        curve = reading.curve
        prior = prior_after(like, curve) if like else DEFAULT
        fit = fit_curve(curve, args.confidence, args.within, prior=prior)
        if fit.averaged_draws is None:
            few = fit.describe("too-few-points")
            raise ConfigError(f"{curve.name}: {few}; evaluate more often, or leave it out")
        shift = _shift(args, reading, rates) if args.kernel else None
        prediction = Prediction(fit, (), ())  # of a run that has fallen there is no forecast
        if fit.has_forecast:
            known = reach if "last-point-low" not in fit.flags else []
            prediction = predict(fit, at=args.at, reach=known, factor=shift.factor if shift else 1.0)
        texts.append(describe(reading, prediction, shift, args))
        if like and fit.has_forecast:
            texts.append(paragraph(describe_prior(prior, like.without(curve))))
        results[curve.name] = to_json(reading, prediction, shift, args)
    if args.json:
        write_json(args.json, results)
    print("\n".join(texts))


def describe(reading: Reading, prediction: Prediction, shift: Shift | None, args: argparse.Namespace) -> str:
    """For a terminal."""
    fit, unit = prediction.fit, reading.curve.unit
    ceiling = f"Ceiling: A {interval(fit.A, '.3f')}; {fit.confidence:.0%} intervals."
    end = f" The data end at {amount(fit.compute_range[1])} {unit}." if fit.has_forecast else ""
    lines = [sources([reading]), paragraph(ceiling if fit.identified else why_not(fit) + end)]
    if shift:
        lines.append(paragraph(_describe_shift(shift)))
    if fit.has_forecast:
        lines.append(assumption(fit))
    for r in prediction.reached:
        cost = f" ({amount(r.budget * args.price)} {args.currency})" if args.price else ""
        unchecked = f"; {amount(r.ahead)}× the data: no forecast that far is validated"
        far = unchecked if r.ahead > UNCHECKED else ""
        reward = interval(r.reward, ".3f", fit.identified)
        lines.append(paragraph(f"at {amount(r.budget, 6)} {unit}{cost}: reward {reward}{far}"))
    lines += [paragraph(_describe_needed(n, fit, unit, args)) for n in prediction.needed]
    if "last-point-low" in fit.flags and args.reach:
        text = "The budget for a reward is unknown until the last checkpoint has been evaluated again."
        lines.append(paragraph(text))
    return "\n".join(lines)


def to_json(
    reading: Reading, prediction: Prediction, shift: Shift | None, args: argparse.Namespace
) -> dict[str, Any]:
    """All numbers of `describe`, with costs if there is a price."""
    fit = prediction.fit

    def cost(x: float) -> dict[str, Any]:
        return {"cost": x * args.price} if args.price else {}

    return {
        "unit": reading.curve.unit,
        "identified": fit.identified,
        "flags": fit.flags,
        "confidence": fit.confidence,
        "A": asdict(fit.A),
        "price": {"per_unit": args.price, "currency": args.currency} if args.price else None,
        "kernel": asdict(shift) if shift else None,
        "at": [asdict(r) | cost(r.budget) for r in prediction.reached],
        "reach": [asdict(n) | {"cost": asdict(n.compute.times(args.price))}
                  if args.price else asdict(n) for n in prediction.needed],
        "source": str(reading),
        "notes": reading.notes,
    }  # fmt: skip


def _describe_shift(shift: Shift) -> str:
    old, new = (
        f"{head.name} ({head.tflops:.3g} TF/s, {head.source.split(':')[0]})"
        for head in (shift.measured_with, shift.kernel)
    )
    if not shift.model:
        return (
            f"Measured with {old}, predicted for {new}: by the run's own ledger, with its devices split as "
            f"they are, the run takes {shift.factor:.3f} times the compute."
        )
    return (
        f"Measured with {old}, predicted for {new}: a step of {shift.model} takes {shift.factor:.3f} times "
        f"the GPU-hours (python -m bench.gpu_hours shows the calculation). {shift.note}".strip()
    )


def _describe_needed(n: Needed, fit: Fit, unit: str, args: argparse.Namespace) -> str:
    e = n.compute
    low, high = args.reward_range
    scaled = "" if (low, high) == (0, 1) else f" ({low + n.reward * (high - low):g} from {low:g} to {high:g})"
    start = f"reward {n.reward:g}{scaled}:"
    if e.high == 0:
        return f"{start} reached from the start."
    if e.low == float("inf"):
        return f"{start} not reached (probability {percent(n.chance)})."
    ever = f"; the probability that any budget is enough is {percent(n.chance)}" if n.chance < 0.99 else ""
    quoted = fit.identified and e.value < float("inf")
    cost = f"; {amounts(e.times(args.price), quoted)} {args.currency}" if args.price else ""
    return f"{start} {amounts(e, quoted)} {unit}{cost}{ever}"


def _check(args: argparse.Namespace) -> None:
    check_outputs(args.json)
    if not args.at and not args.reach:
        raise ConfigError("predict: nothing to predict; give --at BUDGET..., --reach REWARD..., or both")
    if wrong := [x for x in args.at if not 0 < x < float("inf")]:
        raise ConfigError(f"--at {wrong[0]:g}: expected a budget above 0, in the unit of compute")
    low, high = args.reward_range
    if wrong := [x for x in args.reach if not low < x <= high]:
        scale = "for rewards on another scale, give --reward-range LOW HIGH"
        if (low, high) != (0, 1):
            scale = "the scale of --reward-range"
        raise ConfigError(f"--reach {wrong[0]:g}: expected a reward above {low:g}, up to {high:g}; {scale}")
    if args.price is not None and not 0 < args.price < float("inf"):
        raise ConfigError(f"--price {args.price:g}: expected an amount of money above 0")


def _rates(args: argparse.Namespace) -> dict[str, Any] | None:
    """The record of --kernel-rates. ConfigError: it cannot be read, or an option lacks the other."""
    if args.kernel is None and args.measured_with is None:
        if args.kernel_rates:
            raise ConfigError("--kernel-rates was given without --kernel and --measured-with")
        return None
    if args.kernel is None or args.measured_with is None:
        raise ConfigError("--kernel (to predict) and --measured-with (of the runs given) need each other")
    if not args.kernel_rates:
        return None
    try:
        record: dict[str, Any] = json.loads(args.kernel_rates.read_text())
        return record
    except (OSError, ValueError) as e:
        raise ConfigError(f"--kernel-rates {args.kernel_rates}: {e}") from e


def _shift(args: argparse.Namespace, reading: Reading, rates: dict[str, Any] | None) -> Shift:
    """By the run's own ledger if it has one and the rates are measured, else by the paper's step."""
    curve = reading.curve
    try:
        if rates is not None:
            own = shift_of_run(reading.path, args.kernel, args.measured_with, rates)
            if own and curve.unit not in DEVICE_HOURS:
                raise ConfigError(
                    f"{curve.name}: compute is in {curve.unit}; --kernel changes the device-hours of a run: "
                    "leave out --compute-column and --unit"
                )
            if own and args.model:
                raise ConfigError(
                    f"--model {args.model}: {curve.name} is accounted by its own ledger, with its own model; "
                    "leave out --model"
                )
            if own:
                return own
        if curve.unit != "GPU-hours":
            raise ConfigError(
                f"{curve.name}: compute is in {curve.unit}; --kernel changes the GPU-hours of a step: give "
                "compute in GPU-hours (--gpu-hours-per-step, --devices or --unit)"
            )
        shift = kernel_shift(args.model or MODEL, args.kernel, args.measured_with, rates)
        if rates is not None and (reading.path / "ledger.json").is_file():
            return replace(shift, note="Its ledger does not book the loss of the head apart.")
        return shift
    except (KeyError, TypeError, AttributeError) as e:
        raise ConfigError(
            f"--kernel-rates {args.kernel_rates}: expected kernels.json of the GPU suite, "
            "bench.kernels.compare's --out or pytest-benchmark's --benchmark-json"
        ) from e
