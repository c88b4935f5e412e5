"""The float64 oracle: the policy loss as a textbook writes it, with the whole logits and autograd."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def reference_loss(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    targets: Tensor,  # (N,)
    logprobs_gen: Tensor,  # (N,)
    advantages: Tensor,  # (N,)
    token_weights: Tensor,  # (N,)
    max_ratio: float = math.inf,
    temperature: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """CISPO's loss, log-probs (N,) and entropies (N,) in float64; differentiable in hidden and weight."""
    t = torch.as_tensor(temperature, dtype=torch.float64).expand(len(targets))
    logits = hidden.double() @ weight.double().T / t[:, None]
    log_pi = torch.log_softmax(logits, dim=1)
    logp = log_pi[torch.arange(len(targets)), targets]
    rho = torch.exp(logp - logprobs_gen.double()).detach()
    loss = -(token_weights.double() * rho.clamp(max=max_ratio) * advantages.double() * logp).sum()
    return loss, logp, -(log_pi.exp() * log_pi).sum(1)
