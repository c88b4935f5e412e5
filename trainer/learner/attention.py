"""'packed' attention for transformers: every token of a micro-batch attends only to its own ancestors.

transformers calls `packed_attention` in each layer with the `Layout` given to the model's forward. A mask
over the whole micro-batch is never built. A branch's own rows are queries and the rows of its path are keys,
causal, aligned at the bottom right. On CUDA one variable-length flash kernel computes all branches. Elsewhere
short segments are batched into one SDPA call, whose mask is the segment's tree, and long ones go by blocks of
queries: on a CPU a third faster than whole branches, since a block takes only the keys up to its last query.
The query heads of one KV head become further query rows, so K and V are not repeated. Masks hold 0 or −∞,
since SDPA would convert a boolean one in every layer.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface

from trainer.learner.packing import Branch, Segment
from trainer.learner.part_times import ATTENTION, PartTimes

SHORT = 128  # rows up to which a segment is batched: there a mask costs less than more calls
BLOCK = 256  # queries in a block; smaller: more calls, larger: more work that the mask discards
UNSUPPORTED = ("softcap", "s_aux")  # arguments that other model families give their attention
# A sliding window is the number of rows that a row attends to, itself included; this is none.
NO_WINDOW = 2**31 - 1
FLASH_DTYPES = (torch.bfloat16, torch.float16)  # the types that flash kernels take


class Lengths(NamedTuple):
    """The lengths of the branches, under the names that FlashAttention gives them."""

    cu_seqlens_q: Tensor  # (branches + 1,) int32, own rows before each branch, and in total
    cu_seqlens_k: Tensor  # (branches + 1,) int32, path rows
    max_seqlen_q: int
    max_seqlen_k: int


Flash = Callable[[Tensor, Tensor, Tensor, Lengths, float, int], Tensor]
"""(q, k, v, lengths, scaling, window) -> (queries, Hq, D)."""


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Consecutive own rows of a branch; the last attends to the first `keys` rows of the branch's path."""

    branch: int
    queries: int
    keys: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Places of a micro-batch's rows in attention; computed once, used by every layer."""

    # Short segments: rows (B, S), mask (B, 1, S, S) to be added, and each row's place in its path (B, S).
    batches: tuple[tuple[Tensor, Tensor, Tensor], ...]
    blocks: tuple[QueryBlock, ...]  # of all other segments
    query_rows: Tensor  # (sum of the branches' own rows,) in the order of the blocks
    key_rows: Tensor  # (sum of the paths' lengths,) each branch's path, ancestors first
    path_lengths: list[int]  # by branch
    cumulative: Tensor  # (2, branches + 1) int32, own rows and path rows before each branch, and in total
    restore: Tensor | None  # (T,) the place of each row in the results; None if the order is the same
    max_queries: int  # own rows of a branch
    max_keys: int  # rows of any path, those of short segments included

    def map(self, put: Callable[[Tensor], Tensor]) -> "Layout":
        """The same with every tensor as `put` returns it."""
        return replace(
            self, batches=tuple((put(rows), put(mask), put(places)) for rows, mask, places in self.batches),
            query_rows=put(self.query_rows), key_rows=put(self.key_rows), cumulative=put(self.cumulative),
            restore=None if self.restore is None else put(self.restore),
        )  # fmt: skip


def layout(segments: Sequence[Segment], flash: bool = False) -> Layout:
    """Decide for each segment how it is computed; with `flash`, no segment is batched."""
    put, starts = torch.from_numpy, np.cumsum([0, *(s.length for s in segments)])
    short: list[tuple[int, Segment]] = []
    branches: list[Branch] = []  # of the others, with paths in rows of the micro-batch
    for start, segment in zip(starts, segments, strict=False):
        if not flash and segment.length <= SHORT:
            short.append((start, segment))
        else:
            branches += [Branch(start + b.path, b.own_rows) for b in segment.branches]
    batches = [_batched(short)] if short else []
    none = np.zeros(0, np.int64)
    query_rows = np.concatenate([none, *(b.path[-b.own_rows :] for b in branches)])
    order = np.concatenate([none, *(rows.ravel() for rows, *_ in batches), query_rows])
    lengths = [(0, 0), *((b.own_rows, len(b.path)) for b in branches)]
    return Layout(
        batches=tuple((put(rows), put(mask), put(places)) for rows, mask, places in batches),
        blocks=tuple(block for i, b in enumerate(branches) for block in _blocks(i, b)),
        query_rows=put(query_rows),
        key_rows=put(np.concatenate([none, *(b.path for b in branches)])),
        path_lengths=[len(b.path) for b in branches],
        cumulative=put(np.cumsum(lengths, axis=0, dtype=np.int32).T.copy()),
        # The first index of each row counts: padding repeats a row.
        restore=put(np.unique(order, return_index=True)[1]) if batches else None,
        max_queries=max((b.own_rows for b in branches), default=0),
        max_keys=max(len(b.path) for s in segments for b in s.branches),
    )


