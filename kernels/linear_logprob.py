"""Scoring: log-probs and entropies of given tokens from hidden states, chunk by chunk, without gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.check import check_log_probs, check_shapes, check_values, inverse
from kernels.rows import Head, softmax_rows


@torch.no_grad()
def linear_logprob(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    targets: Tensor,  # (N,)
    *,
    temperature: float | Tensor = 1.0,
    logits_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies), each (N,) FP32 nats; at most one chunk of logits in memory (2NHV FLOP)."""
    check_shapes(hidden, weight, logits_dtype, targets=targets)
    check_values(hidden, weight, targets)
    inverse_temperature, targets = inverse(temperature, hidden), targets.long()
    dtype = inverse_temperature.dtype
    logp, entropy = (torch.empty(len(targets), dtype=dtype, device=hidden.device) for _ in range(2))
    with torch.autocast(hidden.device.type, enabled=False):  # it would round products
        head = Head.of(hidden, weight, dtype, logits_dtype)
        for chunk, logits in head.chunks(hidden, inverse_temperature):
            for rows, z, scratch in head.cached(chunk.start, logits):
                r = softmax_rows(z, targets[rows], scratch)
                logp[rows], entropy[rows] = r.logp, r.entropy
    check_log_probs(logp, entropy)
    return logp, entropy
