"""'packed' attention for transformers: every token of a micro-batch attends to its own ancestors only.

transformers calls `packed_attention` in each layer with the `Layout` given to the model's forward. No mask
over the whole pack is ever built. A branch's own rows are queries, the rows of its path are keys, causal at
the bottom right. On CUDA one variable-length flash kernel takes all branches. Elsewhere short segments are
batched into one SDPA call whose mask is the segment's tree, and long ones go in blocks of queries: a third
faster on a CPU than whole branches, which would take the path's other queries along. There the query heads
of one KV head become further query rows, so K and V are not repeated, and masks are added, since SDPA would
make such a mask of a boolean one in every layer.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface

from trainer.learner.packing import Segment

SHORT = 128  # rows up to which a segment is batched: the mask is cheaper than more calls
BLOCK = 256  # queries of a branch taken at once: fewer make more calls, more compute more beyond the causal
UNSUPPORTED = ("softcap", "s_aux")  # what other model families ask of their attention
HALF = (torch.bfloat16, torch.float16)  # what flash kernels take
# (q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scaling) -> (queries, Hq, D), causal
Flash = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, float], Tensor]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the rows of a micro-batch go; made once, used by every layer."""

    batches: tuple[tuple[Tensor, Tensor], ...]  # rows (B, S) and mask (B, 1, S, S) to be added
    branches: tuple[tuple[int, int], ...]  # of the other rows: a branch's own rows and its path's
    own: Tensor  # (sum of own rows,) where they stand
    paths: Tensor  # (sum of path rows,) each branch's path, ancestors first
    ends: tuple[Tensor, Tensor]  # int32, own rows and path rows before each branch, then all
    restore: Tensor | None  # (T,) where each row of the pack stands in the results; None: where it was
    longest: tuple[int, int]  # own rows, and rows of a path


def layout(segments: Sequence[Segment], flash: bool = False) -> Layout:
    """Decide for each segment how it is computed; with `flash`, all go by their branches."""
    starts = np.cumsum([0, *(s.length for s in segments)])
    short: list[tuple[int, Segment]] = []
    paths: list[NDArray[np.int64]] = []
    branches, order = [], []
    for start, segment in zip(starts, segments, strict=False):
        if not flash and segment.length <= SHORT:
            short.append((start, segment))
        else:
            paths += [start + b.path for b in segment.branches]
            branches += [(b.own, len(b.path)) for b in segment.branches]
    batches = []
    if short:
        index, mask = _batched(short)
        batches.append((torch.from_numpy(index), torch.from_numpy(mask)))
        order.append(index.ravel())
    none = np.zeros(0, np.int64)
    own = np.concatenate([none, *(path[-n:] for path, (n, _) in zip(paths, branches, strict=True))])
    longest = max(len(b.path) for s in segments for b in s.branches)
    ends = np.cumsum([(0, 0), *branches], axis=0, dtype=np.int32).T.copy()
    return Layout(
        tuple(batches),
        tuple(branches),
        torch.from_numpy(own),
        torch.from_numpy(np.concatenate([none, *paths])),
        (torch.from_numpy(ends[0]), torch.from_numpy(ends[1])),
        torch.from_numpy(_inverse(np.concatenate([*order, own]), int(starts[-1]))) if batches else None,
        (max((n for n, _ in branches), default=0), longest),
    )


