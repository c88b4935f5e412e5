"""Reward at a budget and budget for a reward, by a fit; another loss kernel shifts the compute axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.config import ConfigError
from trainer.scaling.fit import Estimate, Fit
from trainer.scaling.kernel_cost import (
    CONSTANTS,
    MODELS,
    PUBLISHED_HEADS,
    Head,
    Setting,
    cost_factor,
    suite_heads,
)

KERNELS = {"naive": "naive FP32", "peer": "best peer", "ours": "ours"}  # names on the command line: of heads


@dataclass(frozen=True, slots=True)
class Reached:
    """What a budget buys."""

    budget: float
    reward: Estimate
    ahead: float  # the budget in multiples of the last compute there is data of


@dataclass(frozen=True, slots=True)
class Needed:
    """What a reward costs."""

    reward: float
    compute: Estimate  # infinite: not reached; 0: it was there at the start
    chance: float  # that it is reached at all


@dataclass(frozen=True, slots=True)
class Shift:
    """A run's compute for the same steps with another kernel, over that with the one it was measured with."""

    factor: float
    model: str
    kernel: Head
    measured_with: Head


def reward_at(fit: Fit, budget: float, factor: float = 1.0) -> Reached:
    """Reward at a budget; with a step that costs `factor` of a measured one: R(C / factor)."""
    measured = budget / factor
    return Reached(budget, fit.at(measured), measured / fit.compute_range[1])


def compute_for(fit: Fit, reward: float, factor: float = 1.0) -> Needed:
    """The budget for a reward; at factor × what a measured step costs."""
    e = fit.compute_for(reward)
    assert fit.draws is not None  # else fit.compute_for has raised
    chance = float(np.isfinite(fit.draws.compute_for(reward)).mean())
    return Needed(reward, Estimate(factor * e.value, factor * e.low, factor * e.high), chance)


def kernel_shift(
    model: str, kernel: str, measured_with: str, suite: Mapping[str, Any] | None = None
) -> Shift:
    """What a step with one of KERNELS costs over one with another, for one of kernel_cost.MODELS.

    `suite`: the GPU suite's kernels.json; its rates replace the published ones. The step is the paper's.
    """
    if model not in MODELS:
        raise ConfigError(f"--model {model!r}: expected one of {', '.join(MODELS)}")
    shape = MODELS[model]
    heads = {head.name: head for head in PUBLISHED_HEADS}
    if suite is not None:
        heads |= {head.name: head for head in suite_heads(suite, shape)}
    new, old = heads[KERNELS[kernel]], heads[KERNELS[measured_with]]
    setting = Setting(**{name: c.value for name, c in CONSTANTS.items()})
    return Shift(cost_factor(shape, setting, new, old), shape.name, new, old)
