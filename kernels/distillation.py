"""Distillation from a teacher's top-k: log-probs of several tokens a row, and the forward KL on them.

log π of token j is log π₁ + u_j − u₁: `linear_logprob` of the first token, and differences of k logits, each
the product of a row of hidden with a row of the weight. So no row kernel has to know of k.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .check import check_shapes, check_values, inverse
from .head import chunks
from .operands import Reduce, operands, shard_offset
from .scoring import linear_logprob

GATHER_BYTES = 128 << 20  # of gathered rows of the weight, in memory at a time


def topk_logprob(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    ids: Tensor,  # (N, k) token ids, such as a teacher's most likely
    *,
    temperature: float | Tensor = 1.0,  # a number, or (N,)
    softcap: float | None = None,
    group: dist.ProcessGroup | None = None,
    reduce: Reduce | None = None,
    backend: str | None = None,
) -> Tensor:
    """(N, k) FP32 log-probs of the tokens, differentiable once in hidden and weight.

    It costs what `linear_logprob` does, which documents the arguments, and k products of width H a row. The
    backward holds another FP32 gradient of the weight, unless that is frozen.
    """
    if ids.dim() != 2 or not ids.shape[1]:
        raise ValueError(f"ids: expected shape (N, k) with k of 1 or more, given {tuple(ids.shape)}")
    check_shapes(hidden, weight, torch.float32, ids=ids[:, 0])
    hidden, weight = operands(hidden, weight, group, reduce)
    start, vocabulary = shard_offset(weight, group)
    check_values(hidden, vocabulary, ids, inverse(temperature, hidden))
    options: dict[str, Any] = {"temperature": temperature, "softcap": softcap, "backend": backend}
    first = linear_logprob(hidden, weight, ids[:, 0], group=group, **options).logprobs
    u: Tensor = _Logits.apply(hidden, weight, ids.long() - start, group)
    if softcap is not None:
        u = softcap * torch.tanh(u / softcap)
    u = u * inverse(temperature, hidden)[:, None]
    return first[:, None] + u - u[:, :1]


def forward_kl(logprobs: Tensor, teacher: Tensor) -> Tensor:
    """(N,) KL(teacher ‖ π) over the k tokens of each row, from log-probs (N, k), and all others as one.

        Σ_j q_j log q_j/π_j + r log r/s,    r = 1 − Σ_j q_j, s = 1 − Σ_j π_j

    It is at most the KL over the vocabulary, and equal to it if π is proportional to q on the others. From
    FP32 log-probs s is known to 1e-7: its gradient errs by about 1e-7 / s of itself, and is 0 below.
    """
    if logprobs.dim() != 2 or logprobs.shape != teacher.shape:
        raise ValueError(
            f"expected log-probs (N, k) of both, given {tuple(logprobs.shape)} and {tuple(teacher.shape)}"
        )
    student, teacher = (torch.cat([x, _log_rest(x)], 1) for x in (logprobs, teacher))
    return (teacher.exp() * (teacher - student)).where(teacher > float("-inf"), 0.0).sum(1)


def _log_rest(logprobs: Tensor) -> Tensor:
    """(N, 1) the log of the probability that is not the tokens', of 1e-7 at least."""
    return (-logprobs.logsumexp(1, keepdim=True).clamp(max=-1e-7).expm1()).log()


class _Logits(torch.autograd.Function):
    """(N, k) the products of hidden (N, H) with rows ids (N, k) of the weight, in FP32, or FP64 if it is.

    With a group, rows outside this rank's shard are another rank's.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, group: dist.ProcessGroup | None
    ) -> Tensor:
        local = (ids >= 0) & (ids < len(weight))
        ids = ids.clamp(0, len(weight) - 1)
        ctx.save_for_backward(hidden, weight, ids, local)
        ctx.group = group
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        u = hidden.new_empty(ids.shape, dtype=dtype)
        for rows in _chunks(ids, weight):
            u[rows] = (weight[ids[rows]].to(dtype) * hidden[rows, None].to(dtype)).sum(2)
        return _summed(u.where(local, 0.0), group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, c: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        hidden, weight, ids, local = ctx.saved_tensors
        c, d_hidden, d_weight = c.where(local, 0.0), torch.empty_like(hidden, dtype=c.dtype), None
        if ctx.needs_input_grad[1]:
            d_weight = torch.zeros_like(weight, dtype=c.dtype)
        for rows in _chunks(ids, weight):
            factors = c[rows, :, None]
            d_hidden[rows] = (factors * weight[ids[rows]]).sum(1)
            if d_weight is None:
                continue
            summands, tokens = (factors * hidden[rows, None]).flatten(0, 1), ids[rows].flatten()
            if d_weight.is_cuda:  # sorted there, and without atomics; on the CPU index_add_ is
                d_weight.index_put_((tokens,), summands, accumulate=True)
            else:
                d_weight.index_add_(0, tokens, summands)
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        return _summed(d_hidden, ctx.group).to(hidden.dtype), d_weight, None, None


def _summed(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum of all ranks' x, in place; x without a group."""
    if group is not None:
        dist.all_reduce(x, dist.ReduceOp.SUM, group)
    return x


def _chunks(ids: Tensor, weight: Tensor) -> list[slice]:
    per_row = ids.shape[1] * weight.shape[1] * max(4, weight.element_size())
    return chunks(len(ids), max(1, GATHER_BYTES // per_row))
