"""The op under the names and signatures that other libraries call, so that one assignment puts it there.

Each takes the arguments of the original and returns what that returns, from FP32-exact logits that are never
all in memory. ValueError for what is not supported. docs/kernels-elsewhere.md shows where each one goes.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .loss import policy_loss
from .objectives import REINFORCE
from .operands import Reduce
from .scoring import linear_logprob

IGNORED = -100  # the label of a token that is not in the loss


class ChunkedLogProbFunction:
    """`trl.kernels.ChunkedLogProbFunction` of TRL 1.16: every trainer of TRL takes its log-probs from it."""

    @staticmethod
    def apply(
        hidden: Tensor,  # (N, H)
        weight: Tensor,  # (V, H)
        bias: Tensor | None,
        targets: Tensor,  # (N,)
        temperature: float,
        chunk_size: int,  # columns of a tile: has no effect here
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = ("entropy",),
    ) -> tuple[Tensor, Tensor | None, None, Tensor | None, Tensor | None]:
        """(log-probs, entropy, None, mean logits, is top 1), (N,) each; None for what `outputs` lacks."""
        if bias is not None or "log_sum_sq_probs" in outputs:
            raise ValueError("the op has no bias of the head and no log_sum_sq_probs (DPO's use_weighting)")
        if "mean_logits" in outputs and final_logit_softcapping is not None:
            raise ValueError("mean_logits of capped logits need the logits; set no final_logit_softcapping")
        # s·z, capped at c, over T: z capped at c/s, over T/s
        softcap = None if final_logit_softcapping is None else final_logit_softcapping / logit_scale
        temperature = temperature / logit_scale
        out = linear_logprob(hidden, weight, targets, temperature=temperature, softcap=softcap)
        mean = None
        if "mean_logits" in outputs:
            mean = hidden.detach().float() @ weight.detach().float().mean(0) / temperature
        entropy, top1 = (
            x if name in outputs else None
            for x, name in ((out.entropy, "entropy"), (out.is_argmax, "is_top1"))
        )
        return out.logprobs, entropy, None, mean, top1


class SequenceChunkedLogProbEntropy:
    """`_SequenceChunkedLogProbEntropyFn` of prime-rl in August 2026."""

    @staticmethod
    def apply(
        hidden: Tensor,  # (N, H)
        weight: Tensor,  # (V, H)
        labels: Tensor,  # (N,)
        inv_temperature: Tensor,  # (N,)
        chunk_size: int,  # has no effect here
    ) -> tuple[Tensor, Tensor]:
        """(log-probs, entropy), (N,) each."""
        return linear_logprob(hidden, weight, labels, temperature=1 / inv_temperature)[:2]


def verl_linear_cross_entropy(
    hidden: Tensor,  # (..., H)
    weight: Tensor,  # (V, H), or this rank's shard of the vocabulary
    labels: Tensor,  # (...)
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-probs, entropy), flat, as `verl.utils.kernel.linear_cross_entropy` of verl in August 2026."""
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"reduction is {reduction!r}; expected none, sum or mean")
    out = linear_logprob(
        hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1), temperature=temperature,
        group=dist_process_group,
    )  # fmt: skip
    return out.logprobs if reduction == "none" else getattr(out.logprobs, reduction)(), out.entropy


def liger_scaled_cross_entropy(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    target: Tensor,  # (N,)
    temperature: float = 1.0,
    ignore_index: int = IGNORED,
    m_tiles_per_cluster: int = 1,  # has no effect here
    return_entropy: bool = False,
    selected_token_ids: None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`LigerFusedLinearScaledCrossEntropyFunction.apply` of Liger 0.8.5: −log π, 0 where ignored."""
    if selected_token_ids is not None:
        raise ValueError("the op gives the log-probs of the targets only; leave selected_token_ids out")
    ignored = target == ignore_index
    out = linear_logprob(hidden, weight, target.masked_fill(ignored, 0), temperature=temperature)
    nll, entropy = (x.masked_fill(ignored, 0.0) for x in (-out.logprobs, out.entropy))
    return (nll, entropy) if return_entropy else nll


def linear_cross_entropy(
    input: Tensor,  # (N, H)
    linear_weight: Tensor,  # (V, H)
    target: Tensor,  # (N,)
    *,
    reduction: str = "mean",
    ignore_index: int | None = None,  # -100
    options: Any = None,  # how to chunk: has no effect here
    reduce: Reduce | None = None,  # for a DTensor weight, as in `policy_loss`
) -> Tensor:
    """The cross entropy, as `torch.nn.functional.linear_cross_entropy` of torch 2.13 of class indices.

    FP32 whatever the inputs are; 0 if no token counts, of which torch makes NaN.
    """
    counted = target != (IGNORED if ignore_index is None else ignore_index)
    if reduction == "none":
        scored = linear_logprob(input, linear_weight, target.where(counted, 0), reduce=reduce)
        return -scored.logprobs.where(counted, 0.0)
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; expected none, mean or sum")
    weights = counted.float() / (counted.sum().clamp(min=1) if reduction == "mean" else 1)
    return _negative_log_likelihood(input, linear_weight, target, weights, reduce)


def causal_lm_loss(
    hidden: Tensor,  # (B, T, H), after the last norm
    weight: Tensor,  # (V, H)
    labels: Tensor,  # (B, T)
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORED,
    shift_labels: Tensor | None = None,
    reduce: Reduce | None = None,  # for a DTensor weight, as in `policy_loss`
) -> Tensor:
    """`transformers.loss.loss_utils.ForCausalLMLoss` of transformers 5.17, from hidden states for logits.

    0 if no token counts, of which transformers makes NaN.
    """
    if shift_labels is None:
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    target = shift_labels.reshape(-1).to(hidden.device)
    counted = target != ignore_index
    number = counted.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return _negative_log_likelihood(hidden.flatten(0, -2), weight, target, counted.float() / number, reduce)


def _negative_log_likelihood(
    hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor, reduce: Reduce | None
) -> Tensor:
    """Σ_t w_t · −log π(y_t), with both gradients in one pass (6NHV); on CUDA REINFORCE's term is fused."""
    ones = torch.ones_like(weights)
    return policy_loss(
        hidden, weight, targets, logprobs_gen=0 * ones, advantages=ones, token_weights=weights,
        objective=REINFORCE(), reduce=reduce,
    ).loss  # fmt: skip
