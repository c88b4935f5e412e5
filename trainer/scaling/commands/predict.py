"""`predict`: the reward at a budget and the budget for a reward, with intervals, also in money."""

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from trainer.config import ConfigError
from trainer.scaling.commands import (
    ForecastOptions,
    add_options,
    check_amounts,
    check_outputs,
    read_like,
    readings_of,
    write_json,
)
from trainer.scaling.curve.average import DEFAULT
from trainer.scaling.curve.fit import Fit, fit_curve
from trainer.scaling.earlier import describe_prior, prior_after
from trainer.scaling.predict import (
    Needed,
    Prediction,
    Shift,
    kernel_shift,
    predict,
    shift_of_run,
)
from trainer.scaling.reading.arguments import Options
from trainer.scaling.reading.read import Reading
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


@dataclass(frozen=True, kw_only=True)
class Kernels(Options):
    """The loss kernels of the measured and of the predicted run."""

    group: ClassVar[tuple[str, ...]] = (
        "another loss kernel",
        "changes the GPU-hours of a step; see docs/gpu-hours.md",
    )

    kernel: Literal["naive", "peer", "ours"] | None = None
    """kernel of the run to predict"""
    measured_with: Literal["naive", "peer", "ours"] | None = None
    """kernel of the measured runs"""
    model: Annotated[str | None, "SIZE"] = None
    """model of both: 0.6b, 4b, 8b, scout (default: 8b); not where a run's own ledger is used"""
    kernel_rates: Annotated[Path | None, "FILE"] = None
    """rates measured on your machine, instead of published ones: kernels.json of `bench gpu`, or another
    --out of bench.kernels.compare. With them a run folder of ours is accounted by its own ledger"""


@dataclass(frozen=True, kw_only=True)
class PredictCommand(Kernels, ForecastOptions):
    """What to predict, its price, another kernel."""

    at: Annotated[tuple[float, ...], "BUDGET"] = ()
    """predict the reward at these budgets, in the unit of compute"""
    reach: Annotated[tuple[float, ...], "REWARD"] = ()
    """predict the budget for these rewards, on the scale of --reward-range (0 to 1)"""
    price: Annotated[float | None, "MONEY"] = None
    """price of one unit of compute, to print budgets in money, too"""
    currency: Annotated[str, "NAME"] = "USD"
    """currency of --price"""
    json: Annotated[Path | None, "FILE"] = None
    """write everything here"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command line."""
    add_options(command, PredictCommand, EXAMPLES)


def run(args: argparse.Namespace) -> None:
    """Print the predictions for each input."""
    options = PredictCommand.from_arguments(args)
    _check(options)
    rates = _rates(options)
    reach = [options.to_unit(reward) for reward in options.reach]
    results, texts = {}, []
    like = read_like(options)
    for reading in readings_of(args.inputs, options):
        curve = reading.curve
        prior = prior_after(like, curve) if like else DEFAULT
        fit = fit_curve(curve, options.confidence, options.within, prior=prior)
        if fit.averaged_draws is None:
            few = fit.describe("too-few-points")
            raise ConfigError(f"{curve.name}: {few}; evaluate more often, or leave it out")
        shift = _shift(options, reading, rates) if options.kernel else None
        prediction = Prediction(fit, (), ())  # of a run that has fallen there is no forecast
        if fit.has_forecast:
            known = reach if "last-point-low" not in fit.flags else []
            prediction = predict(fit, at=options.at, reach=known, factor=shift.factor if shift else 1.0)
        texts.append(describe(reading, prediction, shift, options))
        if like and fit.has_forecast:
            texts.append(paragraph(describe_prior(prior, like.without(curve))))
        results[curve.name] = to_json(reading, prediction, shift, options)
    if options.json:
        write_json(options.json, results)
    print("\n".join(texts))


def describe(reading: Reading, prediction: Prediction, shift: Shift | None, options: PredictCommand) -> str:
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
        cost = f" ({amount(r.budget * options.price)} {options.currency})" if options.price else ""
        unchecked = f"; {amount(r.ahead)}× the data: no forecast that far is validated"
        far = unchecked if r.ahead > UNCHECKED else ""
        reward = interval(r.reward, ".3f", fit.identified)
        lines.append(paragraph(f"at {amount(r.budget, 6)} {unit}{cost}: reward {reward}{far}"))
    lines += [paragraph(_describe_needed(n, fit, unit, options)) for n in prediction.needed]
    if "last-point-low" in fit.flags and options.reach:
        text = "The budget for a reward is unknown until the last checkpoint has been evaluated again."
        lines.append(paragraph(text))
    return "\n".join(lines)


