"""Scoring: log-probs and entropies of given tokens from hidden states, without logits or gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.check import check_log_probs, check_shapes, check_values, inverse
from kernels.op import Head, Tokens
from kernels.settings import Settings
from kernels.shard import place, whole


@torch.no_grad()
def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logits_dtype: torch.dtype = torch.float32,
    group: dist.ProcessGroup | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies), each (N,) FP32 nats, of targets (N,) under hidden (N, H) · weight (V, H)ᵀ.

    2NHV FLOP; no logits in memory, or one chunk of them (backend "torch", or a logits_dtype). The arguments
    are those of `policy_loss`, and so are the errors.
    """
    weight = whole(weight)
    check_shapes(hidden, weight, logits_dtype, {"targets": targets})
    inverse_temperature = inverse(temperature, hidden)
    first, vocabulary = place(weight, group)
    check_values(hidden, vocabulary, targets, inverse_temperature)
    settings = Settings(softcap=softcap, logits_dtype=logits_dtype, group=group, backend=backend)
    tokens = Tokens(targets.long(), *(inverse_temperature,) * 4, None, None)
    with torch.autocast(hidden.device.type, enabled=False):  # it would round products
        head = Head.of(hidden, weight, inverse_temperature.dtype, settings, first)
        found = head.score(hidden, tokens)
    check_log_probs(found.logp, found.entropy)
    return found.logp, found.entropy
