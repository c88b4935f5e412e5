"""The float64 oracle for tests: the policy loss as in a textbook, with the full logits and autograd."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def reference_policy_loss(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    targets: Tensor,  # (N,)
    token_weights: Tensor,  # (N,)
    surrogate: Callable[[Tensor], Tensor],  # log-probs (N,) to terms (N,), differentiable
    *,
    entropy_bonus: float = 0.0,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ w · (term − bonus · entropy), log-probs (N,), entropies (N,) in float64; differentiable."""
    t = torch.as_tensor(temperature, dtype=torch.float64).expand(len(targets))
    logits = hidden.double() @ weight.double().T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_pi = torch.log_softmax(logits / t[:, None], dim=1)
    logp = log_pi[torch.arange(len(targets)), targets]
    entropy = -(log_pi.exp() * log_pi).sum(1)
    return (token_weights.double() * (surrogate(logp) - entropy_bonus * entropy)).sum(), logp, entropy


def reference_loss(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    targets: Tensor,  # (N,)
    logprobs_gen: Tensor,  # (N,)
    advantages: Tensor,  # (N,)
    token_weights: Tensor,  # (N,)
    max_ratio: float = math.inf,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for CISPO, −sg(min(ρ, ρ_max)) · Â · log π."""

    def cispo(logp: Tensor) -> Tensor:
        rho = torch.exp(logp - logprobs_gen.double()).detach()
        return -rho.clamp(max=max_ratio) * advantages.double() * logp

    return reference_policy_loss(hidden, weight, targets, token_weights, cispo, **options)
