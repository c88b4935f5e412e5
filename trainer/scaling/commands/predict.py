"""`predict`: the reward at a budget and the budget for a reward, with intervals, also in money."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from trainer.accounting.kernel_rates import Rates, read_rates
from trainer.config import ConfigError
from trainer.scaling.commands import Budgets, ForecastCommand, Json, sources, write_json
from trainer.scaling.curve.average import FURTHEST
from trainer.scaling.layout import amount, interval, paragraph, percent
from trainer.scaling.predict import Needed, Prediction, Reached, Shift, kernel_shift, predict, shift_of_run
from trainer.scaling.reading.options import ABOVE_0, Options
from trainer.scaling.reading.read import Reading, read_inputs
from trainer.scaling.text import assumption, rates, why_not

DEVICE_HOURS = ("GPU-hours", "core-hours")
MODEL = "8b"  # whose step is accounted, unless asked for another


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
    """rates measured on your machine, instead of published ones: kernels.jsonl of `bench gpu`, or
    another --out of `bench kernels.compare`. With them a run folder of ours is accounted by its own ledger"""

    def rates(self) -> Rates | None:
        """The record of --kernel-rates. ConfigError: it cannot be read, or an option lacks the other."""
        if (self.kernel is None) != (self.measured_with is None):
            raise ConfigError("--kernel (to predict) and --measured-with (of the runs given) need each other")
        if self.kernel_rates is None:
            return None
        if self.kernel is None:
            raise ConfigError("--kernel-rates was given without --kernel and --measured-with")
        return read_rates(self.kernel_rates)

    def shift(self, reading: Reading, rates: Rates | None) -> Shift | None:
        """The shift by the run's own ledger if that and measured rates exist, else by the paper's step."""
        if self.kernel is None or self.measured_with is None:
            return None
        name, unit = reading.curve.name, reading.curve.unit
        pair = self.kernel, self.measured_with
        booked = shift_of_run(reading.path, *pair, rates) if rates else None
        if booked and self.model:
            raise ConfigError(
                f"--model {self.model}: {name} is accounted by its own ledger, with its own model; leave "
                "out --model"
            )
        if unit not in (DEVICE_HOURS if booked else DEVICE_HOURS[:1]):
            raise ConfigError(
                f"{name}: compute is in {unit}; --kernel changes the {'device' if booked else 'GPU'}-hours "
                "of a run: give compute in them (--gpu-hours-per-step, --devices or --unit; of a run "
                "folder of ours, leave out --compute-column)"
            )
        shift = booked or kernel_shift(self.model or MODEL, *pair, rates)
        if rates and not booked and (reading.path / "ledger.json").is_file():
            return replace(shift, note="Its ledger does not book the loss of the head apart.")
        return shift


@dataclass(frozen=True, kw_only=True)
class Command(Kernels, ForecastCommand):
    """Predict each run for itself.

    examples:
      python -m trainer.scaling predict run.csv --at 24000 50000 --price 2.5
      python -m trainer.scaling predict percent.csv --reward-range 0 100 --reach 60
      python -m trainer.scaling predict run.csv --reach 0.6 --kernel ours --measured-with naive
    """

    at: Budgets = ()
    """predict the reward at these budgets, in the unit of compute"""
    reach: Annotated[tuple[float, ...], "REWARD"] = ()
    """predict the budget for these rewards, on the scale of --reward-range (0 to 1)"""
    price: Annotated[float | None, "MONEY", ABOVE_0] = None
    """price of one unit of compute, to print budgets in money, too"""
    json: Json = None
    """write everything here"""

    def run(self, inputs: Sequence[str]) -> None:
        """Print the predictions for each input."""
        self._check()
        rates, results, texts = self.rates(), {}, []
        for reading in read_inputs(inputs, self):
            curve = self.curve(reading)
            fit = self.fit(curve)
            if fit.averaged_draws is None:
                few = fit.describe("too-few-points")
                raise ConfigError(f"{curve.name}: {few}; evaluate more often, or leave it out")
            shift = self.shift(reading, rates)
            prediction = Prediction(fit, (), ())  # of a run that has fallen there is no forecast
            if fit.has_forecast:
                reach = [] if "last-point-low" in fit.flags else map(self.to_unit, self.reach)
                factor = shift.factor if shift else 1.0
                prediction = predict(fit, at=self.at, reach=list(reach), factor=factor)
            texts += self._describe(reading, prediction, shift)
            results[curve.name] = self._to_json(reading, prediction, shift)
        write_json(self.json, results)
        print("\n".join(texts))

    def _check(self) -> None:
        if not self.at and not self.reach:
            raise ConfigError("predict: nothing to predict; give --at BUDGET..., --reach REWARD..., or both")
        low, high = self.reward_range
        if wrong := [x for x in self.reach if not low < x <= high]:
            scale = "the scale of --reward-range"
            if not self.rescales:
                scale = "for rewards on another scale, give --reward-range LOW HIGH"
            expected = f"expected a reward above {low:g}, up to {high:g}; {scale}"
            raise ConfigError(f"--reach {wrong[0]:g}: {expected}")

    def _describe(self, reading: Reading, prediction: Prediction, shift: Shift | None) -> list[str]:
        fit, unit = prediction.fit, reading.curve.unit
        texts = [f"Ceiling: A {interval(fit.A, 'A')}; {fit.confidence:.0%} intervals."]
        if not fit.identified:
            texts = [why_not(fit)]
            texts[0] += f" The data end at {amount(fit.compute_range[1])} {unit}." * fit.has_forecast
        texts += [_describe_shift(shift)] if shift else []
        texts += rates(fit, unit) * fit.has_forecast
        texts += [assumption(fit)] * fit.has_forecast
        texts += [self._reached(reached, fit.identified, unit) for reached in prediction.reached]
        texts += [self._needed(needed, fit.identified, unit) for needed in prediction.needed]
        if "last-point-low" in fit.flags and self.reach:
            texts.append(
                "The budget for a reward is unknown until the last checkpoint has been evaluated again."
            )
        if fit.has_forecast:
            texts += self.describe_prior(reading.curve)
        return [sources([reading]), *map(paragraph, texts)]

    def _reached(self, r: Reached, quoted: bool, unit: str) -> str:
        cost = f" (price: {amount(r.budget * self.price)})" if self.price else ""
        unchecked = f"; {amount(r.ahead)}× the data: no forecast that far is validated"
        reward = interval(r.reward, "A", quoted) + unchecked * (r.ahead > FURTHEST)
        return f"at {amount(r.budget, 6)} {unit}{cost}: reward {reward}"

    def _needed(self, n: Needed, quoted: bool, unit: str) -> str:
        e, (low, high) = n.compute, self.reward_range
        unscaled = f" ({low + n.reward * (high - low):g} from {low:g} to {high:g})" if self.rescales else ""
        start = f"reward {n.reward:g}{unscaled}:"
        if e.high == 0:
            return f"{start} reached from the start."
        if e.low == math.inf:
            return f"{start} not reached (probability {percent(n.chance)})."
        quoted = quoted and e.value < math.inf
        text = f"{start} {interval(e, quoted=quoted)} {unit}"
        if self.price:
            text += f"; price: {interval(e.times(self.price), quoted=quoted)}"
        if n.chance < 0.99:
            text += f"; the probability that any budget is enough is {percent(n.chance)}"
        return text

    def _to_json(self, reading: Reading, prediction: Prediction, shift: Shift | None) -> dict[str, Any]:
        fit, price = prediction.fit, self.price
        reached, needed = (list(map(asdict, part)) for part in (prediction.reached, prediction.needed))
        if price:
            reached = [row | {"cost": row["budget"] * price} for row in reached]
            needed = [row | {"cost": {k: x * price for k, x in row["compute"].items()}} for row in needed]
        content: dict[str, Any] = {"unit": reading.curve.unit, "source": str(reading), "notes": reading.notes}
        content |= {name: getattr(fit, name) for name in ("identified", "flags", "confidence")}
        content |= {"A": asdict(fit.A), "price": price, "kernel": shift and asdict(shift)}
        return content | {"at": reached, "reach": needed}


def _describe_shift(shift: Shift) -> str:
    heads = (shift.measured_with, shift.kernel)
    old, new = (f"{h.name} ({h.tflops:.3g} TF/s, {h.source.partition(':')[0]})" for h in heads)
    how = "by the run's own ledger, with its devices split as they are, the run takes"
    end = "the compute."
    if shift.model:
        how, end = f"a step of {shift.model} takes", "the GPU-hours (python -m bench gpu_hours shows how)."
    text = f"Measured with {old}, predicted for {new}: {how} {shift.factor:.3f} times {end} {shift.note}"
    return text.strip()