def _inverse(places: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    """Where each row stands in `places`; padding repeats a row, and its first place counts."""
    inverse = np.empty(rows, np.int64)
    inverse[places[::-1]] = np.arange(len(places))[::-1]
    return inverse


def _batched(batch: Sequence[tuple[int, Segment]]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Rows (B, S), padded with the segment's last row, and the tree masks (B, 1, S, S): 0 or −∞."""
    longest = max(s.length for _, s in batch)
    index = np.stack([start + np.minimum(np.arange(longest), s.length - 1) for start, s in batch])
    mask = np.zeros((len(batch), 1, longest, longest), np.bool_)
    mask[:, :, :, 0] = True  # padding must attend to something; a tree's first row is everyone's ancestor
    for one, (_, segment) in zip(mask, batch, strict=True):
        for b in segment.branches:
            rows = np.ix_(b.path[-b.own :], b.path)
            one[0][rows] = np.tri(b.own, len(b.path), len(b.path) - b.own, dtype=np.bool_)
    return index, np.where(mask, np.float32(0), np.float32(-np.inf))


def packed_attention(
    module: nn.Module,
    query: Tensor,  # (1, Hq, T, D)
    key: Tensor,  # (1, Hk, T, D)
    value: Tensor,  # (1, Hk, T, D)
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    *,
    packed: Layout,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls; returns (1, T, Hq, D). `attention_mask` is None: no mask is registered."""
    if any(kwargs.get(name) is not None for name in UNSUPPORTED) or (
        sliding_window is not None and sliding_window < packed.longest[1]
    ):
        raise ValueError(f"packed attention knows neither {', '.join(UNSUPPORTED)} nor a sliding window")
    # Under autocast norms and rotations give FP32 again; a value comes straight from its layer.
    q, k, v = (x.squeeze(0).transpose(0, 1).to(value.dtype) for x in (query, key, value))  # (T, heads, D)
    kernel = flash_kernel() if q.is_cuda and q.dtype in HALF and not packed.batches else None
    if kernel is not None:
        return by_flash(kernel, q, k, v, packed, scaling)[None], None
    parts = [_batch_attention(q, k, v, rows, mask, scaling) for rows, mask in packed.batches]
    if packed.branches:
        parts += _branch_attention(q, k, v, packed, scaling)
    out = torch.cat(parts)
    return (out if packed.restore is None else out.index_select(0, packed.restore))[None], None


def _batch_attention(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """(B·S, Hq, D)."""
    (b, s), hk, d = rows.shape, k.shape[1], k.shape[2]
    g = q.shape[1] // hk
    flat = rows.reshape(-1)
    qb = q.index_select(0, flat).view(b, s, hk, g, d).permute(0, 2, 3, 1, 4).reshape(b, hk, g * s, d)
    kb, vb = (x.index_select(0, flat).view(b, s, hk, d).transpose(1, 2) for x in (k, v))
    mask = mask.to(q.dtype).repeat(1, 1, g, 1)
    out = F.scaled_dot_product_attention(qb, kb, vb, attn_mask=mask, scale=scaling)
    return out.view(b, hk, g, s, d).permute(0, 3, 1, 2, 4).reshape(b * s, hk * g, d)


def _branch_attention(q: Tensor, k: Tensor, v: Tensor, packed: Layout, scaling: float) -> Iterator[Tensor]:
    """(rows, Hq, D) of each block of each branch, in order. All is cut at once: a slice's gradient is as
    large as what it was cut from, a split's is not."""
    (hk, d), g, longest = k.shape[1:], q.shape[1] // k.shape[1], packed.longest[1]
    blocks = [min(BLOCK, own - at) for own, _ in packed.branches for at in range(0, own, BLOCK)]
    own_rows = q if packed.restore is None else q.index_select(0, packed.own)
    queries = iter(own_rows.reshape(-1, hk, g, d).split(blocks))
    lengths = [length for _, length in packed.branches]
    keys, values = (gather(x, packed.paths).split(lengths) for x in (k, v))
    causal = _causal(longest, g, q.dtype, q.device)
    for (own, length), kb, vb in zip(packed.branches, keys, values, strict=True):
        kb, vb = (x.transpose(0, 1)[None] for x in (kb, vb))
        for end in (*range(length - own + BLOCK, length, BLOCK), length):
            qb = next(queries)
            n = len(qb)
            first = longest - 1 - end + n  # so that the last query attends to all `end` keys
            out = F.scaled_dot_product_attention(
                qb.permute(1, 0, 2, 3).reshape(1, hk, n * g, d),
                kb[:, :, :end],
                vb[:, :, :end],
                attn_mask=causal[: n * g, first : first + end],
                scale=scaling,
            )
            yield out.view(hk, n, g, d).transpose(0, 1).reshape(n, hk * g, d)


@lru_cache(1)
def _causal(longest: int, group: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(BLOCK · group, longest + BLOCK), 0 or −∞, of which every block's mask is a part; each row comes
    `group` times."""
    seen = torch.ones(BLOCK, longest + BLOCK, dtype=torch.bool, device=device).tril_(longest - 1)
    mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))
    return mask.repeat_interleave(group, 0)


def by_flash(kernel: Flash, q: Tensor, k: Tensor, v: Tensor, packed: Layout, scaling: float) -> Tensor:
    """(T, Hq, D) by one call. The branches' own rows are all rows, in order, so queries stay in place."""
    keys, values = gather(k, packed.paths), gather(v, packed.paths)
    return kernel(q, keys, values, *packed.ends, *packed.longest, scaling)


def gather(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows], for rows taken many times: a prompt's by each of its completions."""
    out: Tensor = _Gather.apply(x, rows)
    return out


class _Gather(torch.autograd.Function):
    """Gradients of a row sum in FP32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = x.shape
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        wide = gradient if gradient.dtype == torch.float64 else gradient.float()
        return wide.new_zeros(ctx.shape).index_add_(0, rows, wide).to(gradient.dtype), None


@cache
def flash_kernel() -> Flash | None:
    """flash-attn's variable-length kernel, else torch's own; None if there is neither."""
    if importlib.util.find_spec("flash_attn") is not None:
        from flash_attn import flash_attn_varlen_func

        return lambda q, k, v, cq, ck, mq, mk, scaling: flash_attn_varlen_func(
            q, k, v, cq, ck, mq, mk, softmax_scale=scaling, causal=True
        )
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return None
    from torch.nn.attention.varlen import varlen_attn

    return partial(_torch_varlen, varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters)


def _torch_varlen(
    varlen_attn: Callable[..., Any], grouped: bool, q: Tensor, k: Tensor, v: Tensor,
    ends_q: Tensor, ends_k: Tensor, longest_q: int, longest_k: int, scaling: float,
) -> Tensor:  # fmt: skip
    """`grouped`: it takes fewer KV heads than query heads, which torch 2.11 does not."""
    how: dict[str, Any] = {"enable_gqa": True} if grouped else {}
    if not grouped:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    out: Tensor = varlen_attn(
        q, k, v, ends_q, ends_k, longest_q, longest_k, scale=scaling, window_size=(-1, 0), **how
    )
    return out


AttentionInterface.register("packed", packed_attention)
