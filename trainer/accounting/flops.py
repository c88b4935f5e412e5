"""The floating-point operations of an optimizer step, from its numbers of tokens.

    C = 2 N · tokens of the rollouts · (1 + models that score them) + 6 N · tokens trained on

with N the parameters that a token passes through, as Kaplan et al. count them (arXiv 2001.08361, §2.1): of
a mixture of experts, those that it is routed to. Attention over the context, which is little for short
contexts, is left out. So are evaluations, as in the ledger's C. Unlike device-hours, this measure of compute
is the same on every machine, busy or not, but it does not see time that is lost.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.config import ObjectiveConfig


def active_parameters(shapes: Mapping[str, Sequence[int]], experts_per_token: int | None) -> int:
    """N of a model from its parameters' shapes by name; a layer's E experts are stacked, (E, ...)."""
    total = 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        total += size * experts_per_token // shape[0] if experts_per_token and ".experts." in name else size
    return total


def step_flops(parameters: int, objective: ObjectiveConfig, metrics: Mapping[str, Any]) -> float:
    """FLOPs of one step with these metrics. A critic counts as another network of the policy's size.

    In an epoch after the first, whose tokens were generated and scored before, `train/rollout_tokens` is 0.
    """
    rollouts, trained = metrics["train/rollout_tokens"], metrics["learner/input_tokens"]
    networks = 1 + objective.has_critic
    models = objective.needs_logprobs + objective.needs_reference + objective.has_critic
    return float(parameters * (2 * rollouts * (1 + models) + 6 * networks * trained))
