"""The reward at a budget and the budget for a reward; another loss kernel rescales the compute axis."""

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

KERNELS = {"naive": "naive FP32", "peer": "best peer", "ours": "ours"}  # command line: name of the head


@dataclass(frozen=True, slots=True)
class Reached:
    """The reward at a budget."""

    budget: float
    reward: Estimate
    ahead: float  # the budget in multiples of the last compute measured


@dataclass(frozen=True, slots=True)
class Needed:
    """The compute for a reward."""

    reward: float
    compute: Estimate  # infinite: never reached; 0: reached at the start
    chance: float  # probability that it is ever reached


@dataclass(frozen=True, slots=True)
class Shift:
    """The compute of a run with another loss kernel, relative to the kernel it was measured with."""

    factor: float
    model: str
    kernel: Head
    measured_with: Head


def reward_at(fit: Fit, budget: float, factor: float = 1.0) -> Reached:
    """The reward at a budget: R(C / factor), where a step costs `factor` times a measured one."""
    measured = budget / factor
    return Reached(budget, fit.at(measured), measured / fit.compute_range[1])


def compute_for(fit: Fit, reward: float, factor: float = 1.0) -> Needed:
    """The budget for a reward, where a step costs `factor` times a measured one."""
    e = fit.compute_for(reward)
    assert fit.draws is not None  # else fit.compute_for would have raised
    chance = float(np.isfinite(fit.draws.compute_for(reward)).mean())
    return Needed(reward, e.times(factor), chance)


def kernel_shift(
    model: str, kernel: str, measured_with: str, suite: Mapping[str, Any] | None = None
) -> Shift:
    """What a step costs with one of KERNELS relative to another, for one of kernel_cost.MODELS.

    `suite`: kernels.json of the GPU suite, whose rates replace the published ones. The step has the paper's
    size.
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
