"""'packed' attention for transformers: every token of a micro-batch attends to its own ancestors only.

transformers calls `packed_attention` in each layer with the `Layout` given to the model's forward. No mask
over the whole pack is ever built: short segments are batched into one SDPA call whose boolean mask is the
segment's tree; long ones go branch by branch, causally, along the branch's path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from trainer.packing import Segment

SHORT = 128  # rows up to which a segment is always batched: the mask is cheaper than more calls
LONGEST_MASK = 8192  # rows up to which a segment may have a mask (64 MiB)
UNSUPPORTED = ("softcap", "s_aux")  # what other model families ask of their attention


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the rows of a micro-batch go; made once, used by every layer."""

    batches: tuple[tuple[Tensor, Tensor], ...]  # rows (B, S) and mask (B, 1, S, S), True: attends
    paths: Tensor  # the rows of every branch's path, one path behind the other
    branches: tuple[tuple[int, int], ...]  # rows of its path, and how many of the last are the branch's own
    restore: Tensor  # (T,) where each row of the pack stands in the concatenated results
    longest: int  # tokens of the longest path


def layout(segments: Sequence[Segment]) -> Layout:
    """Decide for each segment how it is computed."""
    starts = np.cumsum([0, *(s.length for s in segments)])
    short: dict[int, list[tuple[int, Segment]]] = {}  # by size class, so that padding stays below half
    paths, branches, order = [], [], []
    for start, segment in zip(starts, segments, strict=False):
        by_branch = sum(len(b.path) ** 2 for b in segment.branches) / 2  # causal: half of the square
        masked = segment.length**2 <= by_branch and segment.length <= LONGEST_MASK
        if masked or segment.length <= SHORT:
            short.setdefault(max(segment.length, SHORT).bit_length(), []).append((start, segment))
        else:
            paths += [start + b.path for b in segment.branches]
            branches += [(len(b.path), b.own) for b in segment.branches]
    batches = []
    for batch in short.values():
        index, mask = _batched(batch)
        batches.append((torch.from_numpy(index), torch.from_numpy(mask)))
        order.append(index.ravel())
    order += [path[-own:] for path, (_, own) in zip(paths, branches, strict=True)]
    places = np.concatenate(order)
    restore = np.empty(starts[-1], np.int64)
    restore[places[::-1]] = np.arange(len(places))[::-1]  # padding repeats a row: its first place counts
    return Layout(
        tuple(batches),
        torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *paths])),
        tuple(branches),
        torch.from_numpy(restore),
        max(len(b.path) for s in segments for b in s.branches),
    )


def _batched(batch: Sequence[tuple[int, Segment]]) -> tuple[np.ndarray, np.ndarray]:
    """Rows (B, S), padded with the segment's last row, and the tree masks (B, 1, S, S)."""
    longest = max(s.length for _, s in batch)
    index = np.stack([start + np.minimum(np.arange(longest), s.length - 1) for start, s in batch])
    mask = np.zeros((len(batch), 1, longest, longest), np.bool_)
    mask[:, :, :, 0] = True  # padding must attend to something; a tree's first row is everyone's ancestor
    for one, (_, segment) in zip(mask, batch, strict=True):
        for b in segment.branches:
            rows = np.ix_(b.path[-b.own :], b.path)
            one[0][rows] = np.tri(b.own, len(b.path), len(b.path) - b.own, dtype=np.bool_)
    return index, mask


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
        sliding_window is not None and sliding_window < packed.longest
    ):
        raise ValueError(f"packed attention knows neither {', '.join(UNSUPPORTED)} nor a sliding window")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, heads, D)
    parts = [_batch_attention(q, k, v, rows, mask, scaling) for rows, mask in packed.batches]
    if packed.branches:
        parts += _branch_attention(q, k, v, packed, scaling)
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.index_select(0, packed.restore)[None], None


def _batch_attention(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """(B·S, Hq, D). Query heads of one KV head become further query rows, so K and V are not repeated."""
    (b, s), hk, d = rows.shape, k.shape[1], k.shape[2]
    g = q.shape[1] // hk
    flat = rows.reshape(-1)
    qb = q.index_select(0, flat).view(b, s, hk, g, d).permute(0, 2, 3, 1, 4).reshape(b, hk, g * s, d)
    kb, vb = (x.index_select(0, flat).view(b, s, hk, d).transpose(1, 2) for x in (k, v))
    out = F.scaled_dot_product_attention(qb, kb, vb, attn_mask=mask.repeat(1, 1, g, 1), scale=scaling)
    return out.view(b, hk, g, s, d).permute(0, 3, 1, 2, 4).reshape(b * s, hk * g, d)


def _branch_attention(q: Tensor, k: Tensor, v: Tensor, packed: Layout, scaling: float) -> Iterator[Tensor]:
    """(own, Hq, D) of each branch. Queries of the whole path, so that plain causal attention needs no mask."""
    sizes = [rows for rows, _ in packed.branches]
    # Gathered at once: the gradient of a gather is as large as all of q, k and v.
    gathered = (x.index_select(0, packed.paths).split(sizes) for x in (q, k, v))
    for *parts, (_, own) in zip(*gathered, packed.branches, strict=True):
        qb, kb, vb = (x.transpose(0, 1)[None] for x in parts)
        out = F.scaled_dot_product_attention(qb, kb, vb, is_causal=True, scale=scaling, enable_gqa=True)
        yield out[0, :, -own:].transpose(0, 1)


AttentionInterface.register("packed", packed_attention)