def to_json(
    reading: Reading, prediction: Prediction, shift: Shift | None, options: PredictCommand
) -> dict[str, Any]:
    """All numbers of `describe`, with costs if there is a price."""
    fit = prediction.fit

    def cost(x: float) -> dict[str, Any]:
        return {"cost": x * options.price} if options.price else {}

    return {
        "unit": reading.curve.unit,
        "identified": fit.identified,
        "flags": fit.flags,
        "confidence": fit.confidence,
        "A": asdict(fit.A),
        "price": {"per_unit": options.price, "currency": options.currency} if options.price else None,
        "kernel": asdict(shift) if shift else None,
        "at": [asdict(r) | cost(r.budget) for r in prediction.reached],
        "reach": [asdict(n) | {"cost": asdict(n.compute.times(options.price))}
                  if options.price else asdict(n) for n in prediction.needed],
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


def _describe_needed(n: Needed, fit: Fit, unit: str, options: PredictCommand) -> str:
    e = n.compute
    low, high = options.reward_range
    scaled = "" if (low, high) == (0, 1) else f" ({low + n.reward * (high - low):g} from {low:g} to {high:g})"
    start = f"reward {n.reward:g}{scaled}:"
    if e.high == 0:
        return f"{start} reached from the start."
    if e.low == float("inf"):
        return f"{start} not reached (probability {percent(n.chance)})."
    ever = f"; the probability that any budget is enough is {percent(n.chance)}" if n.chance < 0.99 else ""
    quoted = fit.identified and e.value < float("inf")
    cost = f"; {amounts(e.times(options.price), quoted)} {options.currency}" if options.price else ""
    return f"{start} {amounts(e, quoted)} {unit}{cost}{ever}"


def _check(options: PredictCommand) -> None:
    check_outputs(options.json)
    if not options.at and not options.reach:
        raise ConfigError("predict: nothing to predict; give --at BUDGET..., --reach REWARD..., or both")
    check_amounts("--at", options.at, "a budget above 0, in the unit of compute")
    low, high = options.reward_range
    if wrong := [x for x in options.reach if not low < x <= high]:
        scale = "for rewards on another scale, give --reward-range LOW HIGH"
        if (low, high) != (0, 1):
            scale = "the scale of --reward-range"
        raise ConfigError(f"--reach {wrong[0]:g}: expected a reward above {low:g}, up to {high:g}; {scale}")
    check_amounts("--price", () if options.price is None else (options.price,), "an amount of money above 0")


def _rates(options: PredictCommand) -> dict[str, Any] | None:
    """The record of --kernel-rates. ConfigError: it cannot be read, or an option lacks the other."""
    if options.kernel is None and options.measured_with is None:
        if options.kernel_rates:
            raise ConfigError("--kernel-rates was given without --kernel and --measured-with")
        return None
    if options.kernel is None or options.measured_with is None:
        raise ConfigError("--kernel (to predict) and --measured-with (of the runs given) need each other")
    if not options.kernel_rates:
        return None
    try:
        record: dict[str, Any] = json.loads(options.kernel_rates.read_text())
        return record
    except (OSError, ValueError) as e:
        raise ConfigError(f"--kernel-rates {options.kernel_rates}: {e}") from e


def _shift(options: PredictCommand, reading: Reading, rates: dict[str, Any] | None) -> Shift:
    """By the run's own ledger if it has one and the rates are measured, else by the paper's step."""
    curve, kernel, measured_with = reading.curve, options.kernel, options.measured_with
    assert kernel and measured_with  # checked by _rates
    try:
        if rates is not None:
            own = shift_of_run(reading.path, kernel, measured_with, rates)
            if own and curve.unit not in DEVICE_HOURS:
                raise ConfigError(
                    f"{curve.name}: compute is in {curve.unit}; --kernel changes the device-hours of a run: "
                    "leave out --compute-column and --unit"
                )
            if own and options.model:
                raise ConfigError(
                    f"--model {options.model}: {curve.name} is accounted by its own ledger, with its own "
                    "model; leave out --model"
                )
            if own:
                return own
        if curve.unit != "GPU-hours":
            raise ConfigError(
                f"{curve.name}: compute is in {curve.unit}; --kernel changes the GPU-hours of a step: give "
                "compute in GPU-hours (--gpu-hours-per-step, --devices or --unit)"
            )
        shift = kernel_shift(options.model or MODEL, kernel, measured_with, rates)
        if rates is not None and (reading.path / "ledger.json").is_file():
            return replace(shift, note="Its ledger does not book the loss of the head apart.")
        return shift
    except (KeyError, TypeError, AttributeError) as e:
        raise ConfigError(
            f"--kernel-rates {options.kernel_rates}: expected the --out of bench.kernels.compare, as of the "
            "GPU suite's stage `kernels`"
        ) from e
