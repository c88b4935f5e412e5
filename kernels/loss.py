"""The fused policy loss: log-prob, importance weight, loss and gradients, without ever holding the logits.

    hidden (N, H) ──┐
                    ├─ chunk of C rows: logits = h Wᵀ in FP32 ─> log π, entropy ─> objective ─> c = dL/dlog π
    weight (V, H) ──┘        └─ in place: dz = c (onehot − softmax) ─> dX = dz W,  dW += dzᵀ h   (FP32)

The forward computes the gradients while it has the logits; the backward only scales them.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from . import op
from .check import check_shapes, inverse, refuse_text
from .operands import Reduce, operands
from .settings import DEFAULT, RowKernel, register, traced
from .term import KL, Objective, SequenceObjective


@dataclass(frozen=True, slots=True)
class PolicyLossOutput:
    """Result of `policy_loss`, in FP64 if hidden is. Tokens of weight 0 have log-prob 0 and entropy 0."""

    loss: Tensor  # () FP32, Σ weight · term; can be differentiated once, in hidden and weight
    logprobs: Tensor  # (N,) FP32 nats, no gradient
    entropy: Tensor  # (N,) FP32 nats, no gradient
    stats: dict[str, Tensor]  # 0-d tensors, see docs/kernels.md


@traced
def policy_loss(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H): the LM head, tied or not
    targets: Tensor,  # (N,) token ids
    *,
    logprobs_gen: Tensor,  # (N,) nats, 0 at most, which is not checked: the generator's log-probs
    advantages: Tensor,  # (N,)
    token_weights: Tensor,  # (N,) already normalised, see `token_weights`
    objective: Objective | SequenceObjective | None = None,  # CISPO(max_ratio=4) by default
    sequences: Tensor | None = None,  # (N,) ids, for objectives over sequences such as GSPO
    logprobs_ref: Tensor | None = None,  # (N,) nats, for `kl`
    kl: KL | None = None,
    entropy_bonus: float = 0.0,
    temperature: float | Tensor = 1.0,  # a number, or (N,)
    softcap: float | None = None,
    logits_dtype: torch.dtype = torch.float32,
    exact: bool = False,
    weight_parts: int = 3,
    row_kernel: RowKernel = "auto",
    chunk_rows: int | None = None,
    drop_masked: bool = True,
    group: dist.ProcessGroup | None = None,
    reduce: Reduce | None = None,
    backend: str | None = None,
) -> PolicyLossOutput:
    """Σ_t w_t · term_t over N tokens and its gradients, without ever holding the (N, V) logits.

    Tokens of weight 0 are dropped before the first GEMM; their other inputs (NaN, id −100) do not matter.
    ValueError on wrong shapes, types, devices; on the CPU also on bad values. More in docs/kernels.md.

    kl             adds coefficient · KL estimate to `logprobs_ref` to each term.
    entropy_bonus  subtracts this multiple of the entropy, with its exact gradient, from each term.
    softcap        Gemma's cap · tanh(logits / cap), applied before the temperature.
    logits_dtype   bfloat16 or float16 round the logits before the softmax, to match such a generator.
    exact          FP32 gradients of the logits (on CUDA 16-bit high + low parts) instead of 16 bits.
    weight_parts   number of bf16 parts, 2 or 3, of an FP32 weight with bf16 hidden on CUDA.
    row_kernel     Triton: "two-pass", "single-pass", "fused-epilogue"; "auto": see docs/kernels.md.
    chunk_rows     rows of logits in memory at a time: 128 MiB; on CUDA 8,192, or more in half of free memory.
    drop_masked    False computes tokens of weight 0 too, so that on CUDA the host need not count the others.
    group          ranks, each with its shard of the vocabulary as `weight`; each gets the whole d_hidden.
    reduce         how ranks combine a DTensor's gradient: "mean", which is FSDP2's default, or "sum".
    backend        "cpu", "triton" or "torch"; by default the device's, see `backend_info`.
    """
    if (kl is None) != (logprobs_ref is None):
        raise ValueError("kl and logprobs_ref go together: give both or neither")
    refuse_text(entropy_bonus=entropy_bonus, softcap=softcap, temperature=temperature, chunk_rows=chunk_rows)
    check_shapes(
        hidden, weight, logits_dtype, targets=targets, logprobs_gen=logprobs_gen, advantages=advantages,
        token_weights=token_weights, logprobs_ref=logprobs_ref, sequences=sequences,
    )  # fmt: skip
    hidden, weight = operands(hidden, weight, group, reduce)
    recording = torch.is_grad_enabled()
    loss, logp, entropy, stats, _, _ = op.policy_loss(*op.Arguments(
        hidden, weight, targets, logprobs_gen, advantages, token_weights, inverse(temperature, hidden),
        logprobs_ref, sequences, recording and hidden.requires_grad, recording and weight.requires_grad,
        register(DEFAULT if objective is None else objective), register(kl), entropy_bonus, softcap,
        logits_dtype, exact, weight_parts, row_kernel, chunk_rows, drop_masked, register(group), backend,
    ))  # fmt: skip
    named = dict(zip(op.STATS, stats.detach().unbind(), strict=True))
    return PolicyLossOutput(loss, logp.detach(), entropy.detach(), named)
