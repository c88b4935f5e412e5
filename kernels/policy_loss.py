"""The fused policy loss: log-prob, importance weight, loss and gradients, without ever holding the logits.

    hidden (N, H) ──┐
                    ├─ chunk of C rows: logits = h Wᵀ in FP32 ─> log π, entropy ─> objective ─> c = dL/dlog π
    weight (V, H) ──┘        └─ in place: dz = c (onehot − softmax) ─> dX = dz W,  dW += dzᵀ h   (FP32)

The gradient is made in the forward, where the logits are at hand, and scaled in the backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from kernels import op
from kernels.check import check_shapes, inverse
from kernels.objectives import KL, Objective, SequenceObjective
from kernels.settings import DEFAULT, RowKernel, number
from kernels.shard import whole


@dataclass(frozen=True, slots=True)
class PolicyLossOutput:
    """Result of `policy_loss`; FP64 where hidden is. Tokens of weight 0 have log-prob 0 and entropy 0."""

    loss: Tensor  # () FP32, Σ weight · term; differentiable in hidden and weight, once
    logprobs: Tensor  # (N,) FP32 nats, no gradient
    entropy: Tensor  # (N,) FP32 nats, no gradient
    stats: dict[str, Tensor]  # 0-d tensors


def policy_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    logprobs_gen: Tensor,
    advantages: Tensor,
    token_weights: Tensor,
    objective: Objective | SequenceObjective | None = None,
    sequences: Tensor | None = None,
    logprobs_ref: Tensor | None = None,
    kl: KL | None = None,
    entropy_bonus: float = 0.0,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logits_dtype: torch.dtype = torch.float32,
    exact: bool = False,
    weight_parts: int = 3,
    row_kernel: RowKernel = "two-pass",
    chunk_rows: int | None = None,
    group: dist.ProcessGroup | None = None,
    backend: str | None = None,
) -> PolicyLossOutput:
    """Σ_t w_t · term_t over N tokens, with gradients, without ever holding (N, V) logits.

    hidden (N, H); weight (V, H), the LM head, tied or not; targets (N,) ids; logprobs_gen (N,) the
    generator's log-probs in nats; advantages (N,); token_weights (N,), already normalised (see
    `token_weights`). Tokens of weight 0 are left out before the first GEMM; whatever else they hold is not
    looked at. On CUDA that costs one wait for their number, unless a CUDA graph is being captured.

    objective     what the terms are; CISPO(max_ratio=4) if not given. GSPO needs `sequences` (N,) ids.
    kl            adds β · KL(coefficient, estimator) to `logprobs_ref` (N,) to each term.
    entropy_bonus subtracts that times the entropy, with its exact gradient, from each term.
    temperature   a number, or one per token. softcap: Gemma's cap · tanh(logits / cap), before it.
    logits_dtype  bfloat16 or float16: logits are rounded to it before the softmax, where a generator without
                  an FP32 head must be matched.
    exact         logits' gradients as FP32 has them (bf16 high + low parts on CUDA) instead of bf16.
    weight_parts  into how many bf16 parts an FP32 weight beside bf16 hidden is split on CUDA: 3 or 2.
    row_kernel    Triton: "two-pass", "spx" (single pass) or "lean" (no FP32 logits in memory).
    chunk_rows    rows of logits in memory at a time; by default 128 MiB of them, on CUDA 4,096 rows.
    group         ranks that hold consecutive shards of the vocabulary, of any lengths; weight is this
                  rank's. Each gets the whole loss and d_hidden, and its shard's d_weight.
    backend       "cpu", "triton" or "torch"; by default the device's (see `backend_info`).

    stats: ratio/mean, ratio/min, ratio/max, ratio/truncated (share at the bound), kl/k1 and kl/k3 (to the
    generator), kl/ref (the penalty's estimate, 0 without), entropy (means over tokens of weight ≠ 0), ess
    (effective sample size of ρ, as a share).
    ValueError on wrong shapes, types and devices; on the CPU also on ids outside [0, V), NaN and infinity.
    Under torch.compile, make the objective outside of the compiled function.
    """
    per_token = {
        "targets": targets, "logprobs_gen": logprobs_gen, "advantages": advantages,
        "token_weights": token_weights, "logprobs_ref": logprobs_ref, "sequences": sequences,
    }  # fmt: skip
    if (kl is None) != (logprobs_ref is None):
        raise ValueError("kl and logprobs_ref go together: give both or neither")
    weight = whole(weight)
    check_shapes(hidden, weight, logits_dtype, per_token)
    recording = torch.is_grad_enabled()
    loss, logp, entropy, stats, _, _ = op.policy_loss(
        hidden, weight, targets, logprobs_gen, advantages, token_weights, inverse(temperature, hidden),
        logprobs_ref, sequences, recording and hidden.requires_grad, recording and weight.requires_grad,
        number(DEFAULT if objective is None else objective), number(kl), entropy_bonus, softcap,
        logits_dtype, exact, weight_parts, row_kernel, chunk_rows, number(group), backend,
    )  # fmt: skip
    named = dict(zip(op.STATS, stats.detach().unbind(), strict=True))
    return PolicyLossOutput(loss, logp.detach(), entropy.detach(), named)
