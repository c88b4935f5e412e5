"""Scoring: log-probs and entropies of given tokens from hidden states, chunk by chunk, without gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.check import checked
from kernels.rows import chunk_rows, logits_of, softmax_rows


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
    inverse_temperature = checked(hidden, weight, targets, temperature)
    dtype = inverse_temperature.dtype
    w = weight if weight.is_cuda and weight.dtype == torch.bfloat16 else weight.to(dtype)
    logp, entropy = (torch.empty(len(targets), dtype=dtype, device=hidden.device) for _ in range(2))
    step = chunk_rows(len(weight), dtype.itemsize)
    for at in range(0, len(targets), step):
        rows = slice(at, at + step)
        r = softmax_rows(logits_of(hidden[rows], w, inverse_temperature[rows], logits_dtype), targets[rows])
        logp[rows], entropy[rows] = r.logp, r.entropy
    return logp, entropy
