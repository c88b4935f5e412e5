"""Scoring: log-probs and entropies of given tokens from hidden states, without logits or gradients."""

import torch
import torch.distributed as dist
from torch import Tensor

from .backends import launching
from .check import check_log_probs, check_shapes, check_values, inverse
from .head import LMHead
from .settings import Settings
from .shard import gather_weight, shard_offset
from .tokens import Tokens


@torch.no_grad()
def linear_logprob(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    targets: Tensor,  # (N,) token ids
    *,
    temperature: float | Tensor = 1.0,  # a number, or (N,)
    softcap: float | None = None,
    logits_dtype: torch.dtype = torch.float32,
    group: dist.ProcessGroup | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies) of the targets, (N,) FP32 nats each, under the logits hidden · weightᵀ.

    2NHV FLOP. No logits in memory, except one chunk with backend "torch" or a 16-bit `logits_dtype`. The
    arguments and the errors are those of `policy_loss`.
    """
    weight = gather_weight(weight)
    check_shapes(hidden, weight, logits_dtype, {"targets": targets})
    inverse_temperature = inverse(temperature, hidden)
    first, vocabulary = shard_offset(weight, group)
    check_values(hidden, vocabulary, targets, inverse_temperature)
    settings = Settings(softcap=softcap, logits_dtype=logits_dtype, group=group, backend=backend)
    tokens = Tokens(targets.long(), *(inverse_temperature,) * 4, None, None)
    with launching(hidden):
        head = LMHead.prepare(hidden, weight, inverse_temperature.dtype, settings, first)
        scored = head.score(hidden, tokens)
    check_log_probs(scored.logp, scored.entropy)
    return scored.logp, scored.entropy
