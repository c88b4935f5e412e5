"""The policy loss as in a textbook, for a run whose cost is to be compared with one of ours.

A recipe names it as its own objective (bench/validation/recipes/scalerl-naive.yaml). The learner imports this
module for that, and the import puts `naive_policy_loss` in the place of `kernels.policy_loss` in its process:
whole FP32 logits, log_softmax, gather and autograd. `bench.validation.chain` compares such runs with ours.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from kernels.chunk_loop import STATS, StepOutputs
from trainer.learner import policy_model

cispo = kernels.CISPO(5.0)  # the objective of the recipe `scalerl`


def naive_policy_loss(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    targets: Tensor,  # (N,)
    *,
    logprobs_gen: Tensor,  # (N,) nats
    advantages: Tensor,  # (N,)
    token_weights: Tensor,  # (N,)
    objective: kernels.Objective,
    temperature: float,
    **others: Any,
) -> kernels.PolicyLossOutput:
    """Σ_t w_t · term_t with the (N, V) logits in memory, without entropy. ValueError on other options."""
    expected = {"kl": None, "group": None, "entropy_bonus": 0.0, "logits_dtype": torch.float32}
    if wrong := {name: value for name, value in others.items() if value != expected.get(name)}:
        raise ValueError(f"naive_policy_loss was given {wrong}; expected {expected}")
    logits = F.linear(hidden.float(), weight.float()) / temperature
    logp = torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])[:, 0]
    fixed = logp.detach()
    term = objective(fixed, logprobs_gen, advantages)
    loss = (token_weights * term.dloss_dlogp * logp).sum()  # its gradient is that of Σ w · term
    loss = loss + (token_weights * (term.loss - term.dloss_dlogp * fixed)).sum()
    zeros, truncated = torch.zeros_like(fixed), term.truncated.float()
    outputs = StepOutputs(fixed, zeros, term.loss, term.ratio, truncated, zeros, None, None)
    stats = dict(zip(STATS, outputs.stats(logprobs_gen, token_weights != 0).unbind(), strict=True))
    return kernels.PolicyLossOutput(loss, fixed, zeros, stats)


setattr(policy_model, "policy_loss", naive_policy_loss)  # noqa: B010  (a type checker sees two signatures)
