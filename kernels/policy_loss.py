"""The fused policy loss: log-prob, importance weight, loss and gradients in one pass over token chunks.

    hidden (N, H) ──┐
                    ├─ chunk of C rows: logits = h Wᵀ in FP32 ─> log π, entropy ─> objective ─> c = dL/dlog π
    weight (V, H) ──┘        └─ in place: dz = c (onehot − softmax) ─> dX = dz W,  dW += dzᵀ h   (FP32)

The gradient is made in the forward, where the logits are at hand, and scaled in the backward: three GEMMs
(6NHV FLOP), and never more than one chunk of logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.check import check_log_probs, check_shapes, check_values, inverse
from kernels.objectives import CISPO, Objective
from kernels.rows import Head, softmax_rows

STATS = ("ratio/mean", "ratio/min", "ratio/max", "ratio/truncated", "kl/k1", "kl/k3", "entropy", "ess")


@dataclass(frozen=True, slots=True)
class PolicyLossOutput:
    """Result of `policy_loss`; FP64 where hidden is. Tokens of weight 0 have log-prob 0 and entropy 0."""

    loss: Tensor  # () FP32, Σ weight · term; differentiable in hidden and weight
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
    objective: Objective | None = None,
    temperature: float | Tensor = 1.0,
    logits_dtype: torch.dtype = torch.float32,
) -> PolicyLossOutput:
    """Σ_t w_t · term_t over N tokens, with gradients, without ever holding (N, V) logits.

    hidden (N, H); weight (V, H), the LM head; targets (N,) ids; logprobs_gen (N,) the generator's log-probs
    in nats; advantages (N,); token_weights (N,), already normalised (see `token_weights`). The objective
    defaults to CISPO(max_ratio=4). temperature: a number, or one per token. logits_dtype: what the logits
    are rounded to before the softmax (FP32 unless a generator without an FP32 head must be matched).
    Tokens of weight 0 are left out before the first GEMM; whatever else they hold is not looked at.

    stats: ratio/mean, ratio/min, ratio/max, ratio/truncated (share at the bound), kl/k1 and kl/k3 (to the
    generator), entropy (means over tokens of weight ≠ 0), ess (effective sample size of ρ, as a share).
    ValueError on wrong shapes, types and devices; on the CPU also on ids outside [0, V), NaN and infinity.
    """
    per_token = {"logprobs_gen": logprobs_gen, "advantages": advantages, "token_weights": token_weights}
    check_shapes(hidden, weight, logits_dtype, targets=targets, **per_token)
    per_token["inverse_temperature"] = inverse(temperature, hidden)
    dtype = per_token["inverse_temperature"].dtype
    n, kept = len(targets), token_weights.nonzero()[:, 0]
    if len(kept) < n:
        hidden, targets = (x.index_select(0, kept) for x in (hidden, targets))
        per_token = {name: x.index_select(0, kept) for name, x in per_token.items()}
    check_values(hidden, weight, targets, **per_token)
    per_token = {name: x.detach().to(dtype) for name, x in per_token.items()}
    with torch.autocast(hidden.device.type, enabled=False):  # it would round products
        loss, logp, entropy, ratio, truncated = _PolicyLoss.apply(
            hidden, weight, targets.long(), *per_token.values(), objective or CISPO(), logits_dtype,
            torch.is_grad_enabled(),
        )  # fmt: skip
    check_log_probs(logp, entropy)
    stats = _stats(logp, per_token["logprobs_gen"], entropy, ratio, truncated)
    if len(kept) < n:
        logp, entropy = (x.new_zeros(n).index_copy_(0, kept, x) for x in (logp, entropy))
    return PolicyLossOutput(loss, logp, entropy, stats)


class _PolicyLoss(torch.autograd.Function):
    """Gradients are computed in the forward and scaled by the upstream gradient in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        logprobs_gen: Tensor,
        advantages: Tensor,
        token_weights: Tensor,
        inverse_temperature: Tensor,
        objective: Objective,
        logits_dtype: torch.dtype,
        grad_enabled: bool,
    ) -> tuple[Tensor, ...]:
        dtype, n = logprobs_gen.dtype, len(targets)
        # needs_input_grad is true under no_grad too
        needs_hidden, needs_weight = (grad_enabled and needed for needed in ctx.needs_input_grad[:2])
        head = Head.of(hidden, weight, dtype, logits_dtype)
        d_hidden = torch.empty_like(hidden, dtype=dtype) if needs_hidden else None
        d_weight = torch.zeros_like(weight, dtype=dtype) if needs_weight else None
        logp, entropy, ratio, loss = (torch.empty(n, dtype=dtype, device=hidden.device) for _ in range(4))
        truncated = torch.empty(n, dtype=torch.bool, device=hidden.device)
        for chunk, logits in head.chunks(hidden, inverse_temperature):
            for rows, z, scratch in head.cached(chunk.start, logits):
                r = softmax_rows(z, targets[rows], scratch)
                term = objective(r.logp, logprobs_gen[rows], advantages[rows])
                logp[rows], entropy[rows] = r.logp, r.entropy
                loss[rows], ratio[rows], truncated[rows] = term.loss, term.ratio, term.truncated
                if needs_hidden or needs_weight:
                    # dz_j = −c π_j; dz_y = c (1 − π_y) = c Σ_{j≠y} e_j / Σ keeps its precision as π_y → 1
                    c = token_weights[rows] * term.dloss_dlogp * inverse_temperature[rows] / r.total
                    torch.mul(r.exp, -c[:, None], out=z).scatter_(
                        1, targets[rows, None], (c * r.others)[:, None]
                    )
            if d_hidden is not None:
                torch.mm(logits, head.weight.to(dtype), out=d_hidden[chunk])
            if d_weight is not None:
                d_weight.addmm_(logits.t(), hidden[chunk].to(dtype))
        ctx.save_for_backward(
            d_hidden.to(hidden.dtype) if d_hidden is not None else None,
            d_weight.to(weight.dtype) if d_weight is not None else None,
        )
        ctx.mark_non_differentiable(logp, entropy, ratio, truncated)
        return (loss * token_weights).sum(), logp, entropy, ratio, truncated

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        upstream = grads[0]
        return (
            d_hidden * upstream.to(d_hidden.dtype) if d_hidden is not None else None,
            d_weight * upstream.to(d_weight.dtype) if d_weight is not None else None,
            *(None,) * 8,
        )


def _stats(
    logp: Tensor, logp_gen: Tensor, entropy: Tensor, ratio: Tensor, truncated: Tensor
) -> dict[str, Tensor]:
    """Means over the tokens in the loss; zeros where there is none."""
    if not len(logp):
        return dict.fromkeys(STATS, logp.new_zeros(()))
    log_ratio = logp - logp_gen
    return {
        "ratio/mean": ratio.mean(),
        "ratio/min": ratio.min(),
        "ratio/max": ratio.max(),
        "ratio/truncated": truncated.to(ratio.dtype).mean(),
        "kl/k1": -log_ratio.mean(),  # KL(π_gen ‖ π_train), tokens being the generator's
        "kl/k3": (torch.expm1(log_ratio) - log_ratio).mean(),  # Schulman's k3 of the same: never negative
        "entropy": entropy.mean(),
        "ess": ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()),
    }