def _blocks(number: int, branch: Branch) -> Iterator[QueryBlock]:
    """The branch's own rows, cut into blocks."""
    shared = len(branch.path) - branch.own_rows
    for start in range(0, branch.own_rows, BLOCK):
        end = min(start + BLOCK, branch.own_rows)
        yield QueryBlock(number, end - start, shared + end)


def _batched(
    batch: Sequence[tuple[int, Segment]],
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
    """Rows (B, S), padded with the segment's last row; tree masks (B, 1, S, S), 0 or −∞; places in paths."""
    longest = max(s.length for _, s in batch)
    index = np.stack([start + np.minimum(np.arange(longest), s.length - 1) for start, s in batch])
    mask = np.zeros((len(batch), 1, longest, longest), np.bool_)
    mask[:, :, :, 0] = True  # padding must attend to some row; the first is an ancestor of all
    places = np.zeros_like(index)
    for tree, place, (_, segment) in zip(mask[:, 0], places, batch, strict=True):
        for b in segment.branches:
            place[b.path] = np.arange(len(b.path))
            rows = np.ix_(b.path[-b.own_rows :], b.path)
            tree[rows] = np.tri(b.own_rows, len(b.path), len(b.path) - b.own_rows, dtype=np.bool_)
    return index, np.where(mask, np.float32(0), np.float32(-np.inf)), places


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
    times: PartTimes | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of transformers' layers: (1, T, Hq, D). `attention_mask` is None: no mask is registered."""
    if any(kwargs.get(name) is not None for name in UNSUPPORTED):
        raise ValueError(f"packed attention supports neither {' nor '.join(UNSUPPORTED)}")
    window = sliding_window if sliding_window and sliding_window < packed.max_keys else NO_WINDOW
    # Under autocast, norms and rotations of q and k return FP32; v comes straight from its linear layer.
    q, k, v = (x.squeeze(0).transpose(0, 1).to(value.dtype) for x in (query, key, value))  # (T, heads, D)
    with times.part(ATTENTION) if times else nullcontext():
        out = _attention(q, k, v, packed, scaling, window)
    if times:
        times.backward_of(ATTENTION, q, out)
    return out[None], None


def _attention(q: Tensor, k: Tensor, v: Tensor, packed: Layout, scaling: float, window: int) -> Tensor:
    """(T, Hq, D)."""
    kernel = flash_kernel()[0] if q.is_cuda and q.dtype in FLASH_DTYPES and not packed.batches else None
    if kernel is not None:
        return by_flash(kernel, q, k, v, packed, scaling, window)
    results = []
    for rows, mask, places in packed.batches:
        if window < NO_WINDOW:
            outside = places[:, None, :, None] - places[:, None, None, :] >= window
            mask = mask.masked_fill(outside, float("-inf"))
        results.append(_batch_attention(q, k, v, rows, mask, scaling))
    if packed.blocks:
        results += _block_attention(q, k, v, packed, scaling, window)
    out = torch.cat(results)
    return out if packed.restore is None else out.index_select(0, packed.restore)


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


def _block_attention(
    q: Tensor, k: Tensor, v: Tensor, packed: Layout, scaling: float, window: int
) -> Iterator[Tensor]:
    """(queries, Hq, D) of each block, in order. Tensors are split, not sliced: the gradient of a slice is as
    large as the tensor it was taken from."""
    (hk, d), g = k.shape[1:], q.shape[1] // k.shape[1]
    ordered = q if packed.restore is None else q.index_select(0, packed.query_rows)
    queries = ordered.reshape(-1, hk, g, d).split([block.queries for block in packed.blocks])
    keys, values = (
        [path.transpose(0, 1)[None] for path in gather(x, packed.key_rows).split(packed.path_lengths)]
        for x in (k, v)
    )
    causal = _causal(packed.max_keys, g, window, q.dtype, q.device)
    for block, qb in zip(packed.blocks, queries, strict=True):
        n, end = block.queries, block.keys
        first = packed.max_keys - 1 - end + n  # so that the last query attends to all `end` keys
        qb = qb.permute(1, 0, 2, 3).reshape(1, hk, n * g, d)
        kb, vb = (paths[block.branch][:, :, :end] for paths in (keys, values))
        mask = causal[: n * g, first : first + end]
        out = F.scaled_dot_product_attention(qb, kb, vb, attn_mask=mask, scale=scaling)
        yield out.view(hk, n, g, d).transpose(0, 1).reshape(n, hk * g, d)


@lru_cache(2)  # for layers with a sliding window, and for others
def _causal(max_keys: int, group: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(BLOCK · group, max_keys + BLOCK), 0 or −∞; every block's mask is a slice of it. Each row is repeated
    `group` times."""
    seen = torch.ones(BLOCK, max_keys + BLOCK, dtype=torch.bool, device=device).tril_(max_keys - 1)
    seen.triu_(max_keys - window)
    mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))
    return mask.repeat_interleave(group, 0)


def by_flash(
    kernel: Flash, q: Tensor, k: Tensor, v: Tensor, packed: Layout, scaling: float, window: int = NO_WINDOW
) -> Tensor:
    """(T, Hq, D) in one call. The branches' own rows, concatenated, are rows 0..T−1: no gather of queries."""
    keys, values = gather(k, packed.key_rows), gather(v, packed.key_rows)
    cu_queries, cu_keys = packed.cumulative
    lengths = Lengths(cu_queries, cu_keys, packed.max_queries, packed.max_keys)
    return kernel(q, keys, values, lengths, scaling, window)


def gather(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows], where a row may occur many times: a prompt's rows once for each completion."""
    out: Tensor = _Gather.apply(x, rows)
    return out


class _Gather(torch.autograd.Function):
    """A row's gradients are summed in FP32."""

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
def flash_kernel() -> tuple[Flash | None, str]:
    """The first variable-length flash kernel for this card that can be imported, None without any; and a line
    that says which it is, and why not one before it.

    A package is imported to find out: one that is found may not load, and the fourth generation alone is a
    package `flash_attn`, too. All of the kernels take fewer heads of keys and values than of queries.
    """
    failed = []
    card = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None
    for name, module, function, cards in KERNELS:
        if card is not None and card not in cards:
            continue
        try:
            kernel = getattr(importlib.import_module(module), function)
        except Exception as e:  # of any kind: a compiled extension that does not fit raises what it likes
            if not isinstance(e, ModuleNotFoundError) or e.name not in (module, module.partition(".")[0]):
                failed.append(f"{name} cannot be imported: {(str(e) or repr(e)).splitlines()[0]}")
            continue
        call = _call_torch if module.startswith("torch") else _call_flash_attn
        return partial(call, kernel), "; ".join([f"attention by {name}", *failed])
    return None, "; ".join(["attention by blocks of masked SDPA, for want of a flash kernel", *failed])


# In the order of their speed on Hopper, with the major compute capabilities that each is for: Ampere is 8,
# Hopper 9, Blackwell 10 and more.
KERNELS = (
    ("FlashAttention 3", "flash_attn_interface", "flash_attn_varlen_func", range(8, 10)),
    ("FlashAttention 4", "flash_attn.cute", "flash_attn_varlen_func", range(9, 12)),
    ("FlashAttention 2", "flash_attn", "flash_attn_varlen_func", range(8, 100)),
    ("torch.nn.attention.varlen", "torch.nn.attention.varlen", "varlen_attn", range(8, 100)),
)


def _call_flash_attn(
    kernel: Any, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scaling: float, window: int
) -> Tensor:
    limited = {"window_size": (window - 1, 0)} if window < NO_WINDOW else {}
    out = kernel(q, k, v, **lengths._asdict(), softmax_scale=scaling, causal=True, **limited)
    return out[0] if isinstance(out, tuple) else out  # some versions return the log-sums, too


def _call_torch(
    kernel: Any, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scaling: float, window: int
) -> Tensor:
    # torch 2.11 has no `enable_gqa`, and takes grouped keys and values all the same.
    grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(kernel).parameters else {}
    before = window - 1 if window < NO_WINDOW else -1
    return kernel(q, k, v, *lengths, scale=scaling, window_size=(before, 0), **grouped)


AttentionInterface.register("packed", packed_attention)
