"""The floating-point operations of an optimizer step, from its numbers of tokens.

    C = 2 N · tokens of the rollouts · (1 + models that score them) + 6 N · tokens trained on
    with LoRA:                                                  (4 N + 6 N_adapters) · tokens trained on

with N the parameters that a token passes through, as Kaplan et al. count them (arXiv 2001.08361, §2.1): of
a mixture of experts, those that it is routed to. Attention over the context, which is little for short
contexts, is left out. So are evaluations, as in the ledger's C. A frozen base has no gradients of its
weights: a third of the 6 N. Unlike device-hours, this measure of compute is the same on every machine, busy
or not, but it does not see time that is lost.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.config import ObjectiveConfig

EXPERTS_PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_topk")  # keys of config.json


def experts_per_token(config: Mapping[str, Any]) -> int | None:
    """The experts that a token is routed to, by a model's config; None if it has none."""
    return next(filter(None, map(config.get, EXPERTS_PER_TOKEN)), None)


def active_parameters(shapes: Mapping[str, Sequence[int]], experts_per_token: int | None) -> int:
    """N of a model from its parameters' shapes by name; a layer's E experts are stacked, (E, ...)."""
    total = 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        total += size * experts_per_token // shape[0] if experts_per_token and ".experts." in name else size
    return total


def train_flops(parameters: int, adapters: int) -> int:
    """FLOPs of a trained token: all of N parameters are trained where there are none in adapters."""
    return 4 * parameters + 6 * adapters if adapters else 6 * parameters


def step_flops(
    parameters: int, objective: ObjectiveConfig, metrics: Mapping[str, Any], reference: int = 0,
    adapters: int = 0,
) -> float:  # fmt: skip
    """FLOPs of one step with these metrics. A critic counts as another network of the policy's size.
    `reference`: parameters of the frozen model that scores each token, if there is one.

    In an epoch after the first, whose tokens were generated and scored before, `train/rollout_tokens` is 0.
    """
    rollouts, trained = metrics["train/rollout_tokens"], metrics["learner/input_tokens"]
    trained_token = train_flops(parameters, adapters) + 6 * parameters * objective.has_critic
    models = objective.needs_logprobs + objective.has_critic
    scored = trained if objective.kl.top_k else rollouts
    forward = 2 * rollouts * parameters * (1 + models) + 2 * scored * reference
    return float(forward + trained_token * trained)
